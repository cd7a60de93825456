"""What other people's files look like, and each of their episodes as a transcript.

Only the fields that are used are declared; unknown ones are ignored. Formats: OpenAI's chat messages; τ-bench v1
(arXiv:2406.12045); τ²-bench (arXiv:2506.07982); `verifiers` 0.1 results and v1 traces; Who&When (arXiv:2505.00212).
"""

import json
import re
import zlib
from typing import Any

import msgspec

from mpo_jax.scoring.transcripts import InvalidTranscript, Message, Mistake, Tokens, Transcript
from mpo_jax.store.episode import Episode


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    """OpenAI's nest name and arguments in `function`, τ²-bench's and verifiers' do not."""

    function: _Function | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _ChoiceLogprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    name: str | None = None
    weight: float = 1.0  # OpenAI's mark of an assistant message that only sets the scene: 0
    logprobs: list[float] | _ChoiceLogprobs | None = None
    ref_logprobs: list[float] | None = None
    score: float | None = None


class _Row(msgspec.Struct):
    messages: list[_Message]
    id: str | int | None = None
    task_id: str | int | None = None
    reward: float | None = None
    answer: str | None = None
    scores: dict[str, float] = {}


class _TauBench(msgspec.Struct):
    task_id: str | int
    reward: float
    traj: list[_Message]
    trial: int = 0


class _RewardInfo(msgspec.Struct):
    reward: float


class _Tau2(msgspec.Struct):
    task_id: str | int
    messages: list[_Message]
    id: str | int | None = None
    trial: int | None = None
    reward_info: _RewardInfo | None = None


class _TurnTokens(msgspec.Struct):
    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]


class _Turn(msgspec.Struct):
    tokens: _TurnTokens | None = None


class _Result(msgspec.Struct):
    prompt: str | list[_Message]
    completion: str | list[_Message]
    example_id: str | int | None = None
    reward: float | None = None
    trajectory: list[_Turn] | None = None


class _Node(msgspec.Struct):
    message: _Message
    parent: int | None = None
    sampled: bool = False
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    reference_logprobs: list[float] | None = None


class _Reward(msgspec.Struct):
    score: float
    weight: float = 1.0


class _Trace(msgspec.Struct):
    nodes: list[_Node]
    task: dict[str, Any] = {}
    id: str | None = None
    rewards: dict[str, _Reward | None] = {}


class _Utterance(msgspec.Struct):
    content: str
    role: str
    name: str | None = None


class _Failure(msgspec.Struct):
    history: list[_Utterance]
    mistake_agent: str
    mistake_step: str | int
    question_ID: str | None = None


def from_messages(raw: Any, name: str) -> Transcript:
    """A row `{messages, id?, task_id?, reward?, answer?, scores?}`, or the bare list of messages.

    Actions are the assistant's messages, those of weight 0 left out. Without a `task_id` the attempts at one task are
    those whose messages before the first action are the same.
    """
    row = msgspec.convert({"messages": raw} if isinstance(raw, list) else raw, _Row)
    messages = [_message(m, m.role == "assistant" and m.weight != 0) for m in row.messages]
    return Transcript(
        episode_id=name if row.id is None else str(row.id),
        task_id=_prompt_name(messages) if row.task_id is None else str(row.task_id),
        messages=messages,
        reward=row.reward,
        answer=row.answer,
        scores=row.scores,
    )


def from_tau_bench(raw: Any, name: str) -> Transcript:
    """An item of a τ-bench v1 result file."""
    row = msgspec.convert(raw, _TauBench)
    messages = [_message(m, m.role == "assistant") for m in row.traj]
    return Transcript(f"{row.task_id}-{row.trial}", str(row.task_id), messages, row.reward)


def from_tau2(raw: Any, name: str) -> Transcript:
    """A simulation of a τ²-bench result file; without a `reward_info` it has no reward."""
    row = msgspec.convert(raw, _Tau2)
    messages = [_message(m, m.role == "assistant") for m in row.messages]
    reward = None if row.reward_info is None else row.reward_info.reward
    return Transcript(name if row.id is None else str(row.id), str(row.task_id), messages, reward)


def from_verifiers(raw: Any, name: str) -> Transcript:
    """A row of `results.jsonl` (0.1), or of `traces.jsonl` (v1), whose `nodes` tell it apart."""
    if isinstance(raw, dict) and "nodes" in raw:
        return _from_trace(msgspec.convert(raw, _Trace), name)
    row = msgspec.convert(raw, _Result)
    prompt, completion = (
        [_Message(role=role, content=part)] if isinstance(part, str) else part
        for part, role in ((row.prompt, "user"), (row.completion, "assistant"))
    )
    messages = [_message(m, False) for m in prompt] + [_message(m, m.role == "assistant") for m in completion]
    tokens = None
    turns = [turn.tokens for turn in row.trajectory or () if turn.tokens is not None]
    actions = [index for index, message in enumerate(messages) if message.action]
    if turns and len(turns) == len(actions):
        tokens = _join(turns, actions)
        for index, turn in zip(actions, turns, strict=True):
            pairs = zip(turn.completion_logprobs, turn.completion_mask, strict=False)
            messages[index] = msgspec.structs.replace(messages[index], logprobs=[x for x, kept in pairs if kept])
    task_id = _prompt_name(messages) if row.example_id is None else str(row.example_id)
    return Transcript(name, task_id, messages, row.reward, tokens=tokens)


def from_who_and_when(raw: Any, name: str) -> Transcript:
    """A failed multi-agent episode with its labelled mistake.

    Every utterance that says something is an action, but for the question that a person asks first. Generated files
    name the agent in `name`; hand-crafted ones in `role`, with a remark in parentheses that is no part of the name.
    """
    row = msgspec.convert(raw, _Failure)
    messages = [
        Message(
            role=m.name or m.role,
            text=m.content,
            action=bool(m.content.strip()) and m.role != "human",
            agent=re.sub(r"\s*\(.*\)$", "", m.name or m.role),
        )
        for m in row.history
    ]
    if not re.fullmatch(r"\s*\d+\s*", str(row.mistake_step)):
        raise InvalidTranscript(f"mistake_step is {row.mistake_step!r}, expected a whole number")
    mistake = Mistake(agent=row.mistake_agent, step=int(row.mistake_step))
    return Transcript(name, row.question_ID or name, messages, mistake=mistake)


def from_store(episode: Episode, name: str) -> Transcript:
    """An episode of our own store: an observation and an action a turn; the reward is the sum over the turns."""
    texts = [episode.metadata.get(key, []) for key in ("observations", "actions")]
    messages, sampled = [], [[] for _ in episode.rewards]
    for turn, logprob, mask in zip(episode.turn_ids, episode.logprobs, episode.action_mask, strict=True):
        if mask:
            sampled[turn].append(logprob)
    for turn in range(len(episode.rewards)):
        observation, action = (text[turn] if turn < len(text) else "" for text in texts)
        messages += [
            Message("user", observation, False),
            Message("assistant", action, True, logprobs=sampled[turn]),
        ]
    pairs = list(zip(episode.turn_ids, episode.action_mask, strict=True))
    return Transcript(
        episode_id=episode.episode_id,
        task_id=episode.task_id,
        messages=messages,
        reward=sum(episode.rewards),
        tokens=Tokens(ids=episode.tokens, messages=[2 * t + m for t, m in pairs], mask=[m for _, m in pairs]),
    )


def _from_trace(row: _Trace, name: str) -> Transcript:
    """The branch that ends with the last node; other branches of the tree are left out."""
    path, node = [], len(row.nodes) - 1
    while node is not None and 0 <= node < len(row.nodes) and len(path) < len(row.nodes):
        path.insert(0, row.nodes[node])
        node = row.nodes[node].parent
    messages, ids, owners, mask = [], [], [], []
    for index, node in enumerate(path):
        message = _message(node.message, node.sampled)
        if node.sampled and node.logprobs:
            message = msgspec.structs.replace(
                message, logprobs=node.logprobs, ref_logprobs=node.reference_logprobs or None
            )
        messages.append(message)
        ids += node.token_ids
        owners += [index] * len(node.token_ids)
        mask += node.mask or [False] * len(node.token_ids)
    data = row.task.get("data") or row.task
    named = next((data[key] for key in ("id", "idx", "name") if data.get(key) is not None), None)
    rewards = [reward.score * reward.weight for reward in row.rewards.values() if reward is not None]
    return Transcript(
        episode_id=row.id or name,
        task_id=_prompt_name(messages) if named is None else str(named),
        messages=messages,
        reward=sum(rewards) if rewards else None,
        tokens=Tokens(ids, owners, mask) if any(mask) else None,
    )


def _message(m: _Message, action: bool) -> Message:
    logprobs = m.logprobs
    if isinstance(logprobs, _ChoiceLogprobs):
        logprobs = None if logprobs.content is None else [token.logprob for token in logprobs.content]
    return Message(
        role=m.role,
        text=_text(m),
        action=action,
        agent=m.name or m.role,
        logprobs=logprobs,
        ref_logprobs=m.ref_logprobs,
        score=m.score,
    )


def _text(m: _Message) -> str:
    """Reasoning, content, then each tool call as name(arguments)."""
    content = m.content
    if isinstance(content, list):  # parts; those that are not text cannot be scored
        content = "".join(str(part.get("text", "")) for part in content)
    calls = []
    for call in m.tool_calls or ():
        called = call.function or call
        arguments = called.arguments if isinstance(called.arguments, str) else json.dumps(called.arguments or {})
        calls.append(f"{called.name}({arguments})")
    return "\n".join(part for part in (m.reasoning_content, content, *calls) if part)


def _prompt_name(messages: list[Message]) -> str:
    """A name of what precedes the first action."""
    first = next((index for index, message in enumerate(messages) if message.action), len(messages))
    prompt = "\0".join(f"{message.role}\0{message.text}" for message in messages[:first])
    return f"prompt-{zlib.crc32(prompt.encode()):08x}"


def _join(turns: list[_TurnTokens], actions: list[int]) -> Tokens | None:
    """One run of ids over all turns; None where a turn's prompt does not go on from the turn before."""
    ids, owners, mask = [], [], []
    for turn, action in zip(turns, actions, strict=True):
        if turn.prompt_ids[: len(ids)] != ids or len(turn.completion_mask) != len(turn.completion_ids):
            return None
        fresh = turn.prompt_ids[len(ids) :] + turn.completion_ids
        mask += [False] * (len(fresh) - len(turn.completion_ids)) + [bool(kept) for kept in turn.completion_mask]
        owners += [action] * len(fresh)
        ids = ids + fresh
    return Tokens(ids, owners, mask)
