"""A loss mode is an array of weights: the loss is always Σ weights · loss, so any split of the batch sums to the same.

Each function takes the *whole* batch `(mask[B,T], turn_ids[B,T], sequence_ids[B,T])` and gives weights [B,T], 0 off the
mask. Select with the weights (`where(weights > 0, weights * loss, 0)`): a product would let a masked NaN through.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from mpo_jax.kernels import checks, segments
from mpo_jax.kernels.segments import Granularity, masked, segment_sum, spread
from mpo_jax.types import Array

Aggregation = Callable[[Array, Array, Array], Array]


def token_mean(
    mask: Bool[Array, "B T"], turn_ids: Int[Array, "B T"], sequence_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Mean over all tokens of the batch, 1/Σ mask (DAPO's, MPO's)."""
    return _normalised(_shares(segments.token_ids, mask, turn_ids, sequence_ids))


def turn_mean(
    mask: Bool[Array, "B T"], turn_ids: Int[Array, "B T"], sequence_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Mean over all turns of the batch of the turn's mean (Turn-PPO's)."""
    return _normalised(_shares(segments.turn_ids, mask, turn_ids, sequence_ids))


def sequence_mean(
    mask: Bool[Array, "B T"], turn_ids: Int[Array, "B T"], sequence_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Mean over all sequences of the batch of the sequence's mean (GRPO's, GSPO's)."""
    return _normalised(_shares(segments.sequence_ids, mask, turn_ids, sequence_ids))


def constant_length(length: float) -> Aggregation:
    """Mean over all sequences of the sequence's *sum* divided by a constant: weights 1/(S · length).

    See *Dr. GRPO* (arXiv:2503.20783).

    Args:
      length: the constant, a setting and never the padded width.

    Returns:
      The aggregation, whose weights do not sum to 1.

    Raises:
      ValueError: a constant that is not positive.
    """
    checks.check_positive(length=length)

    def weights(
        mask: Bool[Array, "B T"], turn_ids: Int[Array, "B T"], sequence_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T"]:
        sequences = jnp.sum(_shares(segments.sequence_ids, mask, turn_ids, sequence_ids))
        return masked(mask, mask) / (jnp.maximum(sequences, 1.0) * length)

    return weights


def _shares(granularity: Granularity, mask: Array, turn_ids: Array, sequence_ids: Array) -> Array:
    """1 / the number of masked-in tokens of the token's segment; they sum to the number of segments."""
    checks.check_aligned("B T", mask=mask, turn_ids=turn_ids, sequence_ids=sequence_ids)
    ids = jax.vmap(granularity)(mask, turn_ids, sequence_ids)
    checks.check_segments(ids, mask, mask.shape[1], name=granularity.__name__)

    def row(mask: Array, ids: Array) -> Array:
        size = spread(segment_sum(mask, ids, mask, len(ids)), ids, mask)
        return masked(1.0 / jnp.maximum(size, 1.0), mask)

    return jax.vmap(row)(mask, ids)


def _normalised(shares: Array) -> Array:
    total = jnp.sum(shares)
    return shares / jnp.where(total > 0, total, 1.0)
