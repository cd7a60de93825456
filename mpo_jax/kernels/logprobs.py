"""Log-prob and entropy of given targets, from logits or straight from hidden states; always in float32."""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Float, Int

from mpo_jax.kernels import checks
from mpo_jax.types import Array

_LOWEST = -1e30  # finite, so that rescaling an empty sum is 0 and not NaN


def token_logprobs_and_entropy(
    logits: Float[Array, "T V"], targets: Int[Array, "T"]
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """log softmax(logits)[target] and H = −Σ p log p, safe where a logit is −∞ (p = 0).

    Divide the *logits* by a temperature before; dividing the log-probs is something else.

    Args:
      logits: [T,V] logits that predict each target; −∞ excludes an entry.
      targets: [T]; one outside 0..V-1 (a padding label) gives log-prob 0 and no gradient.

    Returns:
      logprobs [T], entropy [T], in nats, float32.

    Raises:
      ValueError: for shapes or dtypes that do not fit.
    """
    checks.check_aligned("T V", logits=logits)
    checks.check_aligned("T", targets=targets)
    if len(targets) != len(logits):
        raise ValueError(f"targets has shape {targets.shape}, expected ({len(logits)},) as the rows of logits")
    logits, targets = jnp.asarray(logits, jnp.float32), jnp.asarray(targets)
    inside = (targets >= 0) & (targets < logits.shape[-1])
    log_p = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(log_p, jnp.where(inside, targets, 0)[:, None], axis=-1)[:, 0]
    entropy = -jnp.sum(jnp.exp(log_p) * jnp.where(jnp.isneginf(log_p), 0.0, log_p), axis=-1)
    return jnp.where(inside, chosen, 0.0), entropy


def categorical_kl(logits: Float[Array, "T V"], ref_logits: Float[Array, "T V"]) -> Float[Array, "T"]:
    """Exact KL(π‖π_ref) = Σ p (log p − log p_ref) of two distributions, in float32; 0·log 0 = 0.

    Args:
      logits: [T,V] of π.
      ref_logits: [T,V] of π_ref.

    Returns:
      [T], in nats.
    """
    checks.check_aligned("T V", logits=logits, ref_logits=ref_logits)
    log_p, log_ref = (jax.nn.log_softmax(jnp.asarray(x, jnp.float32), axis=-1) for x in (logits, ref_logits))
    possible = ~jnp.isneginf(log_p)
    gap = jnp.where(possible, jnp.where(possible, log_p, 0.0) - jnp.where(possible, log_ref, 0.0), 0.0)
    return jnp.sum(jnp.exp(log_p) * gap, axis=-1)


def linear_logprobs(
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "N"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    tile: int = 1024,
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Log-prob and entropy under softmax(z/temperature), z = hidden @ head, without ever holding [N,V].

    The vocabulary is walked in tiles with an online log-sum-exp; the backward pass walks it again,
    ∂/∂z_v = g_logp (1{v = target} − p_v) − g_entropy p_v (log p_v + H). Both outputs have exact gradients with respect
    to `hidden` and `head`. Logits are accumulated in float32 under any input dtype. Drop masked tokens before the call.

    Args:
      hidden: [N,D] state that predicts each target.
      head: [D,V] output projection (of a tied one, the embedding transposed).
      targets: [N]; one outside 0..V-1 gives log-prob 0 and no gradient.
      temperature: divides the logits (after the soft cap).
      softcap: c, logits become c·tanh(z/c); None for none.
      tile: vocabulary entries at a time, static; V need not be a multiple.

    Returns:
      logprobs [N], entropy [N], in nats, float32.

    Raises:
      ValueError: for shapes or dtypes that do not fit, a temperature or a tile that is not positive.
    """
    checks.check_aligned("N D", hidden=hidden)
    checks.check_aligned("D V", head=head)
    checks.check_aligned("N", targets=targets)
    checks.check_positive(temperature=temperature, tile=tile, V=head.shape[1])
    if hidden.shape[0] != targets.shape[0] or hidden.shape[1] != head.shape[0]:
        raise ValueError(
            f"hidden {hidden.shape}, head {head.shape}, targets {targets.shape}: expected [N,D], [D,V], [N]"
        )
    static = float(temperature), softcap, min(tile, head.shape[1])
    return _linear_logprobs(static, jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_logprobs(static: tuple, hidden: Array, head: Array, targets: Array) -> tuple[Array, Array]:
    return _walk(static, hidden, head, targets)[0]


def _forward(static: tuple, *primals) -> tuple:
    return _walk(static, *(primal.value for primal in primals))


def _walk(static: tuple, hidden: Array, head: Array, targets: Array) -> tuple:
    temperature, softcap, tile = static

    def step(carry: tuple, index: Array) -> tuple:
        top, total, moment, chosen = carry  # max z, Σ e^{z−top}, Σ e^{z−top}(z−top), z of the target
        columns, fresh, start = _columns(index, tile, head.shape[1])
        z = jnp.matmul(hidden, head_tile(head, start, tile), preferred_element_type=jnp.float32)
        z = _cap(z, softcap) / temperature
        z = jnp.where(fresh, z, _LOWEST)
        hit = (columns == targets[:, None]) & fresh
        chosen = chosen + jnp.sum(jnp.where(hit, z, 0.0), axis=1)
        new_top = jnp.maximum(top, jnp.max(z, axis=1))
        weight = jnp.exp(z - new_top[:, None])
        shrink = jnp.exp(top - new_top)
        moment = shrink * (moment + (top - new_top) * total) + jnp.sum(weight * (z - new_top[:, None]), axis=1)
        return (new_top, shrink * total + jnp.sum(weight, axis=1), moment, chosen), None

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    carry, _ = jax.lax.scan(step, (zeros + _LOWEST, zeros, zeros, zeros), jnp.arange(-(-head.shape[1] // tile)))
    top, total, moment, chosen = carry
    log_total = jnp.log(total)  # kept apart from top: their float32 sum would lose what a large top hides
    entropy = log_total - moment / total
    inside = (targets >= 0) & (targets < head.shape[1])
    return (jnp.where(inside, chosen - top - log_total, 0.0), entropy), (hidden, head, targets, top, log_total, entropy)


def _backward(static: tuple, residuals: tuple, cotangents: tuple[Array | SymbolicZero, ...]) -> tuple:
    temperature, softcap, tile = static
    hidden, head, targets, top, log_total, entropy = residuals
    inside = (targets >= 0) & (targets < head.shape[1])
    # Of an output that no loss reads nothing is computed, neither here nor in the loop of `_walk`.
    g_logprob, g_entropy = (None if isinstance(x, SymbolicZero) else x[:, None] for x in cotangents)
    g_logprob = 0.0 if g_logprob is None else jnp.where(inside[:, None], g_logprob, 0.0)

    def step(carry: tuple, index: Array) -> tuple:
        d_hidden, d_head = carry
        columns, fresh, start = _columns(index, tile, head.shape[1])
        weights = head_tile(head, start, tile)
        capped = _cap(jnp.matmul(hidden, weights, preferred_element_type=jnp.float32), softcap)
        log_p = capped / temperature - top[:, None] - log_total[:, None]
        g_log_p = g_logprob if g_entropy is None else g_logprob + g_entropy * (log_p + entropy[:, None])
        d_z = g_logprob * (columns == targets[:, None]) - jnp.exp(log_p) * g_log_p
        slope = 1.0 if softcap is None else 1.0 - (capped / softcap) ** 2
        d_z = jnp.where(fresh, d_z * slope / temperature, 0.0).astype(hidden.dtype)
        d_hidden = d_hidden + jnp.matmul(d_z, weights.T, preferred_element_type=jnp.float32)
        d_tile = jnp.matmul(hidden.T, d_z, preferred_element_type=jnp.float32).astype(head.dtype)
        d_tile = d_tile + _slice(d_head, start, tile, head.dtype)
        return (d_hidden, jax.lax.dynamic_update_slice_in_dim(d_head, _bits(d_tile), start, axis=1)), None

    carry = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(_bits(head))
    (d_hidden, d_head), _ = jax.lax.scan(step, carry, jnp.arange(-(-head.shape[1] // tile)))
    return d_hidden.astype(hidden.dtype), jax.lax.bitcast_convert_type(d_head, head.dtype), None


def _columns(index: Array, tile: int, vocabulary: int) -> tuple[Array, Array, Array]:
    """Columns [1,tile] of a tile, which of them no earlier tile had, the first one (the last tile is moved back)."""
    start = jnp.minimum(index * tile, vocabulary - tile)
    columns = start + jnp.arange(tile)[None, :]
    return columns, columns >= index * tile, start


def head_tile(head: Array, start: Array, tile: int) -> Array:
    """Columns start..start+tile-1; the barrier keeps XLA from copying the whole head before the loop."""
    head, start = jax.lax.optimization_barrier((head, start))
    return _slice(_bits(head), start, tile, head.dtype)


def _bits(x: Array) -> Array:
    """bfloat16 as uint16: XLA for CPUs would widen the whole array to float32 before it slices or updates a part."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _slice(bits: Array, start: Array, tile: int, dtype: jnp.dtype) -> Array:
    """Columns start..start+tile-1 of an array given as `_bits`."""
    return jax.lax.bitcast_convert_type(jax.lax.dynamic_slice_in_dim(bits, start, tile, axis=1), dtype)


def _cap(logits: Array, softcap: float | None) -> Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


_linear_logprobs.defvjp(_forward, _backward, symbolic_zeros=True)
