"""Progress Advantage: a step's credit from nothing but the log-probs of a policy and of its reference."""

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from mpo_jax.kernels import checks
from mpo_jax.kernels.checks import Scalar
from mpo_jax.kernels.segments import Reduce, segment_mean
from mpo_jax.types import Array


def progress_advantage(
    logprobs: Float[Array, "T"],
    ref_logprobs: Float[Array, "T"],
    ids: Int[Array, "T"],
    mask: Bool[Array, "T"],
    *,
    reduce: Reduce = segment_mean,
    beta: Scalar = 1.0,
    num_segments: int | None = None,
    subtract_first: bool = False,
) -> Float[Array, "K"]:
    """Score of each step, β (reduce log π − reduce log π_ref): each model is reduced first, then subtracted.

    The orders agree for sums and means, not for the smallest and the largest token. Given each model's mean of its
    top-k log-probs (`linear_confidence`) in place of the log-probs, this is the top-k form. Reduced once more, over the
    steps of an episode, it is the episode's score (`episode_advantage`).

    See *Progress Advantage* (arXiv:2606.26080).

    Args:
      logprobs: [T] under the trained policy.
      ref_logprobs: [T] under its reference.
      ids: [T] step of each token, -1 on padding.
      mask: [T] action tokens.
      reduce: over the tokens of a step.
      beta: β of the KL-regularised problem whose solution the policy is.
      num_segments: K, static; None is T.
      subtract_first: reduce log π − log π_ref instead, static.

    Returns:
      [K] scores, 0 for a step without tokens: one that was cut off scores 0.

    Raises:
      ValueError: for shapes, dtypes or ids that do not fit.
    """
    checks.check_aligned("T", logprobs=logprobs, ref_logprobs=ref_logprobs, ids=ids, mask=mask)
    size = len(ids) if num_segments is None else num_segments
    if subtract_first:
        return beta * reduce(jnp.asarray(logprobs) - ref_logprobs, ids, mask, size)
    return beta * (reduce(logprobs, ids, mask, size) - reduce(ref_logprobs, ids, mask, size))


def episode_advantage(
    scores: Float[Array, "K"],
    episode_ids: Int[Array, "K"],
    is_action: Bool[Array, "K"],
    *,
    reduce: Reduce = segment_mean,
    num_episodes: int = 1,
) -> Float[Array, "S"]:
    """Score of each episode: its action steps' scores, reduced. Those that were cut off count, with 0.

    See *Progress Advantage* (arXiv:2606.26080).

    Args:
      scores: [K] of the steps.
      episode_ids: [K] episode of each step, -1 on padding.
      is_action: [K] steps that are actions; others do not count.
      reduce: over the steps of an episode.
      num_episodes: S, static.

    Returns:
      [S] scores, 0 for an episode without actions.

    Raises:
      ValueError: for shapes, dtypes or ids that do not fit.
    """
    return reduce(scores, episode_ids, is_action, num_episodes)
