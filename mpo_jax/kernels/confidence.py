"""How peaked a distribution is, straight from hidden states: the quantities of Self-Certainty and DeepConf."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from mpo_jax.kernels import checks
from mpo_jax.kernels.logprobs import head_tile
from mpo_jax.types import Array

_LOWEST = -1e30  # finite, as in `logprobs`


def linear_confidence(
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    *,
    k: int = 20,
    softcap: float | None = None,
    tile: int = 1024,
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Mean of the k highest log-probs, and KL(uniform ‖ p), under softmax(hidden @ head).

    top = (1/k) Σ_{j in top k} log p_j;  certainty = −(1/V) Σ_j log(V p_j), 0 for the uniform distribution.

    The vocabulary is walked in tiles, as in `linear_logprobs`. See *Scalable Best-of-N Selection via Self-Certainty*
    (arXiv:2502.18581), and *Deep Think with Confidence* (arXiv:2508.15260), whose token confidence is −top, k = 20.

    Args:
      hidden: [N,D] state that predicts each token.
      head: [D,V] output projection.
      k: how many, static; all where V is smaller.
      softcap: c, logits become c·tanh(z/c); None for none.
      tile: vocabulary entries at a time, static; V need not be a multiple.

    Returns:
      top [N], certainty [N], in nats, float32.

    Raises:
      ValueError: for shapes or dtypes that do not fit, k or a tile that is not positive.
    """
    checks.check_aligned("N D", hidden=hidden)
    checks.check_aligned("D V", head=head)
    if hidden.shape[1] != head.shape[0]:
        raise ValueError(f"hidden {hidden.shape}, head {head.shape}: expected [N,D], [D,V]")
    checks.check_positive(k=k, tile=tile, V=head.shape[1])
    rows, vocabulary = hidden.shape[0], head.shape[1]
    tile, k = min(tile, vocabulary), min(k, vocabulary)

    def step(carry: tuple, index: Array) -> tuple:
        top, total, linear, best = carry  # max z, Σ e^{z−top}, mean z, the k highest z
        start = jnp.minimum(index * tile, vocabulary - tile)  # the last tile is moved back
        z = jnp.matmul(hidden, head_tile(head, start, tile), preferred_element_type=jnp.float32)
        z = z if softcap is None else softcap * jnp.tanh(z / softcap)
        fresh = (start + jnp.arange(tile) >= index * tile)[None, :]
        shown = jnp.where(fresh, z, _LOWEST)
        new_top = jnp.maximum(top, jnp.max(shown, axis=1))
        total = total * jnp.exp(top - new_top) + jnp.sum(jnp.exp(shown - new_top[:, None]), axis=1)
        linear = linear + jnp.sum(jnp.where(fresh, z, 0.0), axis=1) / vocabulary
        best = jax.lax.top_k(jnp.concatenate([best, shown], axis=1), k)[0]
        return (new_top, total, linear, best), None

    zeros = jnp.zeros(rows, jnp.float32)
    carry = zeros + _LOWEST, zeros, zeros, jnp.full((rows, k), _LOWEST)
    (top, total, linear, best), _ = jax.lax.scan(step, carry, jnp.arange(-(-vocabulary // tile)))
    log_total = jnp.log(total)
    certainty = top - linear + log_total - jnp.log(vocabulary)
    return jnp.mean(best - top[:, None], axis=1) - log_total, certainty
