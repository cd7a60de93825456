"""More ways to make one number of a segment, all of type `Reduce`: tokens to a step, steps to an episode."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from mpo_jax.kernels.checks import Scalar
from mpo_jax.kernels.segments import Reduce, masked, segment_sum, slots
from mpo_jax.types import Array

_BLOCK = 32  # tokens; a sum's error is that of adding about as many


def segment_min(
    x: Shaped[Array, "T"], ids: Int[Array, "T"], mask: Bool[Array, "T"], num_segments: int
) -> Float[Array, "K"]:
    """Smallest value of each segment; an empty one gives 0. Arguments as `segment_sum`."""
    where = slots(x, ids, mask, num_segments)
    lowest = jax.ops.segment_min(masked(x, mask), where, num_segments + 1)[:num_segments]
    return masked(lowest, _sizes(ids, mask, num_segments) > 0)


def segment_max(
    x: Shaped[Array, "T"], ids: Int[Array, "T"], mask: Bool[Array, "T"], num_segments: int
) -> Float[Array, "K"]:
    """Largest value of each segment; an empty one gives 0. Arguments as `segment_sum`."""
    return -segment_min(-masked(x, mask), ids, mask, num_segments)


def discounted_mean(gamma: Scalar) -> Reduce:
    """Weights that fade from the end: Σ_i γ^{n−i} x_i / Σ_i γ^{n−i} over the n values of a segment, i = 1..n.

    A position-weighted form of *Progress Advantage* (arXiv:2606.26080); its γ is not published. γ = 1 is the mean,
    γ → 0 the last value.

    Args:
      gamma: in (0, 1].

    Returns:
      A `Reduce`; an empty segment gives 0.
    """
    return _weighted_mean(lambda rank, size: jnp.asarray(gamma, jnp.float32) ** (size - rank))


def linear_mean() -> Reduce:
    """Weights that grow linearly: Σ_i i x_i / Σ_i i over the values of a segment, i = 1..n; an empty one gives 0."""
    return _weighted_mean(lambda rank, size: rank)


def bottom_mean(share: float) -> Reduce:
    """Mean of the max(1, ⌈share · n⌉) lowest of a segment's n values; an empty one gives 0.

    See *Progress Advantage* (arXiv:2606.26080): bottom 10 % over the steps of an episode.

    Args:
      share: in (0, 1], static.
    """

    def reduce(x: Array, ids: Array, mask: Array, num_segments: int) -> Array:
        where = slots(x, ids, mask, num_segments)
        rank, size = _ranks(where, masked(x, mask), num_segments)
        # .1 is no binary number: what rounding adds to a product is taken off, so that ⌈.1 · 10⌉ is 1.
        lowest = rank <= jnp.maximum(jnp.ceil(share * size - 1e-4), 1.0)
        kept = jnp.logical_and(mask, lowest | jnp.isnan(x))  # a NaN is the highest in order, but must stay visible
        total = segment_sum(jnp.where(kept, x, 0.0), ids, kept, num_segments)
        return total / jnp.maximum(_sizes(ids, kept, num_segments), 1.0)

    return reduce


def segment_ranges(
    ids: Int[Array, "T"], mask: Bool[Array, "T"], num_segments: int
) -> tuple[Int[Array, "K"], Int[Array, "K"]]:
    """Places of each segment's first and last token that the mask keeps; 0 and -1 of an empty one.

    Arguments as `segment_sum`.
    """
    where, places = slots(ids, ids, mask, num_segments), jnp.arange(len(ids))
    first = jax.ops.segment_min(places, where, num_segments + 1)[:num_segments]
    last = jax.ops.segment_max(places, where, num_segments + 1)[:num_segments]
    present = first <= last
    return jnp.where(present, first, 0), jnp.where(present, last, -1)


def range_sum(first: Int[Array, "K"], last: Int[Array, "K"]) -> Reduce:
    """`segment_sum` over known ranges, for many losses over the same segments: a quarter of the time on a CPU.

    Sums are differences of running sums inside blocks of 32 tokens, and of blocks, so that their error does not grow
    with the row. A NaN spreads over its block.

    Args:
      first: [K] from `segment_ranges`, once a batch; K bounds the ids.
      last: [K].

    Returns:
      A `Reduce` for ids whose tokens lie together, as those of turns and sequences do.
    """

    def reduce(x: Array, ids: Array, mask: Array, num_segments: int) -> Array:
        sums = _range_sums(masked(x, mask), first, last)
        # Written by a scatter, or XLA works a segment's sum out anew for each token that it is spread to.
        return jnp.zeros_like(sums).at[jnp.arange(len(sums))].set(sums, unique_indices=True)

    return reduce


def _range_sums(x: Array, first: Array, last: Array) -> Array:
    """Σ_{t=first}^{last} x_t of each range [K], 0 where last < first."""
    num_blocks = -(-len(x) // _BLOCK)
    blocks = jnp.pad(x, (0, num_blocks * _BLOCK - len(x))).reshape(num_blocks, _BLOCK)
    running = jnp.matmul(blocks, jnp.triu(jnp.ones((_BLOCK, _BLOCK), x.dtype)), precision="highest")
    up_to = running.ravel()
    before = up_to[first] - x[first]
    at_first, at_last = first // _BLOCK, last // _BLOCK
    sums = up_to[last] - before
    if num_blocks > 1:
        rest = running[at_first, -1] - before
        between = _range_sums(running[:, -1], at_first + 1, at_last - 1)
        sums = jnp.where(at_first == at_last, sums, rest + between + up_to[last])
    return jnp.where(first <= last, sums, 0.0)


def _weighted_mean(weight) -> Reduce:
    """A mean with weights of (rank from 1, size) of each value in its segment."""

    def reduce(x: Array, ids: Array, mask: Array, num_segments: int) -> Array:
        where = slots(x, ids, mask, num_segments)
        weights = masked(weight(*_ranks(where, jnp.zeros(len(where)), num_segments)), mask)
        total = segment_sum(weights, ids, mask, num_segments)
        return segment_sum(weights * masked(x, mask), ids, mask, num_segments) / jnp.where(total > 0, total, 1.0)

    return reduce


def _sizes(ids: Array, mask: Array, num_segments: int) -> Array:
    return segment_sum(jnp.ones(len(ids)), ids, mask, num_segments)


def _ranks(where: Array, keys: Array, num_segments: int) -> tuple[Array, Array]:
    """Each value's rank from 1 among its segment's by (key, place), and the segment's size, both float32[T]."""
    order = jnp.lexsort((jnp.arange(len(where)), keys, where))
    sizes = jnp.bincount(where, length=num_segments + 1)
    first = jnp.cumsum(sizes) - sizes
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(where)))
    return (place - first[where] + 1).astype(jnp.float32), sizes[where].astype(jnp.float32)
