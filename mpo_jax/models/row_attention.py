"""Softmax attention of packed rows as CPUs like it: a row at a time, and of that some queries at a time.

So scores stay in a core's cache, those of later keys are not computed, and none is kept for the backward pass.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from mpo_jax.types import Array

QUERIES, PARTS = 128, 8  # queries at a time, more of them in rows of more than so many parts


def attend_by_rows(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Σ_s softmax_s(q_t · k_s) v_s over keys s ≤ t, in float32.

    Args:
      q: [B,T,N,H], scaled.
      k, v: [B,T,K,H], K a divisor of N.
      mask: bool[B,T,T], which of the keys s ≤ t a token sees, itself always; what it says of others is not read.

    Returns:
      [B,T,N,H], of the type of q.
    """
    rows, length, heads, width = q.shape
    by_key = [jnp.moveaxis(x.astype(jnp.float32), 1, 2) for x in (k, v)]
    grouped = jnp.moveaxis(q.astype(jnp.float32).reshape(rows, length, k.shape[2], -1, width), 1, 3)
    return jnp.moveaxis(_attend(grouped, *by_key, mask), 3, 1).reshape(rows, length, heads, width).astype(q.dtype)


@jax.custom_vjp
def _attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """The same of q[B,K,G,T,H], k and v[B,K,T,H]."""
    return _forward(q, k, v, mask)[0]


def _forward(q: Array, k: Array, v: Array, mask: Array) -> tuple:
    mixed, totals = jax.lax.map(lambda row: _row(*row), (q, k, v, mask))
    return mixed, (q, k, v, mask, mixed, totals)


def _backward(residuals: tuple, cotangent: Array) -> tuple:
    return *jax.lax.map(lambda row: _row_backward(*row), (*residuals, cotangent)), None


_attend.defvjp(_forward, _backward)


def _row(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, Array]:
    """Of one row, what its queries find and log Σ_s exp(q_t · k_s), [K,G,T,1]."""
    mixed, totals = [], []
    for some, before in _parts(len(mask)):
        scores = _scores(q[:, :, some], k[:, before], mask[some, before])
        top = jnp.max(scores, axis=-1, keepdims=True)
        p = jnp.exp(scores - top)
        total = jnp.sum(p, axis=-1, keepdims=True)
        mixed.append(jnp.einsum("kgts,ksh->kgth", p, v[:, before]) / total)
        totals.append(top + jnp.log(total))
    return jnp.concatenate(mixed, axis=2), jnp.concatenate(totals, axis=2)


def _row_backward(
    q: Array, k: Array, v: Array, mask: Array, mixed: Array, totals: Array, cotangent: Array
) -> tuple[Array, Array, Array]:
    """The gradients of one row's q, k and v. See *FlashAttention* (arXiv:2205.14135), appendix B.2."""
    mean = jnp.sum(mixed * cotangent, axis=-1, keepdims=True)  # Σ_s p_s ∂/∂p_s
    d_q, d_k, d_v = [], *(jnp.zeros_like(x.swapaxes(1, 2)) for x in (k, v))  # [K,H,T], whose products are faster
    for some, before in _parts(len(mask)):
        asked, given = q[:, :, some], cotangent[:, :, some]
        p = jnp.exp(_scores(asked, k[:, before], mask[some, before]) - totals[:, :, some])
        d_scores = p * (jnp.einsum("kgth,ksh->kgts", given, v[:, before]) - mean[:, :, some])
        d_q.append(jnp.einsum("kgts,ksh->kgth", d_scores, k[:, before]))
        d_k = d_k.at[:, :, before].add(jnp.einsum("kgth,kgts->khs", asked, d_scores))
        d_v = d_v.at[:, :, before].add(jnp.einsum("kgth,kgts->khs", given, p))
    return jnp.concatenate(d_q, axis=2), d_k.swapaxes(1, 2), d_v.swapaxes(1, 2)


def _parts(length: int) -> Iterator[tuple[slice, slice]]:
    """Some queries of a row, and the keys that any of them may see."""
    size = max(QUERIES, -(-length // PARTS))
    for start in range(0, length, size):
        end = min(start + size, length)
        yield slice(start, end), slice(0, end)


def _scores(q: Array, k: Array, mask: Array) -> Array:
    """[K,G,t,s] of q[K,G,t,H], k[K,s,H] and mask[t,s]."""
    return jnp.where(mask, jnp.einsum("kgth,ksh->kgts", q, k), jnp.finfo(jnp.float32).min)
