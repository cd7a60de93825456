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

token_gae = jax.jit(kernels.token_gae)
returns = jax.jit(kernels.returns)


def f32(*x):
    return np.array(x, np.float32)


def ids(*x):
    return np.array(x, np.int32)


def bools(*x):
    return np.array(x, bool)


@pytest.mark.parametrize("variant", [lambda f: f, jax.jit, lambda f: lambda *x: jax.vmap(f)(*(y[None] for y in x))[0]])
def test_gae_literal(variant):
    # δ = (1 + .9·2 − 1, 0 + 0·3 − 2) = (1.8, −2); A_2 = −2; A_1 = 1.8 + .9·.5·(−2) = .9
    f = variant(functools.partial(kernels.gae))
    found = f(f32(1, 0), f32(0.9, 0), f32(1, 2), f32(2, 3), f32(0.5, 0.5))
    np.testing.assert_allclose(found, [0.9, -2], rtol=1e-6)


def test_lambda_returns_reduce_to_discounted_returns_and_to_one_step():
    r, v = f32(1, 2, 3), f32(5, 7, 11)
    np.testing.assert_allclose(kernels.lambda_returns(r, 0.5, v, 1.0), [1 + 0.5 * (2 + 0.5 * 8.5), 2 + 0.5 * 8.5, 8.5])
    np.testing.assert_allclose(kernels.lambda_returns(r, 0.5, v, 0.0), [3.5, 5.5, 8.5])


@SETTINGS
@given(rows(), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from([1.0, 0.9]))
def test_token_gae_and_returns_match_the_oracle(row, lambda_, discount):
    values, boot = row.draw(), row.draw()
    data = row.rewards, values, row.mask, row.sequences
    kwargs = {"lambda_": lambda_, "discount": discount, "bootstrap_values": boot}
    close(token_gae(*data, **kwargs), oracles.token_gae(*data, lambda_, discount, boot))
    close(returns(*data, **kwargs), oracles.returns(*data, lambda_, discount, boot))


def test_token_gae_under_vmap_and_grad():
    many = [build([[3, 1, 4], [2]], seed, length=64) for seed in range(5)]
    values = [row.draw() for row in many]
    data = [
        np.stack(x) for x in ([r.rewards for r in many], values, [r.mask for r in many], [r.sequences for r in many])
    ]
    found = jax.jit(jax.vmap(functools.partial(kernels.token_gae, lambda_=0.9)))(*data)
    for row, v, a in zip(many, values, found, strict=True):
        close(a, oracles.token_gae(row.rewards, v, row.mask, row.sequences, 0.9))
    grad = jax.grad(lambda v: token_gae(many[0].rewards, v, many[0].mask, many[0].sequences, lambda_=0.9).sum())(
        values[0]
    )
    assert np.isfinite(grad).all() and not grad[~many[0].mask].any()


def test_per_token_lambda():
    row = build([[3, 1], [5]], length=64)
    values, lambda_ = row.draw(), np.where(row.sequences == 0, 0.3, 0.9).astype(np.float32)
    data = row.rewards, values, row.mask, row.sequences
    close(token_gae(*data, lambda_=lambda_), oracles.token_gae(*data, lambda_))


def test_returns_at_lambda_one_do_not_read_values():
    row = build([[3, 1, 4], [2]], length=64)
    found = [returns(row.rewards, x, row.mask, row.sequences) for x in (row.draw(1.0), row.draw(1e6))]
    np.testing.assert_array_equal(*found)


def test_all_masked_row_is_zero_with_finite_gradients():
    v, mask, seq = f32(np.nan, 1, 2), bools(0, 0, 0), ids(0, 0, -1)
    assert not np.any(token_gae(v, v, mask, seq, lambda_=0.9))
    assert not np.any(jax.grad(lambda v: token_gae(v, v, mask, seq, lambda_=0.9).sum())(v))


def test_bug_025_observations_are_not_steps():
    r, mask, seq = f32(0, 0, 0, 0, 1), bools(1, 1, 0, 0, 1), ids(0, 0, 0, 0, 0)
    for junk in (9.0, -1000.0, np.nan):
        v = f32(0.2, 0.4, junk, junk, 0.6)
        np.testing.assert_allclose(token_gae(r, v, mask, seq, lambda_=0.5), [0.4, 0.4, 0, 0, 0.4], rtol=1e-6)
        np.testing.assert_allclose(returns(r, v, mask, seq, lambda_=0.5), [0.6, 0.8, 0, 0, 1.0], rtol=1e-6)


def test_bug_027_returns_pass_over_observations():
    np.testing.assert_allclose(
        kernels.returns(f32(0, 0, 1), f32(0, 0, 0), bools(1, 0, 1), ids(0, 0, 0), discount=0.5), [0.5, 0, 1]
    )
    zeros = np.zeros(6, np.float32)
    found = kernels.returns(f32(0, 0, 0, 0, 0, 1), zeros, bools(1, 1, 0, 0, 1, 1), ids(0, 0, 0, 0, 0, 0))
    np.testing.assert_allclose(found, [1, 1, 0, 0, 1, 1])


def test_bug_029_values_on_padding_do_nothing():
    found = token_gae(f32(0, 1, 0, 0), f32(0.5, 0.5, 0.7, 0.3), bools(1, 1, 0, 0), ids(0, 0, -1, -1), lambda_=0.5)
    np.testing.assert_allclose(found, [0.25, 0.5, 0, 0])


def test_bug_030_packed_episodes_do_not_leak():
    zeros = np.zeros(4, np.float32)
    found = token_gae(f32(0, 1, 0, 5), zeros, bools(1, 1, 1, 1), ids(0, 0, 1, 1), lambda_=1.0)
    np.testing.assert_allclose(found, [1, 1, 5, 5])


def test_bug_031_a_truncated_episode_bootstraps_and_a_finished_one_ends():
    values, mask = f32(0.1, 0.2, 0.3), bools(1, 1, 1)
    data, boot = (f32(0, 0, 0), values, mask, ids(0, 0, 0)), f32(0.8, 0.8, 0.8)
    for found in (
        token_gae(*data, lambda_=1.0, bootstrap_values=boot),
        kernels.turn_advantages(*data[:3], ids(0, 1, 2), lambda_turn=1.0, bootstrap_values=boot),
    ):
        np.testing.assert_allclose(found, [0.7, 0.6, 0.5], rtol=1e-6)
    np.testing.assert_allclose(token_gae(*data, lambda_=1.0), -values, rtol=1e-6)


def test_bug_033_truncation_bootstraps_with_the_state_after():
    data = f32(0), f32(0.3), bools(1), ids(0)
    np.testing.assert_allclose(token_gae(*data, lambda_=0.9, bootstrap_values=f32(0.8)), [0.5], rtol=1e-6)
    np.testing.assert_allclose(returns(*data, bootstrap_values=f32(0.8)), [0.8])


def test_bug_038_policy_and_critic_have_a_lambda_each():
    data = f32(0, 0, 1), f32(0.2, 0.5, 0.6), bools(1, 1, 1), ids(0, 0, 0)
    np.testing.assert_allclose(token_gae(*data, lambda_=0.5), [0.45, 0.30, 0.40], rtol=1e-6)
    np.testing.assert_allclose(returns(*data, lambda_=1.0), [1, 1, 1])
    np.testing.assert_allclose(returns(*data, lambda_=0.5), [0.65, 0.80, 1.0], rtol=1e-6)


def test_length_adaptive_lambda():
    # 1 − 1/(.05·100) = .8; α l ≤ 1 is clamped to 0
    found = kernels.length_adaptive_lambda(jnp.array([100, 20, 1, 0]), 0.05)
    np.testing.assert_allclose(found, [0.8, 0, 0, 0], atol=1e-6)
