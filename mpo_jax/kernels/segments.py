"""Granularity is a segment id: token, turn and sequence differ only in an `int[T]`; -1 is padding, never touched.

Masks select, they never multiply: whatever lies behind one, NaN included, reaches neither a value nor a gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from mpo_jax.kernels import checks
from mpo_jax.types import PADDING, Array

Granularity = Callable[[Array, Array, Array], Array]  # (action_mask[T], turn_ids[T], sequence_ids[T]) -> int[T]
Reduce = Callable[[Array, Array, Array, int], Array]  # (x[T], ids[T], mask[T], num_segments) -> [K]


def masked(x: Shaped[Array, "*n"], mask: Bool[Array, "*n"]) -> Float[Array, "*n"]:
    """x where the mask is set, exactly 0 elsewhere, in float32 or wider."""
    return jnp.where(mask, jnp.asarray(x, jnp.result_type(x, jnp.float32)), 0.0)


def token_ids(
    action_mask: Bool[Array, "T"], turn_ids: Int[Array, "T"], sequence_ids: Int[Array, "T"]
) -> Int[Array, "T"]:
    """Every action token is a segment of its own."""
    return jnp.where(action_mask, jnp.arange(len(action_mask)), PADDING)


def turn_ids(
    action_mask: Bool[Array, "T"], turn_ids: Int[Array, "T"], sequence_ids: Int[Array, "T"]
) -> Int[Array, "T"]:
    """The action tokens of a turn are one segment."""
    return jnp.where(action_mask, turn_ids, PADDING)


def sequence_ids(
    action_mask: Bool[Array, "T"], turn_ids: Int[Array, "T"], sequence_ids: Int[Array, "T"]
) -> Int[Array, "T"]:
    """The action tokens of an episode are one segment."""
    return jnp.where(action_mask, sequence_ids, PADDING)


def segment_sum(
    x: Shaped[Array, "T"], ids: Int[Array, "T"], mask: Bool[Array, "T"], num_segments: int
) -> Float[Array, "K"]:
    """Sum over each segment, Σ_{t: ids_t = k, mask_t} x_t; an empty segment gives 0.

    Args:
      x: [T]; what the mask hides may be anything.
      ids: [T] segment of each token, -1 on padding.
      mask: [T] tokens that count.
      num_segments: K, static.

    Returns:
      [K].

    Raises:
      ValueError: for shapes, dtypes or ids that do not fit.
    """
    ids = slots(x, ids, mask, num_segments)
    return jax.ops.segment_sum(masked(x, mask), ids, num_segments + 1)[:num_segments]


def segment_mean(
    x: Shaped[Array, "T"], ids: Int[Array, "T"], mask: Bool[Array, "T"], num_segments: int
) -> Float[Array, "K"]:
    """Mean over each segment; an empty segment gives 0. Arguments as `segment_sum`."""
    return segment_sum(x, ids, mask, num_segments) / jnp.maximum(segment_sum(mask, ids, mask, num_segments), 1.0)


def segment_first(
    x: Shaped[Array, "T"], ids: Int[Array, "T"], mask: Bool[Array, "T"], num_segments: int
) -> Float[Array, "K"]:
    """Value at each segment's first token that the mask keeps; 0 in an empty one. Arguments as `segment_sum`."""
    index = jax.ops.segment_min(jnp.arange(len(x)), slots(x, ids, mask, num_segments), num_segments + 1)[:num_segments]
    return _gather(x, index)


def segment_last(
    x: Shaped[Array, "T"], ids: Int[Array, "T"], mask: Bool[Array, "T"], num_segments: int
) -> Float[Array, "K"]:
    """Value at each segment's last token that the mask keeps; 0 in an empty one. Arguments as `segment_sum`."""
    index = jax.ops.segment_max(jnp.arange(len(x)), slots(x, ids, mask, num_segments), num_segments + 1)[:num_segments]
    return _gather(x, index)


def spread(x: Shaped[Array, "K"], ids: Int[Array, "T"], mask: Bool[Array, "T"]) -> Float[Array, "T"]:
    """Gives every token the value of its segment, x_{ids_t}; 0 off the mask. The inverse of `segment_first`."""
    checks.check_aligned("T", ids=ids, mask=mask)
    checks.check_segments(ids, mask, len(x))
    keep = jnp.logical_and(mask, jnp.asarray(ids) >= 0)
    return masked(jnp.asarray(x)[jnp.where(keep, ids, 0)], keep)


def ends(ids: Int[Array, "T"], mask: Bool[Array, "T"]) -> Bool[Array, "T"]:
    """True on the last masked-in token of each segment."""
    same, _ = following(ids, ids, mask)
    return jnp.logical_and(mask, ~same)


def starts(ids: Int[Array, "T"], mask: Bool[Array, "T"]) -> Bool[Array, "T"]:
    """True on the first masked-in token of each segment."""
    return ends(jnp.flip(ids), jnp.flip(mask))[::-1]


def following(
    x: Shaped[Array, "T"], ids: Int[Array, "T"], mask: Bool[Array, "T"]
) -> tuple[Bool[Array, "T"], Shaped[Array, "T"]]:
    """Whether another masked-in token of the same segment follows each token, and x there (unspecified where none)."""
    length = len(ids)
    here = jnp.where(mask, jnp.arange(length), length)
    after = jnp.append(jax.lax.cummin(here, reverse=True)[1:], length)
    index = jnp.minimum(after, length - 1)
    return jnp.logical_and(after < length, jnp.asarray(ids)[index] == ids), jnp.asarray(x)[index]


def slots(x: Array, ids: Array, mask: Array, num_segments: int) -> Array:
    """Ids with everything that does not count moved to one segment past the end."""
    checks.check_aligned("T", ids=ids, mask=mask)
    checks.check_same_shape(ids=ids, x=x)
    checks.check_segments(ids, mask, num_segments)
    ids = jnp.asarray(ids)
    return jnp.where(jnp.logical_and(mask, (ids >= 0) & (ids < num_segments)), ids, num_segments)


def _gather(x: Array, index: Array) -> Array:
    checks.check_positive(T=len(x))
    inside = (index >= 0) & (index < len(x))
    return masked(jnp.asarray(x)[jnp.where(inside, index, 0)], inside)
