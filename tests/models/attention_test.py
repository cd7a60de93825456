"""The kernel that a TPU gets, interpreted, beside attention over whole rows; the call that a GPU gets, lowered only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpo_jax.models import attention


@pytest.mark.parametrize("window", [None, 5])
def test_by_blocks_as_over_whole_rows(window):
    """Two packed rows of 128 tokens, 4 heads over 2 of keys: outputs and gradients."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 128, heads, 128)), jnp.float32) for heads in (4, 2, 2))
    ids = np.array([[0] * 50 + [1] * 78, [0] * 100 + [-1] * 28], np.int32)
    back = np.arange(128)[:, None] - np.arange(128)
    mask = (ids[:, :, None] == ids[:, None, :]) & (back >= 0) & (back < (window or 128))

    def blocks(q, k, v):
        return jnp.sum(attention._by_blocks(q * 128**-0.5, k, v, ids, window, interpret=True) ** 2)

    def whole(q, k, v):
        return jnp.sum(attention.attend(q, k, v, mask, segment_ids=None, window=window, scale=None) ** 2)

    found, expected = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(q, k, v) for f in (blocks, whole))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


@pytest.mark.parametrize(("dtype", "length"), [(jnp.bfloat16, 64), (jnp.float32, 64), (jnp.bfloat16, 63)])
def test_cudnn_gets_the_mask_of_what_it_takes(dtype, length, monkeypatch):
    """As if there were a GPU here: nothing is run, so that this says which call is made, not what it gives."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(attention, "_has_cuda", lambda: True)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    q, k = (jax.ShapeDtypeStruct((2, length, heads, 64), dtype) for heads in (4, 2))
    ids = np.zeros((2, length), np.int32)
    mask = jax.ShapeDtypeStruct((2, length, length), bool)

    def total(q, k, v, mask):
        return jnp.sum(attention.attend(q, k, v, mask, segment_ids=ids, window=None, scale=None).astype(jnp.float32))

    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(q, k, k, mask)
    on_gpu, on_cpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu"))
    taken = (dtype, length) == (jnp.bfloat16, 64)
    # The calls with a bias: without one, "fmhaSoftmax", nothing would keep packed sequences apart.
    assert ("__cudnn$fmhaScaleBiasSoftmax(" in on_gpu) == ("__cudnn$fmhaScaleBiasSoftmaxBackward(" in on_gpu) == taken
    assert f"tensor<2x1x{length}x{length}xbf16>" in on_gpu or not taken
    assert "__cudnn$" not in on_cpu
