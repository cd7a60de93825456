"""Episodes in the results format of `verifiers` (0.1): a folder with `results.jsonl` and `metadata.json`.

A row has the messages and the reward, which its viewers show; the state column `trajectory` has the ids, masks and
log-probabilities of each turn, as its environments save them with `state_columns=["trajectory"]`. What the format has
no place for is in the row's `info["mpo_jax"]`, so that our own episodes come back as they were.
"""

import base64
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpo_jax.store.episode import RECORD_VERSION, Episode, InvalidEpisode
from mpo_jax.store.export import Damaged, from_plain, parse_json, read_lines, written_whole

_OWN = "mpo_jax"
_CARRIED = ("episode_id", "task_id", "executable_mask", "state_ids", "versions", "end_reason", "metadata")


def write_results(episodes: Iterable[Episode], folder: str | os.PathLike, *, environment: str, model: str) -> int:
    """Writes `results.jsonl`, a row an episode, and `metadata.json`.

    Args:
      episodes: to write.
      folder: made if absent.
      environment: written as `env_id`.
      model: written as `model`.

    Returns:
      The number of rows.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rewards: dict[int, list[float]] = {}
    with written_whole(folder / "results.jsonl") as beside, beside.open("w") as file:
        for episode in episodes:
            row = to_row(episode)
            rewards.setdefault(episode.group_id, []).append(row["reward"])
            file.write(json.dumps(_without_nan(row)) + "\n")
    total = sum(map(len, rewards.values()))
    finite = [r for group in rewards.values() for r in group if math.isfinite(r)]
    metadata = {
        "env_id": environment,
        "env_args": {},
        "model": model,
        "num_examples": len(rewards),
        "rollouts_per_example": max(map(len, rewards.values()), default=0),
        "avg_reward": sum(finite) / len(finite) if finite else 0.0,
        "state_columns": ["trajectory"],
    }
    with written_whole(folder / "metadata.json") as beside:
        beside.write_text(json.dumps(metadata, indent=2) + "\n")
    return total


def read_results(folder: str | os.PathLike, vocab_size: int | None = None) -> Iterator[Episode | Damaged]:
    """Yields the episode of each row of a folder's `results.jsonl`, or what is wrong with it.

    Args:
      folder: that `write_results` or `verifiers` wrote.
      vocab_size: ids from it on are refused; None where the model is not known.
    """
    path = Path(folder) / "results.jsonl"
    for number, line in read_lines(path):
        try:
            yield from_row(parse_json(line), number, vocab_size)
        except InvalidEpisode as error:
            yield Damaged(number, f"{path} line {number + 1}: {error}", line)


def to_row(episode: Episode) -> dict[str, Any]:
    """The row of an episode."""
    observations, actions = (_texts(episode, name) for name in ("observations", "actions"))
    turns = len(episode.rewards)
    ends = np.cumsum(np.bincount(episode.turn_ids, minlength=turns)).tolist() if episode.tokens else []
    steps = []
    for turn, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        mask = episode.action_mask[begin:end]
        first = begin + (mask.index(True) if True in mask else len(mask))
        said = [{"role": "assistant", "content": actions[turn] if turn < len(actions) else ""}]
        read = [{"role": "user", "content": observations[turn] if turn < len(observations) else ""}]
        tokens = {
            "prompt_ids": episode.tokens[:first],
            "prompt_mask": [0] * first,
            "completion_ids": episode.tokens[first:end],
            "completion_mask": [int(flag) for flag in episode.action_mask[first:end]],
            "completion_logprobs": episode.logprobs[first:end],
        }
        steps.append(
            {"prompt": read, "completion": said, "tokens": tokens, "reward": episode.rewards[turn], "advantage": None}
        )
    messages = [message for step in steps for message in (*step["prompt"], *step["completion"])]
    carried = {name: getattr(episode, name) for name in _CARRIED} | {"record": RECORD_VERSION}
    carried |= {"experts": base64.b64encode(episode.experts).decode()} if episode.experts else {}
    error = episode.metadata.get("error")
    return {
        "example_id": episode.group_id,
        "prompt": messages[:1],
        "completion": messages[1:],
        "answer": str(episode.metadata.get("answer", "")),
        "info": {"task_id": episode.task_id, _OWN: carried},
        "reward": float(sum(episode.rewards)),
        "error": error and {"error": str(error), "error_chain_repr": str(error), "error_chain_str": str(error)},
        "is_completed": episode.end_reason == "terminated",
        "is_truncated": episode.end_reason != "terminated",
        "stop_condition": episode.end_reason,
        "metrics": {},
        "trajectory": steps,
    }


def from_row(row: Any, number: int, vocab_size: int | None = None) -> Episode:
    """The episode of a row, ours or another's.

    Of another's, a turn's weights count as version 0, its state as one of its own, and the row's reward as that of the
    last turn where the turns have none.

    Args:
      row: as `to_row` or `verifiers` made it.
      number: of the row; part of the name of an episode that has none.
      vocab_size: see `read_results`.

    Raises:
      InvalidEpisode: a field is missing or wrong; there are no token ids; or a turn's prompt does not go on from what
        came before it, so that no single sequence was ever read by the policy.
    """
    try:
        steps = row["trajectory"]
        fields = _sequence(steps)
        rewards = [step.get("reward") for step in steps]
        own = row.get("info", {}).get(_OWN)
        if own is None:
            if steps and all(reward is None for reward in rewards):
                rewards[-1] = row["reward"]
            rewards = [reward or 0.0 for reward in rewards]
            end = "truncated" if row.get("is_truncated") else "terminated"
            metadata = {name: row[name] for name in ("answer", "stop_condition") if isinstance(row.get(name), str)}
            own = {
                "episode_id": f"{row['example_id']}-{number}",
                "task_id": str(row["example_id"]),
                "executable_mask": fields["action_mask"],
                "state_ids": list(range(len(steps))),
                "versions": [0] * len(steps),
                "end_reason": end,
                "metadata": metadata,
            }
        fields |= own | {"group_id": row["example_id"], "rewards": rewards}
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidEpisode(
            f"no row of results with `trajectory` and its token ids: {type(error).__name__} {error}"
        ) from error
    return from_plain(fields, vocab_size)


def _sequence(steps: list[dict]) -> dict[str, list]:
    """One append-only sequence from the turns' prompts and completions."""
    found: dict[str, list] = {"tokens": [], "action_mask": [], "turn_ids": [], "logprobs": []}
    for turn, step in enumerate(steps):
        tokens = step["tokens"]
        prompt, completion = tokens["prompt_ids"], tokens["completion_ids"]
        known = len(found["tokens"])
        if prompt[:known] != found["tokens"]:
            raise InvalidEpisode(
                f"turn {turn}: its prompt of {len(prompt)} ids does not begin with the {known} ids before it"
            )
        sizes = [len(tokens[f"completion_{name}"]) for name in ("ids", "mask", "logprobs")]
        if len(set(sizes)) > 1:
            raise InvalidEpisode(f"turn {turn}: ids, mask and log-probs of its completion have lengths {sizes}")
        read = len(prompt) - known
        sampled = [bool(flag) for flag in tokens["completion_mask"]]
        logprobs = zip(tokens["completion_logprobs"], sampled, strict=True)
        found["tokens"] += prompt[known:] + completion
        found["action_mask"] += [False] * read + sampled
        found["turn_ids"] += [turn] * (read + len(completion))
        found["logprobs"] += [0.0] * read + [logprob if flag else 0.0 for logprob, flag in logprobs]
    return found


def _texts(episode: Episode, name: str) -> list[str]:
    texts = episode.metadata.get(name, [])
    return texts if isinstance(texts, list) else []


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: null stands for it."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
