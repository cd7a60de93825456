"""More ways to make one number of a segment, all of type `Reduce`: tokens to a step, steps to an episode."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from mpo_jax.kernels.checks import Scalar
from mpo_jax.kernels.segments import Reduce, masked, segment_sum, slots
from mpo_jax.types import Array


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
        kept = jnp.logical_and(mask, rank <= jnp.maximum(jnp.ceil(share * size - 1e-4), 1.0))
        total = segment_sum(jnp.where(kept, x, 0.0), ids, kept, num_segments)
        return total / jnp.maximum(_sizes(ids, kept, num_segments), 1.0)

    return reduce


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
