"""Importance ratios at any granularity, and weights for the mismatch between the sampling engine and the trainer."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from mpo_jax.kernels import checks
from mpo_jax.kernels.checks import Scalar
from mpo_jax.kernels.segments import Reduce, masked, segment_sum, spread
from mpo_jax.types import Array

MAX_LOG_RATIO = 20.0  # e^20 ≈ 4.9e8: far outside every clip, far inside float32


def importance_ratio(
    logprobs: Float[Array, "T"],
    anchor_logprobs: Float[Array, "T"],
    ids: Int[Array, "T"],
    mask: Bool[Array, "T"],
    *,
    reduce: Reduce = segment_sum,
) -> Float[Array, "T"]:
    """Ratio of a token's segment, ρ_i = exp(log π_i − sg[log π_i] + sg[clip(log ρ, ±20)]).

    log ρ is `reduce` over the segment's tokens j of log π_j − log π_old,j.

    The value is the segment's for each of its tokens; the gradient is ρ ∇log π_i, the token's own. `segment_sum` gives
    the product over the segment (MPO's turns; over single tokens, PPO's), `segment_mean` the geometric mean (GSPO's
    sequences). The clamp is inside the stop-gradient, so it never stops a gradient.

    See *GSPO* (arXiv:2507.18071), Eq. 14, for the stop-gradient form.

    Args:
      logprobs: [T] log π of each token under the policy that is updated.
      anchor_logprobs: [T] under the policy that the ratio is against.
      ids: [T] segment of each token, from a granularity, -1 on padding.
      mask: [T] action tokens.
      reduce: how a segment's log-ratios become one; `range_sum` is `segment_sum` where first and last tokens are known.

    Returns:
      [T] ratios; exactly 1 and without gradient off the mask. Non-finite log-probs on it stay visible.

    Raises:
      ValueError: for shapes, dtypes or ids that do not fit.
    """
    checks.check_aligned("T", logprobs=logprobs, anchor_logprobs=anchor_logprobs, ids=ids, mask=mask)
    log_ratio = masked(logprobs, mask) - masked(anchor_logprobs, mask)
    own = log_ratio - jax.lax.stop_gradient(log_ratio)
    segment = jax.lax.stop_gradient(spread(reduce(log_ratio, ids, mask, len(ids)), ids, mask))
    return jnp.exp(own + jnp.clip(segment, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def truncated_weights(
    old_logprobs: Float[Array, "T"],
    behavior_logprobs: Float[Array, "T"],
    ids: Int[Array, "T"],
    mask: Bool[Array, "T"],
    *,
    reduce: Reduce = segment_sum,
    maximum: Scalar = 2.0,
) -> Float[Array, "T"]:
    """Truncated importance weights of the engine's samples, min(π_old/π_behavior, C), constant in the update.

    See *Your Efficient RL Framework Secretly Brings You Off-Policy RL Training* (Yao et al., 2025).

    Args:
      old_logprobs: [T] the trainer's log-probs of the weights that sampled; not those of the policy being updated.
      behavior_logprobs: [T] as the sampling engine reported them.
      ids: [T] segment of each token.
      mask: [T] action tokens.
      reduce: as `importance_ratio`.
      maximum: C.

    Returns:
      [T] weights, 1 off the mask.
    """
    ratio = importance_ratio(old_logprobs, behavior_logprobs, ids, mask, reduce=reduce)
    return jax.lax.stop_gradient(jnp.minimum(ratio, maximum))


def masked_weights(
    old_logprobs: Float[Array, "T"],
    behavior_logprobs: Float[Array, "T"],
    ids: Int[Array, "T"],
    mask: Bool[Array, "T"],
    *,
    reduce: Reduce = segment_sum,
    minimum: Scalar = 0.5,
    maximum: Scalar = 5.0,
) -> tuple[Float[Array, "T"], Bool[Array, "T"]]:
    """Importance weights of the engine's samples that reject what lies outside [minimum, maximum].

    Aggregate over the returned mask, so that rejected tokens leave the denominator too. A NaN is not rejected: it stays
    visible.

    See *Every Step Evolves* (IcePop, arXiv:2510.18855). Arguments as `truncated_weights`.

    Returns:
      weights [T], 0 on what is rejected or masked; keep [T], the mask less the rejected tokens.
    """
    ratio = importance_ratio(old_logprobs, behavior_logprobs, ids, mask, reduce=reduce)
    keep = jnp.logical_and(mask, ~((ratio < minimum) | (ratio > maximum)))
    return jax.lax.stop_gradient(masked(ratio, keep)), keep
