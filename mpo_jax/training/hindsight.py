"""Privileged hindsight for TASPO: how likely the same actions look to a policy that reads what siblings found.

See *TASPO* (arXiv:2608.31077); METHODS: an item is (guidance, condition, evidence).
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from mpo_jax.store.episode import Episode
from mpo_jax.training.batching import pack
from mpo_jax.types import Trajectories

Guidance = Callable[[str], list[int]]  # an item's text -> the ids that the policy reads before an observation


def guidance_items(episodes: Sequence[Episode], index: int) -> list[str | None]:
    """What successful siblings did in the states that an episode met.

    Condition: the sibling acted on the same state. Guidance: its action there; of several, the one with the most
    evidence (siblings in favour), then the first. The episode's own return is not looked at.

    Args:
      episodes: of one or more groups, with their actions in `metadata["actions"]`.
      index: of the episode to be guided.

    Returns:
      One item a turn, None where no successful sibling has met the state.
    """
    episode = episodes[index]
    votes: dict[int, dict[str, int]] = {}
    for other, sibling in enumerate(episodes):
        if other == index or sibling.group_id != episode.group_id or not sum(sibling.rewards) > 0:
            continue
        for state, action in dict(zip(sibling.state_ids, sibling.metadata["actions"], strict=True)).items():
            tally = votes.setdefault(state, {})
            tally[action] = tally.get(action, 0) + 1
    return [max(votes[s], key=votes[s].get) if s in votes else None for s in episode.state_ids]


def with_guidance(episode: Episode, items: Sequence[str | None], guidance: Guidance) -> Episode:
    """The episode as the policy would have read it with each item before its turn's observation; same actions."""
    turn_ids = np.array(episode.turn_ids)
    tokens, mask, ids = [], [], []
    for turn, item in enumerate(items):
        extra = [] if item is None else guidance(item)
        span = np.flatnonzero(turn_ids == turn)
        tokens += extra + [episode.tokens[i] for i in span]
        mask += [False] * len(extra) + [episode.action_mask[i] for i in span]
        ids += [turn] * (len(extra) + len(span))
    return msgspec.structs.replace(
        episode, tokens=tokens, action_mask=mask, executable_mask=mask, turn_ids=ids, logprobs=[0.0] * len(tokens)
    )


def privileged_logprobs(
    logprobs_of: Callable[[Trajectories], np.ndarray],
    episodes: Sequence[Episode],
    batch: Trajectories,
    slots: np.ndarray,
    logprobs: np.ndarray,
    guidance: Guidance,
    *,
    row_tokens: int,
    row_multiple: int,
) -> np.ndarray:
    """log π(action | guidance, history) of every action token; without an item for its turn, `logprobs` itself.

    Later turns also read the items of earlier ones, as one sequence an episode.

    Args:
      logprobs_of: evaluates the frozen rollout policy on a batch, [B,T].
      episodes: as packed in `batch`.
      batch, slots: what `pack` returned for them.
      logprobs: without guidance, [B,T].
      guidance: renders an item.
      row_tokens, row_multiple: of the longer rows that the guided episodes are packed in.

    Returns:
      float32[B,T].
    """
    items = [guidance_items(episodes, index) for index in range(len(episodes))]
    guided = [with_guidance(e, i, guidance) for e, i in zip(episodes, items, strict=True)]
    other, other_slots = pack(guided, row_tokens=row_tokens, row_sequences=slots.shape[1], row_multiple=row_multiple)
    found = np.asarray(logprobs_of(other))
    result = np.array(logprobs)
    for index in range(len(episodes)):
        here, there = (_actions(b, s, index) for b, s in ((batch, slots), (other, other_slots)))
        turns = np.array(episodes[index].turn_ids)[episodes[index].action_mask]
        has_item = np.array([item is not None for item in items[index]])
        result[here] = np.where(has_item[turns], found[there], result[here])
    return result


def _actions(batch: Trajectories, slots: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the action tokens of an episode lie, as (rows, columns)."""
    (row,), (slot,) = np.nonzero(slots == index)
    columns = np.flatnonzero((batch.sequence_ids[row] == slot) & batch.action_mask[row])
    return np.full(len(columns), row), columns
