"""Credit of each action token from a critic's values (turn, bi-level) or from hindsight."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from mpo_jax.kernels import checks, segments
from mpo_jax.kernels.checks import Scalar
from mpo_jax.kernels.multiscale import multiscale_advantages
from mpo_jax.kernels.returns import returns, token_gae
from mpo_jax.kernels.segments import masked, segment_mean, segment_sum, spread
from mpo_jax.types import Array


def turn_advantages(
    rewards: Float[Array, "T"],
    values: Float[Array, "T"],
    action_mask: Bool[Array, "T"],
    turn_ids: Int[Array, "T"],
    *,
    lambda_turn: Scalar,
    sequence_ids: Int[Array, "T"] | None = None,
    bootstrap_values: Float[Array, "T"] | None = None,
) -> Float[Array, "T"]:
    """GAE over turns, A_t = r_t + V_{t+1,1} − V_{t,1} + λ A_{t+1}, one advantage for a turn's tokens.

    See *Turn-PPO* (arXiv:2512.17008). Arguments and result as `multiscale_advantages`, which it is at β = 0.
    """
    return multiscale_advantages(
        rewards,
        values,
        action_mask,
        turn_ids,
        lambda_turn=lambda_turn,
        beta=0.0,
        sequence_ids=sequence_ids,
        bootstrap_values=bootstrap_values,
    )


def bilevel_advantages(
    rewards: Float[Array, "T"],
    values: Float[Array, "T"],
    action_mask: Bool[Array, "T"],
    turn_ids: Int[Array, "T"],
    *,
    lambda_turn: Scalar = 1.0,
    lambda_token: Scalar = 1.0,
    discount_turn: Scalar = 0.95,
    sequence_ids: Int[Array, "T"] | None = None,
    bootstrap_values: Float[Array, "T"] | None = None,
) -> Float[Array, "T"]:
    """Bi-level GAE: returns over turn ends, then token GAE inside each turn, whose last reward is that return.

      G_t = r_t + γ ((1 − λ_turn) V_{t+1,L} + λ_turn G_{t+1});  A_{t,i} = δ_{t,i} + λ_token A_{t,i+1},
      δ_{t,i} = V_{t,i+1} − V_{t,i},  δ_{t,L} = G_t − V_{t,L}

    See *RAGEN* (arXiv:2504.20073). Arguments and result as `multiscale_advantages`; the values at turn ends are those
    before the turn's *last* token, as in the authors' code.
    """
    sequence_ids = _one_sequence(turn_ids) if sequence_ids is None else sequence_ids
    checks.check_aligned(
        "T", rewards=rewards, values=values, action_mask=action_mask, turn_ids=turn_ids, sequence_ids=sequence_ids
    )
    checks.check_turns(action_mask, turn_ids, sequence_ids)
    turn_ends = segments.ends(turn_ids, action_mask)
    turn_returns = returns(
        rewards,
        values,
        turn_ends,
        sequence_ids,
        lambda_=lambda_turn,
        discount=discount_turn,
        bootstrap_values=bootstrap_values,
    )
    return token_gae(turn_returns, values, action_mask, turn_ids, lambda_=lambda_token)


def whiten(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Zero mean and unit variance over the mask, (x − μ) / √(σ² + 10⁻⁸), σ² = Σ(x − μ)²/n (the population's).

    Over the whole batch that is given: call it before splitting. With fewer than two tokens it returns x − μ.

    Args:
      x: [B,T].
      mask: [B,T] tokens that count.

    Returns:
      [B,T], exactly 0 off the mask.
    """
    checks.check_aligned("B T", x=x, mask=mask)
    count = jnp.sum(mask)

    def centred(x: Array) -> Array:
        return masked(x - jnp.sum(masked(x, mask)) / jnp.maximum(count, 1), mask)

    x = centred(centred(x))  # twice: what rounding left in the mean would pass for a signal where all x are equal
    variance = jnp.sum(x**2) / jnp.maximum(count, 1)
    return x * jnp.where(count > 1, jax.lax.rsqrt(variance + 1e-8), 1.0)


def hindsight_weights(
    delta: Float[Array, "T"],
    advantages: Float[Array, "T"],
    action_mask: Bool[Array, "T"],
    executable_mask: Bool[Array, "T"],
    turn_ids: Int[Array, "T"],
    *,
    sequence_ids: Int[Array, "T"] | None = None,
    kappa: Scalar = 0.0,
    tau: Scalar = 1.0,
    epsilon_w: Scalar = 0.5,
    center: segments.Granularity = segments.turn_ids,
) -> Float[Array, "T"]:
    """Turn weights from what privileged hindsight thinks of the executed actions, w_t = 1 + (ε_w/2)(q_t − q̄).

      q_t = tanh(sign(A) (d_t − d̄)/τ),  d_t = mean over the turn's executable tokens of Δ·1{|Δ| ≥ κ}

    A bar is the mean over the sequence's turns (with `center=token_ids`, over their sampled tokens). Turns without
    executable tokens have w = 1. No gradient flows through w. κ, τ and ε_w are not published; the defaults are ours.

    See *TASPO* (arXiv:2608.31077).

    Args:
      delta: [T] Δ = log π(y | privileged, h) − log π(y | h) of the sampled tokens under the frozen rollout policy.
      advantages: [T] A of the token's sequence; only the sign is used.
      action_mask: [T] tokens that the policy sampled.
      executable_mask: [T] the part of them that the environment executed.
      turn_ids: [T] turn of each token, -1 on padding.
      sequence_ids: [T] of a packed row; None is a single sequence.
      kappa: κ, dead zone of Δ.
      tau: τ, temperature.
      epsilon_w: ε_w, bound of |w − 1|.
      center: granularity whose units weigh equally in the means.

    Returns:
      [T] weights, 1 off the action tokens.

    Raises:
      ValueError: for shapes, dtypes or ids that do not fit.
    """
    sequence_ids = _one_sequence(turn_ids) if sequence_ids is None else sequence_ids
    checks.check_aligned(
        "T",
        delta=delta,
        advantages=advantages,
        action_mask=action_mask,
        executable_mask=executable_mask,
        turn_ids=turn_ids,
        sequence_ids=sequence_ids,
    )
    checks.check_turns(action_mask, turn_ids, sequence_ids)
    length, executable = len(turn_ids), jnp.logical_and(executable_mask, action_mask)
    judged = jnp.logical_and(
        spread(segment_sum(executable, turn_ids, executable, length), turn_ids, action_mask) > 0, action_mask
    )
    units = center(judged, turn_ids, sequence_ids)
    share = 1.0 / jnp.maximum(spread(segment_sum(judged, units, judged, length), units, judged), 1.0)
    total = segment_sum(share, sequence_ids, judged, length)

    def centred(x: Array) -> Array:
        mean = segment_sum(share * x, sequence_ids, judged, length) / jnp.maximum(total, 1.0)
        return masked(x - spread(mean, sequence_ids, judged), judged)

    strong = masked(delta, executable & ~(jnp.abs(delta) < kappa))
    d = spread(segment_mean(strong, turn_ids, executable, length), turn_ids, judged)
    q = jnp.tanh(jnp.sign(masked(advantages, judged)) * centred(d) / tau)
    return jax.lax.stop_gradient(1.0 + 0.5 * epsilon_w * centred(q))


def _one_sequence(turn_ids: Int[Array, "T"]) -> Int[Array, "T"]:
    return jnp.zeros_like(turn_ids)
