"""Losses of one token, elementwise. Surrogates are objectives, to be *maximised*; all else is to be minimised.

Arguments have one shape, or a ValueError names the one that has not: nothing is broadcast.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from mpo_jax.kernels.checks import Scalar, check_same_shape
from mpo_jax.types import Array


def clipped_surrogate(
    ratio: Float[Array, "*n"],
    advantages: Float[Array, "*n"],
    *,
    epsilon_low: Scalar,
    epsilon_high: Scalar,
    dual_clip: Scalar | None = None,
) -> Float[Array, "*n"]:
    """Objective min(ρA, clip(ρ, 1−ε_low, 1+ε_high) A); with dual clip c, max(·, cA) where A < 0.

    See *Proximal Policy Optimization Algorithms* (arXiv:1707.06347), Eq. 7; dual clip: arXiv:1912.09729, Eq. 5.

    Args:
      ratio: ρ.
      advantages: A, constants.
      epsilon_low: ε_low.
      epsilon_high: ε_high.
      dual_clip: c > 1, or None for no bound on the loss of a negative advantage.

    Returns:
      The objective, to be maximised.
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    advantages = jax.lax.stop_gradient(advantages)
    gained = jnp.minimum(ratio, 1.0 + epsilon_high)
    lost = jnp.clip(ratio, 1.0 - epsilon_low, dual_clip)
    return jnp.where(advantages < 0, lost, gained) * advantages


def double_sided_mask(
    ratio: Float[Array, "*n"], advantages: Float[Array, "*n"], *, epsilon_low: Scalar, epsilon_high: Scalar
) -> Float[Array, "*n"]:
    """Objective ρA inside 1−ε_low ≤ ρ ≤ 1+ε_high, 0 (and no gradient) outside, whatever the sign of A.

    See *SAO* (arXiv:2607.07508). Arguments as `clipped_surrogate`.
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    outside = (ratio < 1.0 - epsilon_low) | (ratio > 1.0 + epsilon_high)
    return jnp.where(outside, 0.0, ratio * jax.lax.stop_gradient(advantages))


def squared_value_loss(
    values: Float[Array, "*n"], old_values: Float[Array, "*n"], returns: Float[Array, "*n"]
) -> Float[Array, "*n"]:
    """½(V − R)²; `old_values` is not used."""
    check_same_shape(values=values, old_values=old_values, returns=returns)
    return 0.5 * (values - jax.lax.stop_gradient(returns)) ** 2


def clipped_value_loss(
    values: Float[Array, "*n"], old_values: Float[Array, "*n"], returns: Float[Array, "*n"], *, epsilon: Scalar
) -> Float[Array, "*n"]:
    """½ max((V − R)², (clip(V, V_old ± ε) − R)²), the pessimistic of the two.

    See *Implementation Matters in Deep Policy Gradients* (arXiv:2005.12729), Eq. 3.

    Args:
      values: V, the only argument that has a gradient.
      old_values: V_old, before the update.
      returns: R, regression targets.
      epsilon: ε.

    Returns:
      The loss.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    old_values = jax.lax.stop_gradient(old_values)
    near = jnp.clip(values, old_values - epsilon, old_values + epsilon)
    return jnp.maximum(*(squared_value_loss(v, old_values, returns) for v in (values, near)))


def kl_k1(logprobs: Float[Array, "*n"], ref_logprobs: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """−x with x = log π_ref − log π: unbiased for KL(π‖π_ref), but as a loss its expected gradient is 0.

    See *Approximating KL Divergence* (Schulman, 2020).
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return logprobs - jax.lax.stop_gradient(ref_logprobs)


def kl_k2(logprobs: Float[Array, "*n"], ref_logprobs: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """½x² with x = log π_ref − log π: biased for KL(π‖π_ref); a loss with this reverse KL's gradient, on-policy."""
    return 0.5 * kl_k1(logprobs, ref_logprobs) ** 2


def kl_k3(logprobs: Float[Array, "*n"], ref_logprobs: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """e^x − x − 1 with x = log π_ref − log π: unbiased for KL(π‖π_ref), ≥ 0; its gradient is that of KL(π_ref‖π)."""
    x = -kl_k1(logprobs, ref_logprobs)
    return jnp.expm1(x) - x


def success_nll(logprobs: Float[Array, "*n"], success: Bool[Array, "*n"]) -> Float[Array, "*n"]:
    """−log π on the tokens of successful episodes, 0 elsewhere.

    See *VAPO* (arXiv:2504.05118), Eq. 11.
    """
    check_same_shape(logprobs=logprobs, success=success)
    return jnp.where(success, -logprobs, 0.0)
