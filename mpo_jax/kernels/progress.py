"""Progress Advantage: a step's credit from nothing but the log-probs of a policy and of its reference."""

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
) -> Float[Array, "K"]:
    """Score of each step, β (reduce log π − reduce log π_ref): each model is reduced first, then subtracted.

    See *Progress Advantage* (arXiv:2606.26080).

    Args:
      logprobs: [T] under the trained policy.
      ref_logprobs: [T] under its reference.
      ids: [T] step of each token, -1 on padding.
      mask: [T] action tokens.
      reduce: over the tokens of a step.
      beta: β of the KL-regularised problem whose solution the policy is.
      num_segments: K, static; None is T.

    Returns:
      [K] scores, 0 for a step without tokens.

    Raises:
      ValueError: for shapes, dtypes or ids that do not fit.
    """
    checks.check_aligned("T", logprobs=logprobs, ref_logprobs=ref_logprobs, ids=ids, mask=mask)
    size = len(ids) if num_segments is None else num_segments
    return beta * (reduce(logprobs, ids, mask, size) - reduce(ref_logprobs, ids, mask, size))
