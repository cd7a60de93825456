"""What a CPU and a TPU get, the latter interpreted, beside attention over whole rows; what a GPU gets, lowered only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpo_jax.models import attention, row_attention


@pytest.mark.parametrize(("length", "window"), [(40, None), (40, 5), (150, None), (7, None)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_by_rows_as_over_whole_rows(length, window, dtype, monkeypatch):
    """Packed rows, 4 heads over 2 of keys, outputs and gradients; 16 queries at a time, 19 in long rows."""
    monkeypatch.setattr(row_attention, "QUERIES", 16)
    rng = np.random.default_rng(0)
    q, k, v, given = (jnp.asarray(rng.normal(size=(3, length, heads, 8)), dtype) for heads in (4, 2, 2, 4))
    ids = np.sort(rng.integers(0, 3, (3, length)))
    ids[1, length // 2 :] = -1
    back = np.arange(length)[:, None] - np.arange(length)
    mask = (ids[:, :, None] == ids[:, None, :]) & (back >= 0) & (back < (window or length))

    def total(segment_ids, q, k, v):
        found = attention.attend(q, k, v, mask, segment_ids=segment_ids, window=window, scale=None)
        return jnp.sum((found * given).astype(jnp.float32)), found

    gradient = jax.grad(total, argnums=(1, 2, 3), has_aux=True)
    rows, whole = (jax.jit(functools.partial(gradient, segment_ids)) for segment_ids in (ids, None))
    assert ("while" in rows.lower(q, k, v).as_text()) and "while" not in whole.lower(q, k, v).as_text()
    for found, expected in zip(*(jax.tree.leaves(f(q, k, v)) for f in (rows, whole)), strict=True):
        assert found.dtype == expected.dtype
        # Up to 150 products of a few units each: float32 keeps 1e-5 of them, bfloat16, rounded to 8 bits, 5e-2.
        np.testing.assert_allclose(found, expected, atol=1e-5 if dtype == jnp.float32 else 5e-2)


@pytest.mark.parametrize(
    ("length", "sizes"), [(7, [7]), (128, [128]), (300, [128, 128, 44]), (1100, 7 * [138] + [134])]
)
def test_every_query_is_in_one_part_with_all_keys_before_it(length, sizes):
    """1,100 queries in at most 8 parts are 1100 / 8 = 137.5 in each."""
    parts = list(row_attention._parts(length))
    assert [some.stop - some.start for some, _ in parts] == sizes
    assert [query for some, _ in parts for query in range(length)[some]] == list(range(length))
    assert all((before.start, before.stop) == (0, some.stop) for some, before in parts)


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
