"""How a token is drawn from what the model says of the next one."""

import dataclasses

import jax
import jax.numpy as jnp

from mpo_jax.types import Array


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How a slot samples its turn. By default from the policy itself, as training needs it.

    Attributes:
      temperature: the logits are divided by it; 0 always takes the likeliest id.
      top_k: only so many of the likeliest ids can be drawn (and those that tie with the last); 0 = all.
      top_p: only the likeliest ids that together have this probability can be drawn, after top_k; 1 = all.
      stop_ids: ids that end a turn where they are sampled, besides the engine's.
      max_tokens: most ids of a turn, below the engine's own limit; None leaves it at that.

    Raises:
      ValueError: a value out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    max_tokens: int | None = None

    def __post_init__(self):
        wrong = {
            "temperature": not 0 <= self.temperature < float("inf"),
            "top_k": self.top_k < 0,
            "top_p": not 0 < self.top_p <= 1,
            "max_tokens": self.max_tokens is not None and self.max_tokens < 1,
        }
        for field in (field for field, is_wrong in wrong.items() if is_wrong):
            raise ValueError(f"decoding: {field} is {getattr(self, field)}, which is out of its range")

    @property
    def exact(self) -> bool:
        """Whether ids are drawn from the policy's own distribution, the one that log-probabilities are of."""
        return (self.temperature, self.top_k, self.top_p) == (1.0, 0, 1.0)


BLOCK = 64  # ids whose probabilities `draw` adds up at once
EXACT = Decoding()
GREEDY = Decoding(temperature=0.0)


def reshape(logprobs: Array, temperature: Array, top_k: Array, top_p: Array) -> Array:
    """Log-probabilities [B,V], up to a constant a row, of what may be drawn: tempered, then cut by top_k, then top_p.

    See *The Curious Case of Neural Text Degeneration* (arXiv:1904.09751), section 3.1, for top_p.

    Args:
      logprobs: float32[B,V], the policy's, up to a constant a row.
      temperature: float32[B].
      top_k: int32[B].
      top_p: float32[B].

    Returns:
      float32[B,V], −inf for what cannot be drawn.
    """
    greedy = (temperature == 0)[:, None]
    is_likeliest = jnp.arange(logprobs.shape[-1])[None, :] == likeliest(logprobs)[:, None]
    tempered = logprobs / jnp.where(greedy, 1.0, temperature[:, None])
    tempered = jnp.where(greedy, jnp.where(is_likeliest, 0.0, -jnp.inf), tempered)
    is_cut = (temperature > 0) & ((top_k > 0) | (top_p < 1))

    def cut(x):
        return jnp.where(is_cut[:, None], _cut(x, top_k, top_p), x)

    return jax.lax.cond(is_cut.any(), cut, lambda x: x, tempered)  # to sort a vocabulary is what costs most


def likeliest(logprobs: Array) -> Array:
    """int32[B]: the first of the largest of each row of [B,V]; argmax by two reductions that a CPU vectorises."""
    vocabulary = logprobs.shape[-1]
    largest = logprobs == jnp.max(logprobs, axis=-1, keepdims=True)
    return jnp.min(jnp.where(largest, jnp.arange(vocabulary)[None, :], vocabulary - 1), axis=-1).astype(jnp.int32)


def _cut(logprobs: Array, top_k: Array, top_p: Array) -> Array:
    """−inf for what is below the lowest log-probability that top_k and top_p keep, row by row."""
    vocabulary = logprobs.shape[-1]
    descending = -jnp.sort(-logprobs, axis=-1)
    by_rank = jnp.arange(vocabulary)[None, :] < jnp.where(top_k == 0, vocabulary, top_k)[:, None]
    p = jax.nn.softmax(jnp.where(by_rank, descending, -jnp.inf), axis=-1)
    kept = by_rank & ((jnp.cumsum(p, axis=-1) - p < top_p[:, None]) | (top_p >= 1)[:, None])
    lowest = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logprobs >= lowest, logprobs, -jnp.inf)


def draw(logprobs: Array, seeds: Array, positions: Array) -> Array:
    """One id a row: the inverse of the cumulative distribution at one uniform number of the row's seed and position.

    It is inverted over sums of blocks of ids first, then within a block: running sums over a vocabulary are slow.

    Args:
      logprobs: float32[B,V], up to a constant a row.
      seeds: uint32[B], of the episodes.
      positions: int32[B], where the id will stand in its context.

    Returns:
      int32[B].
    """
    keys = jax.vmap(jax.random.key)(seeds)
    uniform = jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position)))(keys, positions)
    number, vocabulary = logprobs.shape
    p = jnp.exp(logprobs - jnp.max(logprobs, axis=-1, keepdims=True))
    p = jnp.pad(p, ((0, 0), (0, -vocabulary % BLOCK))).reshape(number, -1, BLOCK)
    sums = p.sum(axis=-1)
    cumulative = jnp.cumsum(sums, axis=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, sums, target)
    before = jnp.take_along_axis(cumulative - sums, block, axis=-1)
    inside = jnp.take_along_axis(p, block[:, :, None], axis=1)[:, 0]
    place = _first_above(jnp.cumsum(inside, axis=-1), inside, target - before)
    return (block * BLOCK + place)[:, 0].astype(jnp.int32)


def _first_above(cumulative: Array, masses: Array, target: Array) -> Array:
    """int[B,1]: the first place with a running sum above target[B,1]; the last with mass where rounding leaves none."""
    places = jnp.arange(masses.shape[-1])[None, :]
    last = jnp.max(jnp.where(masses > 0, places, 0), axis=-1, keepdims=True)
    return jnp.minimum(jnp.sum(cumulative <= target, axis=-1, keepdims=True), last)
