import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from mpo_jax import kernels

both = jax.jit(kernels.token_logprobs_and_entropy)


def f32(*x):
    return np.array(x, np.float32)


def problem(n=12, d=16, v=500, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    hidden, head = (rng.normal(size=s).astype(np.float32) / scale for s, scale in (((n, d), 1), ((d, v), 2)))
    targets = rng.integers(0, v, n).astype(np.int32)
    targets[:2] = 0, v - 1
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), targets


def naive(hidden, head, targets, temperature=1.0, softcap=None):
    z = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    return kernels.token_logprobs_and_entropy(z / temperature, targets)


def scalar(f, targets, seed=1):
    rng = np.random.default_rng(seed)
    a, b = (rng.normal(size=len(targets)).astype(np.float32) for _ in range(2))
    return lambda hidden, head: sum(jnp.sum(c * x) for c, x in zip((a, b), f(hidden, head, targets), strict=True))


def test_matches_the_oracle():
    logits, targets = 5 * np.random.default_rng(0).normal(size=(9, 40)).astype(np.float32), np.arange(9) * 4
    expected = np.array([oracles.logprob_and_entropy(z, t) for z, t in zip(logits, targets, strict=True)])
    np.testing.assert_allclose(np.stack(both(logits, targets), 1), expected, rtol=1e-5, atol=1e-6)
    found = kernels.linear_logprobs(logits, np.eye(40, dtype=np.float32), targets, tile=7)
    np.testing.assert_allclose(np.stack(found, 1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tile", [64, 500, 1000, 499])
def test_bug_162_tiles_equal_the_whole(tile, temperature, softcap):
    *data, targets = problem()
    options = {"temperature": temperature, "softcap": softcap}
    ours, whole = functools.partial(kernels.linear_logprobs, tile=tile, **options), functools.partial(naive, **options)
    for a, b in zip(ours(*data, targets), whole(*data, targets), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(*(jax.grad(scalar(f, targets), (0, 1))(*data) for f in (ours, whole)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_bug_162_temporary_memory_grows_with_the_tile_and_not_the_vocabulary():
    *data, targets = problem(512, 32, 8192)

    def temporaries(f):
        return jax.jit(jax.grad(scalar(f, targets), (0, 1))).lower(*data).compile().memory_analysis().temp_size_in_bytes

    small, large = (temporaries(functools.partial(kernels.linear_logprobs, tile=tile)) for tile in (64, 1024))
    assert small < 512 * 8192 * 4 / 8 < temporaries(naive)
    assert small < large / 2


def test_bug_162_a_bfloat16_head_is_not_widened_as_a_whole():
    *data, targets = problem(16, 64, 8192, dtype=jnp.bfloat16)
    f = jax.jit(jax.grad(scalar(functools.partial(kernels.linear_logprobs, tile=64), targets), (0, 1)))
    program = f.lower(*data).compile().as_text()
    assert "bf16[64,8192]" in program and "f32[64,8192]" not in program


def test_linear_logprobs_in_bfloat16_accumulates_in_float32():
    *data, targets = problem(dtype=jnp.bfloat16)
    ours = functools.partial(kernels.linear_logprobs, tile=64)
    for a, b in zip(ours(*data, targets), naive(*data, targets), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    exact = jax.grad(scalar(naive, targets), (0, 1))(*(x.astype(jnp.float32) for x in data))
    for a, b in zip(jax.grad(scalar(ours, targets), (0, 1))(*data), exact, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(np.float32), b, rtol=0.05, atol=0.02)


def test_linear_logprobs_with_a_tied_head_and_under_vmap():
    hidden, head, targets = problem()
    found = jax.grad(lambda e: jnp.sum(kernels.linear_logprobs(hidden, e.T, targets, tile=64)[0]))(head.T)
    np.testing.assert_allclose(found, jax.grad(lambda w: naive(hidden, w, targets)[0].sum())(head).T, atol=1e-5)
    f = jax.vmap(functools.partial(kernels.linear_logprobs, tile=64), (0, None, 0))
    stacked = f(jnp.stack([hidden, 2 * hidden]), head, np.stack([targets, targets]))
    np.testing.assert_allclose(stacked[0][1], naive(2 * hidden, head, targets)[0], rtol=1e-5, atol=1e-5)


def test_linear_logprobs_survives_extreme_logits():
    head, targets = np.eye(4, dtype=np.float32), np.array([0, 1])
    hidden = f32([1e4, -1e4, 0, 0], [3e4, 3e4, -3e4, 0])
    found = kernels.linear_logprobs(hidden, head, targets, tile=3)
    np.testing.assert_allclose(found[0], [0, np.log(0.5)], atol=1e-5)
    np.testing.assert_allclose(found[1], [0, np.log(2)], atol=1e-5)
    for g in jax.grad(scalar(functools.partial(kernels.linear_logprobs, tile=3), targets), (0, 1))(hidden, head):
        assert np.isfinite(g).all()


def test_bug_018_and_023_logprobs_are_selected_by_their_own_index():
    # the log-prob of tokens[t] stands at t: mask and turn ids apply as they are
    logprobs = f32(0, -1, -2, -4)
    assert kernels.segment_sum(logprobs, np.zeros(4, np.int32), np.array([0, 0, 1, 0], bool), 1)[0] == -2
    logits = np.log(f32([0.5, 0.25, 0.25], [0.1, 0.1, 0.8]))
    np.testing.assert_allclose(both(logits, np.array([1, 2]))[0], np.log([0.25, 0.8]), rtol=1e-6)


def test_bug_089_excluded_large_logits_leave_finite_gradients():
    def log_z(x):
        return -both(jnp.where(np.array([[True, False]]), x, -jnp.inf), np.array([0]))[0][0] + x[0, 0]

    np.testing.assert_array_equal(jax.grad(log_z)(f32([0, 100])), [[1, 0]])


def test_bug_091_excluded_entries_have_no_probability():
    logits = np.tile(f32(1, 2, -np.inf), (3, 1))
    np.testing.assert_allclose(np.exp(both(logits, np.arange(3))[0]), [0.26894, 0.73106, 0], rtol=1e-4)


@pytest.mark.parametrize("logits,entropy", [([0, -np.inf], 0), ([0, 0, -np.inf], 0.693147), ([65504, -65504], 0)])
def test_bug_092_entropy_at_zero_probability(logits, entropy):
    logits, targets = np.array([logits], np.float16), np.array([0])
    np.testing.assert_allclose(both(logits, targets)[1], [entropy], atol=1e-6)
    grad = jax.grad(lambda z: both(z, targets)[1].sum())(logits)
    assert np.isfinite(grad).all() and not grad[~np.isfinite(logits)].any()


def test_bug_094_kl_of_equal_bfloat16_logits_is_zero():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 248320)), jnp.bfloat16)
    np.testing.assert_allclose(jax.jit(kernels.categorical_kl)(logits, logits), [0], atol=1e-6)
    p, q = f32([0.8, 0.2, 0]), f32([0.5, 0.25, 0.25])
    np.testing.assert_allclose(
        kernels.categorical_kl(np.log(p + 1e-30), np.log(q)), [0.8 * np.log(1.6) + 0.2 * np.log(0.8)], rtol=1e-5
    )


def test_bug_095_logprobs_are_float32():
    logits = jnp.asarray([[0.0, 20.0625]], jnp.bfloat16)
    for x in both(logits, np.array([0])):
        assert x.dtype == jnp.float32
    np.testing.assert_allclose(both(logits, np.array([0]))[0], -np.float32(logits[0, 1]), rtol=1e-6)


@pytest.mark.parametrize("vocabulary", [4, 200])
@pytest.mark.parametrize("label", [-100, 10**6])
def test_bug_097_padding_labels_are_sanitised(vocabulary, label):
    logits, targets = np.random.default_rng(0).normal(size=(2, vocabulary)).astype(np.float32), np.array([1, label])
    linear = functools.partial(kernels.linear_logprobs, tile=3)
    for f in (both, lambda z, t: linear(z, np.eye(vocabulary, dtype=np.float32), t)):
        found, grad = jax.value_and_grad(lambda z, f=f: f(z, targets)[0].sum())(logits)
        np.testing.assert_allclose(found, oracles.logprob_and_entropy(logits[0], 1)[0], rtol=1e-5)
        assert np.isfinite(grad).all() and not grad[1].any()


def test_bug_100_temperature_divides_logits():
    np.testing.assert_allclose(both(f32([2, 0]) / 0.5, np.array([0]))[0], [-0.018150], atol=1e-6)
    found = kernels.linear_logprobs(f32([2, 0]), np.eye(2, dtype=np.float32), np.array([0]), temperature=0.5)
    np.testing.assert_allclose(found[0], [-0.018150], atol=1e-6)


def test_bug_087_and_123_logprobs_do_not_depend_on_the_batch():
    hidden, head, targets = problem(n=128)
    ours = functools.partial(kernels.linear_logprobs, tile=64)
    whole, alone = ours(hidden, head, targets)[0], ours(hidden[:1], head, targets[:1])[0]
    np.testing.assert_allclose(whole[:1], alone, atol=1e-5)
    np.testing.assert_allclose(whole[:100], ours(hidden[:100], head, targets[:100])[0], atol=1e-5)
