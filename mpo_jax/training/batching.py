"""Episodes to fixed-shape rows: first-fit decreasing packing, then plain arrays."""

import zlib
from collections.abc import Sequence

import jax
import numpy as np

from mpo_jax.models.config import TransformerConfig
from mpo_jax.store.episode import Episode, read_experts
from mpo_jax.types import PADDING, Trajectories


def first_fit_decreasing(lengths: Sequence[int], capacity: int, max_items: int) -> list[list[int]]:
    """Packs items into rows: the longest first, each into the first row that still has room.

    Args:
      lengths: tokens of each item.
      capacity: tokens of a row.
      max_items: most items in a row.

    Returns:
      The indices of the items in each row.

    Raises:
      ValueError: an item is longer than a row; nothing is cut in silence.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] > capacity:
            raise ValueError(f"episode {index} has {lengths[index]} tokens; a row holds {capacity}")
        for row, members in enumerate(rows):
            if lengths[index] <= room[row] and len(members) < max_items:
                members.append(index)
                room[row] -= lengths[index]
                break
        else:
            rows.append([index])
            room.append(capacity - lengths[index])
    return rows


def pack(
    episodes: Sequence[Episode],
    *,
    row_tokens: int,
    row_sequences: int,
    row_multiple: int = 1,
    routed: TransformerConfig | None = None,
) -> tuple[Trajectories, np.ndarray]:
    """Lays episodes out in rows of one fixed shape.

    Args:
      episodes: as the store gave them; groups are told apart by `group_id`.
      row_tokens: T.
      row_sequences: S, most episodes in a row.
      row_multiple: B is rounded up to a multiple of it, with empty rows, so that few shapes are ever compiled.
      routed: the policy's shape where the experts of the rollout are wanted too.

    Returns:
      `Trajectories` of numpy arrays, and int[B,S] with the index of each episode's slot (-1 = none).

    Raises:
      ValueError: an episode is longer than a row; nothing is cut in silence.
    """
    for e in episodes:
        if len(e.tokens) > row_tokens:
            raise ValueError(f"episode {e.episode_id} has {len(e.tokens)} tokens, a row holds row_tokens={row_tokens}")
    layout = first_fit_decreasing([len(e.tokens) for e in episodes], row_tokens, row_sequences)
    num_rows = -(-max(len(layout), 1) // row_multiple) * row_multiple
    slots = np.full((num_rows, row_sequences), -1)
    batch = empty(num_rows, row_tokens, row_sequences, routed and (routed.expert_layers, routed.experts_per_token))
    groups = {group: index for index, group in enumerate(dict.fromkeys(e.group_id for e in episodes))}
    for row, members in enumerate(layout):
        start, first_turn = 0, 0
        for slot, index in enumerate(members):
            episode = episodes[index]
            _write(batch, row, slot, start, first_turn, episode)
            if routed is not None:
                found = read_experts(episode, batch.experts.shape[2:], routed.num_experts, routed.expert_id_type)
                batch.experts[row, start : start + len(found)] = found
            batch.group_ids[row, slot] = groups[episode.group_id]
            slots[row, slot] = index
            start += len(episode.tokens)
            first_turn += len(episode.rewards)
    return batch, slots


def padded(batch: Trajectories, slots: np.ndarray, rows: int) -> tuple[Trajectories, np.ndarray]:
    """What `pack` returned, with so many rows, of which more are padding."""
    more = rows - len(slots)
    if not more:
        return batch, slots
    experts = None if batch.experts is None else batch.experts.shape[2:]
    padding = empty(more, batch.tokens.shape[1], slots.shape[1], experts)
    batch = jax.tree.map(lambda *parts: np.concatenate(parts), batch, padding)
    return batch, np.pad(slots, ((0, more), (0, 0)), constant_values=-1)


def empty(rows: int, tokens: int, sequences: int, experts: tuple[int, int] | None = None) -> Trajectories:
    """A batch of padding, with room for (L, k) experts a token if asked for."""

    def full(value, dtype):
        return np.full((rows, tokens), value, dtype)

    return Trajectories(
        tokens=full(0, np.int32),
        positions=full(0, np.int32),
        sequence_ids=full(PADDING, np.int32),
        turn_ids=full(PADDING, np.int32),
        action_mask=full(False, bool),
        executable_mask=full(False, bool),
        rewards=full(0, np.float32),
        behavior_logprobs=full(0, np.float32),
        state_ids=full(PADDING, np.int32),
        group_ids=np.full((rows, sequences), PADDING, np.int32),
        truncated=np.zeros((rows, sequences), bool),
        policy_version=np.zeros((rows, sequences), np.int32),
        experts=None if experts is None else np.full((rows, tokens, *experts), PADDING, np.int16),
    )


def _write(batch: Trajectories, row: int, slot: int, start: int, first_turn: int, episode: Episode) -> None:
    """Writes one episode into its span of a row."""
    span = slice(start, start + len(episode.tokens))
    turn_ids, mask = np.array(episode.turn_ids), np.array(episode.action_mask, bool)
    batch.tokens[row, span] = episode.tokens
    batch.positions[row, span] = np.arange(len(episode.tokens))
    batch.sequence_ids[row, span] = slot
    batch.turn_ids[row, span] = first_turn + turn_ids
    batch.action_mask[row, span] = mask
    batch.executable_mask[row, span] = episode.executable_mask
    batch.behavior_logprobs[row, span] = np.where(mask, episode.logprobs, 0.0)
    batch.state_ids[row, span] = np.array(episode.state_ids)[turn_ids]
    for turn, reward in enumerate(episode.rewards):
        last = np.flatnonzero(mask & (turn_ids == turn))[-1:]  # empty for a turn without an action
        batch.rewards[row, start + last] = reward
    batch.truncated[row, slot] = episode.end_reason != "terminated"
    batch.policy_version[row, slot] = min(episode.versions)


def fill(batch: Trajectories) -> float:
    """The share of a batch's tokens that are not padding."""
    return float((batch.sequence_ids != PADDING).mean())


def row_order(seed: int, step: int, epoch: int, num_rows: int) -> np.ndarray:
    """The seeded order in which an epoch visits the rows, the same on every process and after every resume."""
    return np.random.default_rng((seed, step, epoch, zlib.crc32(b"rows"))).permutation(num_rows)
