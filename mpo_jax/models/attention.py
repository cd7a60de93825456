"""Softmax attention of packed rows: over whole rows of scores, or as suits the device."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mpo_jax.models.mesh import ROWS
from mpo_jax.models.row_attention import attend_by_rows
from mpo_jax.types import Array

BLOCKS = (512, 256, 128)  # tokens at a time on a TPU: the largest that divides a row


def attend(
    q: Array, k: Array, v: Array, mask: Array, *, segment_ids: Array | None, window: int | None, scale: float | None
) -> Array:
    """Σ_s softmax_s(scale q_t · k_s) v_s over the keys that a token may see.

    On a TPU whole rows are attended to by blocks, and no [T,T] scores are held. See *FlashAttention-2*
    (arXiv:2307.08691) and jax's splash attention. On a GPU of NVIDIA cuDNN attends to rows in half precision and holds
    no scores, but reads the mask as numbers [B,1,T,T], which are what keeps packed segments apart there. That has been
    compiled to cuDNN's call only, not run. On a CPU one row after the other is attended to, see `row_attention`.

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

    def by_blocks(q, k, v, mask, segment_ids):
        return _by_blocks(q * jnp.asarray(scale, q.dtype), k, v, segment_ids, window)

    def by_cudnn(q, k, v, mask, segment_ids):
        return _by_cudnn(q, k, v, mask, scale)

    def by_rows(q, k, v, mask, segment_ids):
        return _placed(attend_by_rows)(q * jnp.asarray(scale, q.dtype), k, v, mask)

    kernels = {}
    if segment_ids is not None and k.shape[2] % _tensor() == 0:
        kernels |= {"cpu": by_rows}
        kernels |= {"tpu": by_blocks} if fits(q.shape[1], q.shape[-1]) else {}
        kernels |= {"cuda": by_cudnn} if _has_cuda() and fits_cudnn(q.shape[1], q.shape[-1], q.dtype) else {}
    if not kernels:
        return whole(q, k, v, mask, segment_ids)
    return jax.lax.platform_dependent(q, k, v, mask, segment_ids, default=whole, **kernels)


def _tensor() -> int:
    return dict(jax.sharding.get_abstract_mesh().shape).get("tensor", 1)


def _has_cuda() -> bool:
    """Whether there is a GPU of NVIDIA here: without one jax does not even trace cuDNN's attention."""
    return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version


def fits(length: int, head_dim: int) -> bool:
    """Whether the kernel of TPUs takes rows and heads of these sizes."""
    return length % BLOCKS[-1] == 0 and head_dim % 128 == 0


def fits_cudnn(length: int, head_dim: int, dtype: jnp.dtype) -> bool:
    """Whether cuDNN takes rows and heads of these sizes, forward and backward and with a mask, on every GPU."""
    return length % 2 == 0 and head_dim % 8 == 0 and head_dim <= 128 and dtype in (jnp.bfloat16, jnp.float16)


def _by_cudnn(q: Array, k: Array, v: Array, mask: Array, scale: float) -> Array:
    """The same by cuDNN: each device has its own rows and heads; what lies in the future is not computed."""

    def on_device(q, k, v, mask):
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask[:, None], scale=scale, is_causal=True, implementation="cudnn"
        )

    return _placed(on_device)(q, k, v, mask)


def _placed(on_device: Callable) -> Callable:
    """The function of q, k, v and one more array of rows, on the mesh in use: rows and heads are divided."""
    if jax.sharding.get_abstract_mesh().empty:
        return on_device
    heads = P(ROWS, None, "tensor", None)
    specs = (heads, heads, heads, P(ROWS))
    return jax.shard_map(on_device, in_specs=specs, out_specs=heads, check_vma=False)


def _by_blocks(q: Array, k: Array, v: Array, segment_ids: Array, window: int | None, interpret: bool = False) -> Array:
    """The same of scaled q: each device has its own rows and heads."""

    def on_device(q, k, v, segment_ids):
        kernel, ids = _kernel(q.shape[1], q.shape[2], window, interpret)
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.vmap(kernel)(q, k, v, ids(q=segment_ids, kv=segment_ids)).swapaxes(1, 2)

    return _placed(on_device)(q, k, v, segment_ids)


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
