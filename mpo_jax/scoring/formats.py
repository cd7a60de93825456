"""What other people's files look like, and each of their episodes as a transcript.

Only the fields that are used are declared; unknown ones are ignored. Formats: OpenAI's chat messages; τ-bench v1
(arXiv:2406.12045); τ²-bench (arXiv:2506.07982); Who&When (arXiv:2505.00212); `verifiers` has a file of its own.
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


class ChatMessage(msgspec.Struct):
    """A message as OpenAI's, τ-bench's and verifiers' files have it."""

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
    messages: list[ChatMessage]
    id: str | int | None = None
    task_id: str | int | None = None
    reward: float | None = None
    answer: str | None = None
    scores: dict[str, float] = {}


class _TauBench(msgspec.Struct):
    task_id: str | int
    reward: float
    traj: list[ChatMessage]
    trial: int = 0


class _RewardInfo(msgspec.Struct):
    reward: float


class _Tau2(msgspec.Struct):
    task_id: str | int
    messages: list[ChatMessage]
    id: str | int | None = None
    trial: int | None = None
    reward_info: _RewardInfo | None = None


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
    messages = [as_message(m, m.role == "assistant" and m.weight != 0) for m in row.messages]
    return Transcript(
        episode_id=name if row.id is None else str(row.id),
        task_id=prompt_name(messages) if row.task_id is None else str(row.task_id),
        messages=messages,
        reward=row.reward,
        answer=row.answer,
        scores=row.scores,
    )


def from_tau_bench(raw: Any, name: str) -> Transcript:
    """An item of a τ-bench v1 result file."""
    row = msgspec.convert(raw, _TauBench)
    messages = [as_message(m, m.role == "assistant") for m in row.traj]
    return Transcript(f"{row.task_id}-{row.trial}", str(row.task_id), messages, row.reward)


def from_tau2(raw: Any, name: str) -> Transcript:
    """A simulation of a τ²-bench result file; without a `reward_info` it has no reward."""
    row = msgspec.convert(raw, _Tau2)
    messages = [as_message(m, m.role == "assistant") for m in row.messages]
    reward = None if row.reward_info is None else row.reward_info.reward
    return Transcript(name if row.id is None else str(row.id), str(row.task_id), messages, reward)


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
    """An episode of our own store: an observation and an action a turn.

    The reward is the sum over the turns; the answer is the last action, unless a limit cut the episode.
    """
    texts = [_texts(episode, key) for key in ("observations", "actions")]
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
        answer=(messages[-1].text or None) if messages and episode.end_reason == "terminated" else None,
        tokens=Tokens(ids=episode.tokens, messages=[2 * t + m for t, m in pairs], mask=[m for _, m in pairs]),
    )


def _texts(episode: Episode, key: str) -> list[str]:
    """Its metadata is anybody's: what is no list of texts there is none."""
    found = episode.metadata.get(key)
    return list(map(str, found)) if isinstance(found, list) else []


def as_message(m: ChatMessage, action: bool) -> Message:
    """The same as a scorer sees it."""
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


def _text(m: ChatMessage) -> str:
    """Reasoning, content, then each tool call as name(arguments)."""
    content = m.content
    if isinstance(content, list):  # parts; those that are not text cannot be scored
        content = "".join(str(part.get("text") or "") for part in content)
    calls = []
    for call in m.tool_calls or ():
        called = call.function or call
        arguments = called.arguments if isinstance(called.arguments, str) else json.dumps(called.arguments or {})
        calls.append(f"{called.name}({arguments})")
    return "\n".join(part for part in (m.reasoning_content, content, *calls) if part)


def prompt_name(messages: list[Message]) -> str:
    """A name of what precedes the first action."""
    first = next((index for index, message in enumerate(messages) if message.action), len(messages))
    prompt = "\0".join(f"{message.role}\0{message.text}" for message in messages[:first])
    return f"prompt-{zlib.crc32(prompt.encode()):08x}"
