"""Episodes of `verifiers`: rows of `results.jsonl` (0.1) and of `traces.jsonl` (v1), as transcripts."""

from typing import Any

import msgspec

from mpo_jax.scoring.formats import ChatMessage, as_message, prompt_name
from mpo_jax.scoring.transcripts import InvalidTranscript, Tokens, Transcript


class _TurnTokens(msgspec.Struct):
    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]


class _Turn(msgspec.Struct):
    tokens: _TurnTokens | None = None


class _Result(msgspec.Struct):
    prompt: str | list[ChatMessage]
    completion: str | list[ChatMessage]
    example_id: str | int | None = None
    reward: float | None = None
    trajectory: list[_Turn] | None = None


class _Node(msgspec.Struct):
    message: ChatMessage
    parent: int | None = None
    sampled: bool = False
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    reference_logprobs: list[float] | None = None


class _Reward(msgspec.Struct):
    score: float
    weight: float = 1.0


class _Task(msgspec.Struct, frozen=True):
    """What names a task stands in its data, or beside it."""

    id: str | int | None = None
    idx: str | int | None = None
    name: str | int | None = None
    data: "_Task | None" = None


class _Trace(msgspec.Struct):
    nodes: list[_Node]
    task: _Task = _Task()
    id: str | None = None
    rewards: dict[str, _Reward | None] = {}


def from_verifiers(raw: Any, name: str) -> Transcript:
    """A row of `results.jsonl` (0.1), or of `traces.jsonl` (v1), whose `nodes` tell it apart."""
    if isinstance(raw, dict) and "nodes" in raw:
        return _from_trace(msgspec.convert(raw, _Trace), name)
    row = msgspec.convert(raw, _Result)
    prompt, completion = (
        [ChatMessage(role=role, content=part)] if isinstance(part, str) else part
        for part, role in ((row.prompt, "user"), (row.completion, "assistant"))
    )
    messages = [as_message(m, False) for m in prompt] + [as_message(m, m.role == "assistant") for m in completion]
    tokens = None
    turns = [turn.tokens for turn in row.trajectory or () if turn.tokens is not None]
    for number, turn in enumerate(turns):
        sizes = [len(x) for x in (turn.completion_ids, turn.completion_mask, turn.completion_logprobs)]
        if len(set(sizes)) > 1:
            raise InvalidTranscript(f"turn {number}: ids, mask and log-probs of its completion have lengths {sizes}")
    actions = [index for index, message in enumerate(messages) if message.action]
    if turns and len(turns) == len(actions):
        tokens = _join(turns, actions)
        for index, turn in zip(actions, turns, strict=True):
            pairs = zip(turn.completion_logprobs, turn.completion_mask, strict=True)
            messages[index] = msgspec.structs.replace(messages[index], logprobs=[x for x, kept in pairs if kept])
    task_id = prompt_name(messages) if row.example_id is None else str(row.example_id)
    return Transcript(name, task_id, messages, row.reward, tokens=tokens)


def _from_trace(row: _Trace, name: str) -> Transcript:
    """The branch that ends with the last node; other branches of the tree are left out."""
    path, node = [], len(row.nodes) - 1
    while node is not None and 0 <= node < len(row.nodes) and len(path) < len(row.nodes):
        path.insert(0, row.nodes[node])
        node = row.nodes[node].parent
    messages, ids, owners, mask = [], [], [], []
    for index, node in enumerate(path):
        message = as_message(node.message, node.sampled)
        if node.sampled and node.logprobs:
            message = msgspec.structs.replace(
                message, logprobs=node.logprobs, ref_logprobs=node.reference_logprobs or None
            )
        messages.append(message)
        ids += node.token_ids
        owners += [index] * len(node.token_ids)
        mask += node.mask or [False] * len(node.token_ids)
    data = row.task.data or row.task
    named = next((name for name in (data.id, data.idx, data.name) if name is not None), None)
    rewards = [reward.score * reward.weight for reward in row.rewards.values() if reward is not None]
    return Transcript(
        episode_id=row.id or name,
        task_id=prompt_name(messages) if named is None else str(named),
        messages=messages,
        reward=sum(rewards) if rewards else None,
        tokens=Tokens(ids, owners, mask) if any(mask) else None,
    )


def _join(turns: list[_TurnTokens], actions: list[int]) -> Tokens | None:
    """One run of ids over all turns; None where a turn's prompt does not go on from the turn before."""
    ids, owners, mask = [], [], []
    for turn, action in zip(turns, actions, strict=True):
        if turn.prompt_ids[: len(ids)] != ids:
            return None
        fresh = turn.prompt_ids[len(ids) :] + turn.completion_ids
        mask += [False] * (len(fresh) - len(turn.completion_ids)) + [bool(kept) for kept in turn.completion_mask]
        owners += [action] * len(fresh)
        ids = ids + fresh
    return Tokens(ids, owners, mask)
