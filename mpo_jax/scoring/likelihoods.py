"""What a model says of the actions in many episodes: packed rows of few shapes, the head over action tokens only."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpo_jax import kernels
from mpo_jax.models.transformer import Transformer, TransformerConfig
from mpo_jax.scoring.transcripts import Tokens
from mpo_jax.types import PADDING

SMALLEST_ROW = 256
SMALLEST_HEAD = 128


class Likelihoods(NamedTuple):
    """Of the n action tokens of an episode, float32[n] each; NaN where the source cannot say.

    Attributes:
      logprobs: log π of the token.
      entropy: of the distribution that it was drawn from.
      top: mean of that distribution's k highest log-probs.
      certainty: KL(uniform ‖ that distribution).
    """

    logprobs: np.ndarray
    entropy: np.ndarray
    top: np.ndarray
    certainty: np.ndarray


class Row(NamedTuple):
    """A row of T tokens and the episodes in it."""

    capacity: int
    members: list[int]


def pack_rows(lengths: Sequence[int], largest: int) -> list[Row]:
    """Packs episodes, the longest first, each into the first row with room; else it opens a row of a power of two.

    Args:
      lengths: tokens of each episode, at most `largest`.
      largest: most tokens in a row; rows of it need be no power of two.

    Returns:
      The rows, the widest first.
    """
    rows: list[Row] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((i for i, left in enumerate(room) if left >= lengths[index]), None)
        if place is None:
            capacity = min(max(_power_of_two(lengths[index]), SMALLEST_ROW), largest)
            place = len(rows)
            rows.append(Row(capacity, []))
            room.append(capacity)
        rows[place].members.append(index)
        room[place] -= lengths[index]
    return rows


class Evaluator:
    """Evaluates actions under one model.

    A tied model takes memory for its head once more.

    Args:
      config: the model's shape.
      params: its parameters.
      k: of the mean of the highest log-probs; 0 leaves that and the certainty out (NaN), which saves a projection.
      max_tokens: T of the widest row.
      batch_tokens: B · T of a call, about.
    """

    def __init__(
        self,
        config: TransformerConfig,
        params: nnx.State,
        *,
        k: int = 20,
        max_tokens: int = 4096,
        batch_tokens: int = 4096,
    ):
        self.max_tokens, self.batch_tokens = max_tokens, max(batch_tokens, max_tokens)
        self._params = params
        graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))

        def read(params, tokens, positions, sequence_ids):
            hidden, _ = nnx.merge(graph, params)(tokens, positions, sequence_ids)
            return hidden

        def judge(head, hidden, places, targets):
            hidden = hidden.reshape(-1, hidden.shape[-1])[places]
            logprobs, entropy = kernels.linear_logprobs(hidden, head, targets)
            unknown = jnp.full(len(targets), jnp.nan)
            top, certainty = kernels.linear_confidence(hidden, head, k=k) if k else (unknown, unknown)
            return jnp.stack([logprobs, entropy, top, certainty])

        # Compiled apart: the layers once for each shape of rows, whatever the number of actions in them.
        self._read, self._judge = jax.jit(read), jax.jit(judge)
        # A tied head is the embedding table transposed: once here, and not in every call.
        self._head = jax.jit(lambda params: nnx.merge(graph, params).head())(params)

    def __call__(self, episodes: Sequence[Tokens]) -> list[Likelihoods]:
        """Likelihoods of each episode's action tokens.

        Args:
          episodes: of at most `max_tokens` each; the first token is no action's (`without_first`).
        """
        found: list[Likelihoods | None] = [None] * len(episodes)
        rows = pack_rows([len(episode.ids) for episode in episodes], self.max_tokens)
        for capacity in dict.fromkeys(row.capacity for row in rows):
            same = [row for row in rows if row.capacity == capacity]
            number = max(1, self.batch_tokens // capacity)
            for start in range(0, len(same), number):
                self._run(same[start : start + number], capacity, episodes, found)
        return found

    def _run(self, rows: list[Row], capacity: int, episodes: Sequence[Tokens], found: list) -> None:
        """Lays the rows out, evaluates them and writes what belongs to each episode into `found`.

        Empty rows make their number a power of two, and dummies that of the action tokens one of four steps between
        two: few programs are compiled, and little is computed for nothing.
        """
        number = _power_of_two(len(rows))
        tokens = np.zeros((number, capacity), np.int32)
        positions = np.zeros((number, capacity), np.int32)
        sequence_ids = np.full((number, capacity), PADDING, np.int32)
        places, targets, owners = [], [], []
        for row, (_, members) in enumerate(rows):
            start = 0
            for slot, index in enumerate(members):
                ids, actions = np.array(episodes[index].ids), np.flatnonzero(episodes[index].mask)
                span = slice(start, start + len(ids))
                tokens[row, span], positions[row, span], sequence_ids[row, span] = ids, np.arange(len(ids)), slot
                places.append(row * capacity + start + actions - 1)  # the state before a token predicts it
                targets.append(ids[actions])
                owners.append((index, len(actions)))
                start += len(ids)
        count = sum(size for _, size in owners)
        step = max(_power_of_two(count) // 8, SMALLEST_HEAD)
        padding = -count % step if count else step
        places, targets = (np.pad(np.concatenate(x).astype(np.int32), (0, padding)) for x in (places, targets))
        hidden = self._read(self._params, tokens, positions, sequence_ids)
        values = np.asarray(self._judge(self._head, hidden, places, targets))
        ends = np.cumsum([size for _, size in owners])
        for (index, size), end in zip(owners, ends, strict=True):
            found[index] = Likelihoods(*values[:, end - size : end])


def _power_of_two(number: int) -> int:
    """The smallest that is not below the number."""
    return 1 << max(number - 1, 0).bit_length()
