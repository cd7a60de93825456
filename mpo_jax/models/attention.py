"""Softmax attention of packed rows: over whole rows of scores, or by blocks where the device has a kernel for it."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mpo_jax.models.mesh import ROWS
from mpo_jax.types import Array

BLOCKS = (512, 256, 128)  # tokens at a time on a TPU: the largest that divides a row


def attend(
    q: Array, k: Array, v: Array, mask: Array, *, segment_ids: Array | None, window: int | None, scale: float | None
) -> Array:
    """Σ_s softmax_s(scale q_t · k_s) v_s over the keys that a token may see.

    On a TPU whole rows are attended to by blocks, and no [T,T] scores are held. See *FlashAttention-2*
    (arXiv:2307.08691) and jax's splash attention.

    Args:
      q: [B,T,N,H].
      k, v: [B,S,K,H], K a divisor of N.
      mask: bool[B,T,S].
      segment_ids: int[B,T], where the mask is no more than causality within a segment and the window; None otherwise.
      window: how many tokens a token sees back, itself included; None for all.
      scale: None for H^(−1/2).

    Returns:
      [B,T,N,H].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def whole(q, k, v, mask, segment_ids):
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=scale)

    if segment_ids is None or not _fits(q, k):
        return whole(q, k, v, mask, segment_ids)

    def by_blocks(q, k, v, mask, segment_ids):
        return _by_blocks(q * jnp.asarray(scale, q.dtype), k, v, segment_ids, window)

    return jax.lax.platform_dependent(q, k, v, mask, segment_ids, tpu=by_blocks, default=whole)


def _fits(q: Array, k: Array) -> bool:
    tensor = dict(jax.sharding.get_abstract_mesh().shape).get("tensor", 1)
    return fits(q.shape[1], q.shape[-1]) and k.shape[2] % tensor == 0


def fits(length: int, head_dim: int) -> bool:
    """Whether the kernel of TPUs takes rows and heads of these sizes."""
    return length % BLOCKS[-1] == 0 and head_dim % 128 == 0


def _by_blocks(q: Array, k: Array, v: Array, segment_ids: Array, window: int | None, interpret: bool = False) -> Array:
    """The same of scaled q: each device has its own rows and heads."""

    def on_device(q, k, v, segment_ids):
        kernel, ids = _kernel(q.shape[1], q.shape[2], window, interpret)
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.vmap(kernel)(q, k, v, ids(q=segment_ids, kv=segment_ids)).swapaxes(1, 2)

    if jax.sharding.get_abstract_mesh().empty:
        return on_device(q, k, v, segment_ids)
    heads = P(ROWS, None, "tensor", None)
    place = functools.partial(jax.shard_map, out_specs=heads, check_vma=False)
    return place(on_device, in_specs=(heads, heads, heads, P(ROWS)))(q, k, v, segment_ids)


def _kernel(length: int, heads: int, window: int | None, interpret: bool) -> tuple:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash  # a second to import
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, length)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    block = next(size for size in BLOCKS if length % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes = splash.BlockSizes(**{f"block_{name}": block for name in names})
    many = masks.MultiHeadMask([mask] * heads)
    kernel = splash.make_splash_mha(many, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
    return kernel, splash.SegmentIds
