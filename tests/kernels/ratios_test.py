import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.rows import SETTINGS, build, close, rows
from mpo_jax import kernels

GRANULARITIES = {"token": kernels.token_ids, "turn": kernels.turn_ids, "sequence": kernels.sequence_ids}
product = jax.jit(kernels.importance_ratio)
mean = jax.jit(functools.partial(kernels.importance_ratio, reduce=kernels.segment_mean))


def f32(*x):
    return np.array(x, np.float32)


def objective(logprobs, anchor, ids, mask, advantages, **kwargs):
    ratio = kernels.importance_ratio(logprobs, anchor, ids, mask, **kwargs)
    terms = kernels.clipped_surrogate(ratio, advantages, epsilon_low=0.2, epsilon_high=0.2)
    return jnp.sum(jnp.where(mask, terms, 0))


@SETTINGS
@given(rows(), st.sampled_from(sorted(GRANULARITIES)), st.sampled_from([0.01, 0.3]))
def test_ratio_and_its_diagonal_gradient_match_the_oracle(row, granularity, noise):
    logprobs, anchor, ct = row.draw(noise), row.draw(noise), row.draw(garbage=1)
    ids = np.asarray(GRANULARITIES[granularity](row.mask, row.turns, row.sequences))
    for kernel, by_mean in ((product, False), (mean, True)):
        expected = oracles.ratio(logprobs, anchor, ids, row.mask, by_mean)
        found, pullback = jax.vjp(lambda x, k=kernel: k(x, anchor, ids, row.mask), logprobs)
        np.testing.assert_allclose(found, expected, rtol=1e-4 if granularity == "sequence" else 3e-5)
        np.testing.assert_array_equal(found[~row.mask], 1.0)
        np.testing.assert_allclose(pullback(ct)[0], np.where(row.mask, ct * np.asarray(found), 0), rtol=1e-6)


def test_check_7_the_jacobian_is_diagonal():
    row = build([[3, 2], [4]], length=64)
    x, anchor = row.draw(0.1), row.draw(0.1)
    jacobian = jax.jacobian(product)(x, anchor, row.turns, row.mask)
    np.testing.assert_allclose(
        jacobian, np.diag(np.where(row.mask, product(x, anchor, row.turns, row.mask), 0)), rtol=1e-6
    )


def test_check_8_the_gradient_keeps_the_centred_part_and_a_differentiable_ratio_loses_it():
    mask, ids = np.ones(4, bool), np.zeros(4, np.int32)
    lp, anchor, a = f32(-1, -2, -1.5, -0.5), f32(-1.1, -1.9, -1.4, -0.6), f32(3, -1, 2, -3.5)
    rho = np.exp(np.sum(lp - anchor, dtype=np.float64))
    ours = jax.grad(lambda x: jnp.sum(product(x, anchor, ids, mask) * a))(lp)
    np.testing.assert_allclose(ours, rho * a, rtol=1e-5)
    naive = jax.grad(lambda x: jnp.sum(jnp.exp(jnp.sum(x - anchor)) * a))(lp)
    np.testing.assert_allclose(naive, np.full(4, rho * a.sum()), rtol=1e-5)
    assert np.abs(naive - ours).max() > 1


@pytest.mark.parametrize("shift,alive", [(0.3, -1), (-0.3, 1)])
def test_check_9_outside_the_clip_one_sign_keeps_its_gradient(shift, alive):
    mask, ids, anchor = np.ones(4, bool), np.zeros(4, np.int32), np.zeros(4, np.float32)
    a = f32(1, -1, 2, -2)
    grad = jax.grad(objective)(anchor + np.float32(shift / 4), anchor, ids, mask, a)
    np.testing.assert_array_equal(grad != 0, np.sign(a) == alive)


def test_check_10_on_policy_the_turn_gradient_is_the_token_one():
    row = build([[3, 2], [4]], length=64)
    lp, a = row.draw(), row.draw()
    by_turn = jax.grad(objective)(lp, lp, row.turns, row.mask, a)
    by_token = jax.grad(objective)(lp, lp, kernels.token_ids(row.mask, row.turns, row.sequences), row.mask, a)
    np.testing.assert_array_equal(by_turn, by_token)


def test_one_token_sequences_and_turns_are_token_ratios():
    row = build([[1], [1], [1]], length=64)
    data = row.draw(), row.draw()
    expected = product(*data, kernels.token_ids(row.mask, row.turns, row.sequences), row.mask)
    np.testing.assert_array_equal(product(*data, row.turns, row.mask), expected)
    np.testing.assert_array_equal(mean(*data, row.sequences, row.mask), expected)


def test_gspo_gradient_is_that_of_the_differentiable_geometric_mean():
    mask, ids = np.ones(4, bool), np.zeros(4, np.int32)
    lp, anchor = f32(-1, -2, -1.5, -0.5), f32(-1.1, -1.9, -1.4, -0.6)
    ours = jax.grad(lambda x: jnp.mean(mean(x, anchor, ids, mask)))(lp)
    original = jax.grad(lambda x: jnp.exp(jnp.mean(x - anchor)))(lp)
    np.testing.assert_allclose(ours, original, rtol=1e-6)


def test_bug_077_the_clamp_hides_no_nan_and_stops_no_gradient():
    mask, ids = np.ones(3, bool), np.zeros(3, np.int32)
    lp, anchor = f32(50, 0, 0), f32(0, 0, 0)
    np.testing.assert_allclose(product(lp, anchor, ids, mask), np.exp(20.0), rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda x: product(x, anchor, ids, mask)[1])(lp), [0, np.exp(20.0), 0], rtol=1e-6
    )
    for bad in (np.nan, -np.inf, np.inf):
        assert np.isnan(product(f32(bad, 0, 0), anchor, ids, mask)).any()


def test_all_masked_row_has_ratio_one_and_no_gradient():
    mask, ids, x = np.zeros(3, bool), np.full(3, -1), f32(np.nan, np.inf, 1)
    np.testing.assert_array_equal(product(x, x, ids, mask), 1)
    assert not np.any(jax.grad(lambda y: product(y, x, ids, mask).sum())(x))


@pytest.mark.parametrize("kernel", [product, mean])
@pytest.mark.parametrize("ids", [[0, 0, 0], [0, -1, 0]])
def test_bug_005_placeholder_logprobs_do_not_enter(kernel, ids):
    new, old, mask = f32(-1, 0, -2), f32(-1, 1, -2), np.array([1, 0, 1], bool)
    np.testing.assert_array_equal(kernel(new, old, np.array(ids), mask), 1)
    np.testing.assert_array_equal(jax.grad(lambda x: kernel(x, old, np.array(ids), mask).sum())(new), [1, 0, 1])


def test_bug_020_identical_logprobs_give_ratio_one():
    lp, mask, ids = f32(0, -1, -2, -3), np.ones(4, bool), np.arange(4)
    np.testing.assert_array_equal(product(lp, lp, ids, mask), 1)
    shifted = product(np.roll(lp, -1), lp, ids, mask)  # what a wrong convention would look like
    np.testing.assert_allclose(shifted[:3], np.exp([-1, -1, -1]), rtol=1e-6)


def test_bug_075_huge_sequence_ratios_stay_finite():
    mask, ids, zeros = np.ones(2, bool), np.array([0, 1]), f32(0, 0)
    loss, grad = jax.value_and_grad(objective)(f32(100, 0), zeros, ids, mask, f32(1, -1), reduce=kernels.segment_mean)
    assert np.isfinite(loss)
    np.testing.assert_allclose(grad, [0, -1])
    np.testing.assert_allclose(mean(f32(-200, 0), zeros, ids, mask)[0], 0, atol=1e-8)


@pytest.mark.parametrize("junk", [9.0, -50.0, np.nan])
def test_bug_081_masked_tokens_leave_the_gspo_ratio(junk):
    x, zeros, mask, ids = f32(0.2, -0.1, junk), f32(0, 0, 0), np.array([1, 1, 0], bool), np.zeros(3, np.int32)
    np.testing.assert_allclose(mean(x, zeros, ids, mask), [1.05127, 1.05127, 1], rtol=1e-5)
    assert jax.grad(lambda x: mean(x, zeros, ids, mask).sum())(x)[2] == 0


def test_bug_083_turn_ratios_do_not_mix():
    x, ids = f32(0.1, 0.2, 5, 5, -0.3, 0), np.array([0, 0, -1, -1, 1, 1])
    found = product(x, np.zeros_like(x), ids, ids >= 0)
    np.testing.assert_allclose(found, [1.34986, 1.34986, 1, 1, 0.740818, 0.740818], rtol=1e-5)
    assert kernels.segment_mean(x, ids, ids >= 0, 4)[3] == 0  # a turn without tokens


def test_bug_070_rejected_tokens_leave_the_denominator():
    log_ratio, ids = f32(0.1, -1.5, 0.8, -10, 0.3), np.arange(5)
    weights, keep = kernels.masked_weights(log_ratio, np.zeros_like(log_ratio), ids, np.ones(5, bool), maximum=2.0)
    np.testing.assert_array_equal(keep, [1, 0, 0, 0, 1])
    rows = kernels.token_mean(keep[None], ids[None], np.zeros((1, 5), np.int32))
    np.testing.assert_allclose(jnp.sum(rows[0] * weights), (np.exp(0.1) + np.exp(0.3)) / 2, rtol=1e-6)


def test_bug_084_correction_is_old_over_behavior_and_constant():
    ids, mask, old, behavior = np.array([0]), np.ones(1, bool), f32(-1.2), f32(-1.5)
    np.testing.assert_allclose(kernels.truncated_weights(old, behavior, ids, mask), [1.34986], rtol=1e-5)
    assert not np.any(jax.grad(lambda x: kernels.truncated_weights(x, behavior, ids, mask).sum())(old))
    assert not np.any(jax.grad(lambda x: kernels.masked_weights(x, behavior, ids, mask)[0].sum())(old))


@pytest.mark.parametrize("reduce", [kernels.segment_sum, kernels.segment_mean])
@pytest.mark.parametrize("ids", [[0, 1, 2, -1], [0, 0, 1, -1], [0, 0, 0, -1]])
def test_mismatch_weights_at_any_granularity(ids, reduce):
    x, zeros, ids = f32(0.5, 0.5, -1.5, np.nan), f32(0, 0, 0, 0), np.array(ids)
    mask = ids >= 0
    expected = oracles.ratio(x, zeros, ids, mask, reduce is kernels.segment_mean)
    close(kernels.truncated_weights(x, zeros, ids, mask, reduce=reduce, maximum=2.0), np.minimum(expected, 2.0))
    weights, keep = kernels.masked_weights(x, zeros, ids, mask, reduce=reduce, minimum=0.5, maximum=2.0)
    np.testing.assert_array_equal(keep, mask & (expected >= 0.5) & (expected <= 2.0))
    close(weights, np.where(keep, expected, 0))


def test_a_nan_is_not_rejected_silently():
    x, ids = f32(np.nan, 0), np.arange(2)
    assert np.isnan(kernels.masked_weights(x, f32(0, 0), ids, np.ones(2, bool))[0][0])
