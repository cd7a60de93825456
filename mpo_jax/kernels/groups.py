"""Critic-free credit: an episode against the other episodes of its prompt, over the whole batch that is given.

Group ids are dense in 0..N-1, -1 for an absent entry. A non-finite return, an absent or an invalid entry takes no part
in any statistic and gets 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from mpo_jax.kernels import checks
from mpo_jax.kernels.segments import masked, segment_mean, segment_sum, spread
from mpo_jax.types import PADDING, Array

NOISE = 1e-6  # rewards of a group that differ by less, relative to max(1, |mean|), are equal


def group_advantages(
    returns: Float[Array, "N"],
    group_ids: Int[Array, "N"],
    *,
    normalise_std: bool = True,
    valid: Bool[Array, "N"] | None = None,
) -> Float[Array, "N"]:
    """Group-relative advantages, A_i = (R_i − μ) / (σ + 10⁻⁶), σ² = Σ(R_i − μ)²/(n − 1) (the sample's).

    A group of one, or whose returns differ by float noise only, gets exactly 0.

    See *DeepSeekMath* (arXiv:2402.03300); without σ, *Dr. GRPO* (arXiv:2503.20783).

    Args:
      returns: [N] of each episode.
      group_ids: [N] prompt of each episode, dense in 0..N-1, -1 = absent.
      normalise_std: whether to divide by σ.
      valid: [N] or None, episodes that count.

    Returns:
      [N] advantages.

    Raises:
      ValueError: for shapes, dtypes or ids that do not fit.
    """
    valid, count, centred = _centre(returns, group_ids, valid)
    if not normalise_std:
        return centred
    std = jnp.sqrt(segment_sum(centred**2, group_ids, valid, len(returns)) / jnp.maximum(count - 1.0, 1.0))
    return centred / (spread(std, group_ids, valid) + 1e-6)


def leave_one_out_advantages(
    returns: Float[Array, "N"], group_ids: Int[Array, "N"], *, valid: Bool[Array, "N"] | None = None
) -> Float[Array, "N"]:
    """Leave-one-out advantages, A_i = R_i − mean_{j≠i} R_j = (R_i − μ) n/(n − 1); 0 in a group of one.

    See *Back to Basics: Revisiting REINFORCE Style Optimization* (arXiv:2402.14740). Arguments as `group_advantages`.
    """
    valid, count, centred = _centre(returns, group_ids, valid)
    return centred * spread(count / jnp.maximum(count - 1.0, 1.0), group_ids, valid)


def anchor_advantages(
    returns: Float[Array, "N"],
    state_ids: Int[Array, "N"],
    *,
    normalise_std: bool = False,
    valid: Bool[Array, "N"] | None = None,
) -> Float[Array, "N"]:
    """Step-level advantages: each step against all steps that acted on the same state of the same task; alone, 0.

    See *Group-in-Group Policy Optimization* (arXiv:2505.10978).

    Args:
      returns: [N] return from each step on.
      state_ids: [N] equal where state and task are equal; any non-negative integers, -1 = absent.
      normalise_std: whether to divide by the standard deviation.
      valid: [N] or None, steps that count.

    Returns:
      [N] advantages.

    Raises:
      ValueError: for shapes or dtypes that do not fit.
    """
    checks.check_aligned("N", returns=returns, state_ids=state_ids, valid=valid)
    if isinstance(state_ids, np.ndarray):  # of 64 bits, say: jax would keep the lower 32 only
        state_ids = np.where(state_ids < 0, PADDING, np.unique(state_ids, return_inverse=True)[1])
    _, dense = jnp.unique(state_ids, size=len(state_ids), fill_value=PADDING, return_inverse=True)
    dense = jnp.where(jnp.asarray(state_ids) < 0, PADDING, dense)
    return group_advantages(returns, dense, normalise_std=normalise_std, valid=valid)


def informative_groups(
    returns: Float[Array, "N"], group_ids: Int[Array, "N"], *, valid: Bool[Array, "N"] | None = None
) -> Bool[Array, "N"]:
    """True for every valid episode of a group whose returns differ (dynamic sampling keeps these, whole groups only).

    See *DAPO* (arXiv:2503.14476). Arguments as `group_advantages`.
    """
    valid, _ = _valid(returns, group_ids, valid)
    return valid & (spread(_differ(returns, group_ids, valid), group_ids, valid) > 0)


def overlong_penalty(num_tokens: Shaped[Array, "*n"], *, max_tokens: int, cache_tokens: int) -> Float[Array, "*n"]:
    """Soft penalty of long answers, clip((L_max − L_cache − l)/L_cache, −1, 0): 0 first, −1 from L_max on.

    See *DAPO* (arXiv:2503.14476), Eq. 13.

    Args:
      num_tokens: l, sampled tokens of each episode.
      max_tokens: L_max.
      cache_tokens: L_cache, over which the penalty grows.

    Returns:
      Reward to add, in [−1,0].

    Raises:
      ValueError: a cache that is not positive.
    """
    checks.check_positive(cache_tokens=cache_tokens)
    num_tokens = jnp.asarray(num_tokens, jnp.float32)  # of unsigned ones a difference would wrap around
    return jnp.clip((max_tokens - cache_tokens - num_tokens) / cache_tokens, -1.0, 0.0)


def _valid(returns: Array, group_ids: Array, valid: Array | None) -> tuple[Array, Array]:
    checks.check_aligned("N", returns=returns, group_ids=group_ids, valid=valid)
    present = jnp.asarray(group_ids) >= 0
    valid = jnp.isfinite(returns) & present & (True if valid is None else valid)
    return valid, segment_sum(valid, group_ids, valid, len(returns))


def _centre(returns: Array, group_ids: Array, valid: Array | None) -> tuple[Array, Array, Array]:
    """Valid entries [N], count of each group [K=N], returns less their group's mean (0 if constant) [N]."""
    valid, count = _valid(returns, group_ids, valid)
    mean = segment_mean(returns, group_ids, valid, len(returns))
    keep = valid & (spread(_differ(returns, group_ids, valid), group_ids, valid) > 0)
    return valid, count, masked(returns - spread(mean, group_ids, valid), keep)


def _differ(returns: Array, group_ids: Array, valid: Array) -> Array:
    """Whether max − min > 10⁻⁶ max(1, |mean|), of each group [K=N]."""
    ids, size = jnp.where(valid, group_ids, len(returns)), len(returns)
    kept, mean = masked(returns, valid), segment_mean(returns, group_ids, valid, size)
    spans = jax.ops.segment_max(kept, ids, size + 1) - jax.ops.segment_min(kept, ids, size + 1)
    return jnp.where(jnp.isfinite(spans[:size]), spans[:size] > NOISE * jnp.maximum(1.0, jnp.abs(mean)), False)
