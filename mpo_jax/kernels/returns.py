"""Returns and advantages as reverse recursions over actions; observations and padding are stepped over."""

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from mpo_jax.kernels import checks
from mpo_jax.kernels.checks import Scalar
from mpo_jax.kernels.recurrence import linear_recurrence
from mpo_jax.kernels.segments import following, masked
from mpo_jax.types import Array


def lambda_returns(
    r_t: Float[Array, "K"],
    discount_t: Float[Array, "K"] | Scalar,
    v_t: Float[Array, "K"],
    lambda_: Float[Array, "K"] | Scalar,
) -> Float[Array, "K"]:
    """λ-returns, G_k = r_k + γ_k ((1 − λ_k) v_k + λ_k G_{k+1}), with G_{K+1} = v_K.

    See *Reinforcement Learning: An Introduction* (Sutton & Barto), Eq. 12.18.

    Args:
      r_t: [K] rewards of steps 1..K.
      discount_t: [K] or scalar, discounts after each step; 0 ends an episode.
      v_t: [K] values of the states *after* each step; the last one bootstraps.
      lambda_: [K] or scalar, in [0,1].

    Returns:
      [K] returns of the states before each step.
    """

    checks.check_positive(K=len(r_t))
    over = (r_t, discount_t, v_t, lambda_)
    over = [jnp.broadcast_to(jnp.asarray(x, jnp.result_type(r_t, v_t, jnp.float32)), jnp.shape(r_t)) for x in over]
    reward, discount, value, decay = over
    decay = decay.at[-1].set(0.0)  # G after the last step is its value
    return linear_recurrence(discount * decay, reward + discount * (1.0 - decay) * value, reverse=True)


def gae(
    r_t: Float[Array, "K"],
    discount_t: Float[Array, "K"] | Scalar,
    v_tm1: Float[Array, "K"],
    v_t: Float[Array, "K"],
    lambda_: Float[Array, "K"] | Scalar,
) -> Float[Array, "K"]:
    """Generalised advantage estimates, A_k = δ_k + γ_k λ_k A_{k+1} with δ_k = r_k + γ_k v_k − v_{k−1}.

    See *High-Dimensional Continuous Control Using Generalized Advantage Estimation* (arXiv:1506.02438), Eq. 16.

    Args:
      r_t: [K] rewards of steps 1..K.
      discount_t: [K] or scalar, discounts after each step; 0 ends an episode.
      v_tm1: [K] values of the states before each step.
      v_t: [K] values of the states after each step.
      lambda_: [K] or scalar, in [0,1].

    Returns:
      [K] advantages.
    """
    return lambda_returns(r_t, discount_t, v_t, lambda_) - v_tm1


def returns(
    rewards: Float[Array, "T"],
    values: Float[Array, "T"],
    action_mask: Bool[Array, "T"],
    sequence_ids: Int[Array, "T"],
    *,
    lambda_: Float[Array, "T"] | Scalar = 1.0,
    discount: Scalar = 1.0,
    bootstrap_values: Float[Array, "T"] | None = None,
) -> Float[Array, "T"]:
    """λ-returns over the action tokens of each sequence, G_i = r_i + γ((1 − λ) V_{i+1} + λ G_{i+1}).

    i+1 is the next *action* token of the same sequence, so an observation of any length changes nothing. With λ = 1
    the values are not used (bootstrapping apart). Any segment ids may stand for `sequence_ids`: the recursion stays
    inside a segment.

    Args:
      rewards: [T], read at action tokens.
      values: [T] V before each token, read at action tokens.
      action_mask: [T] tokens that the policy sampled.
      sequence_ids: [T] sequence of each token, -1 on padding.
      lambda_: scalar or [T].
      discount: γ of one action token.
      bootstrap_values: [T] or None (0), V after a sequence's last action, read at that token.

    Returns:
      [T] returns, 0 off the action tokens.

    Raises:
      ValueError: for shapes, dtypes or ids that do not fit.
    """
    checks.check_aligned(
        "T",
        rewards=rewards,
        values=values,
        action_mask=action_mask,
        sequence_ids=sequence_ids,
        bootstrap_values=bootstrap_values,
    )
    checks.check_positive(T=len(rewards))
    checks.check_together(sequence_ids, action_mask, name="sequence_ids")
    more, v_next = next_values(values, action_mask, sequence_ids, bootstrap_values)
    return action_lambda_returns(rewards, v_next, action_mask, jnp.where(more, lambda_, 0.0), discount)


def token_gae(
    rewards: Float[Array, "T"],
    values: Float[Array, "T"],
    action_mask: Bool[Array, "T"],
    sequence_ids: Int[Array, "T"],
    *,
    lambda_: Float[Array, "T"] | Scalar,
    discount: Scalar = 1.0,
    bootstrap_values: Float[Array, "T"] | None = None,
) -> Float[Array, "T"]:
    """Token GAE that skips observations, A_i = δ_i + γλ A_{i+1} with δ_i = r_i + γV_{i+1} − V_i over action tokens.

    See *High-Dimensional Continuous Control Using Generalized Advantage Estimation* (arXiv:1506.02438). Arguments as
    `returns`.

    Returns:
      [T] advantages, 0 off the action tokens.
    """
    targets = returns(
        rewards,
        values,
        action_mask,
        sequence_ids,
        lambda_=lambda_,
        discount=discount,
        bootstrap_values=bootstrap_values,
    )
    return targets - masked(values, action_mask)


def length_adaptive_lambda(num_tokens: Shaped[Array, "*n"], alpha: Scalar) -> Float[Array, "*n"]:
    """λ = 1 − 1/(αl), clamped to [0,1]: longer sequences get a longer trace.

    See *VAPO* (arXiv:2504.05118), α = 0.05, and *SAO* (arXiv:2607.07508), α = 1.5.

    Args:
      num_tokens: l, action tokens of the sequence.
      alpha: α.

    Returns:
      λ of the same shape.
    """
    return jnp.clip(1.0 - 1.0 / (alpha * jnp.maximum(num_tokens, 1)), 0.0, 1.0)


def next_values(
    values: Float[Array, "T"],
    action_mask: Bool[Array, "T"],
    sequence_ids: Int[Array, "T"],
    bootstrap_values: Float[Array, "T"] | None = None,
) -> tuple[Bool[Array, "T"], Float[Array, "T"]]:
    """Whether another action of the sequence follows each token, and V there; the bootstrap value (or 0) where none."""
    more, v_next = following(values, sequence_ids, action_mask)
    return more, jnp.where(more, v_next, 0.0 if bootstrap_values is None else bootstrap_values)


def action_lambda_returns(
    rewards: Float[Array, "T"],
    v_next: Float[Array, "T"],
    action_mask: Bool[Array, "T"],
    lambda_: Float[Array, "T"],
    discount: Scalar = 1.0,
) -> Float[Array, "T"]:
    """`lambda_returns` that steps over whatever is not an action: there r = 0 and γ = λ = 1."""
    through = jnp.where(action_mask, discount, 1.0), jnp.where(action_mask, lambda_, 1.0)
    found = lambda_returns(masked(rewards, action_mask), through[0], masked(v_next, action_mask), through[1])
    return masked(found, action_mask)
