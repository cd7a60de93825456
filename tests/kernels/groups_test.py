import jax
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.rows import SETTINGS, close
from mpo_jax import kernels

group = jax.jit(kernels.group_advantages, static_argnames="normalise_std")
leave_one_out = jax.jit(kernels.leave_one_out_advantages)
anchor = jax.jit(kernels.anchor_advantages)
informative = jax.jit(kernels.informative_groups)
NAN = np.nan


def one_group(*rewards):
    return np.array(rewards, np.float32), np.zeros(len(rewards), np.int32)


@SETTINGS
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_group_advantages_match_the_oracle(seed, normalise_std, binary):
    rng = np.random.default_rng(seed)
    rewards = (rng.integers(0, 2, 32) if binary else rng.normal(size=32)).astype(np.float32)
    rewards[rng.random(32) < 0.1] = rng.choice([NAN, np.inf, -np.inf])
    groups, valid = rng.integers(-1, rng.integers(1, 32), 32).astype(np.int32), rng.random(32) < 0.8
    expected = oracles.group_advantages(rewards, groups, normalise_std, valid)
    close(group(rewards, groups, valid=valid, normalise_std=normalise_std), expected)
    close(leave_one_out(rewards, groups, valid=valid), oracles.group_advantages(rewards, groups, False, valid, True))
    close(
        anchor(rewards, groups * 1000 + 7 * (groups < 0), valid=valid)[groups >= 0],
        oracles.group_advantages(rewards, groups, False, valid)[groups >= 0],
    )
    grad = jax.grad(lambda r: group(r, groups, valid=valid).sum())(np.nan_to_num(rewards, posinf=0, neginf=0))
    assert np.isfinite(grad).all()


def test_bug_044_the_standard_deviation_is_the_sample_one():
    data = one_group(1, 1, 1, 0, 0, 0, 0, 0)
    np.testing.assert_allclose(group(*data), [1.20761] * 3 + [-0.72457] * 5, atol=1e-5)
    np.testing.assert_allclose(group(*data, normalise_std=False), [0.625] * 3 + [-0.375] * 5)
    np.testing.assert_allclose(leave_one_out(*data), [0.71429] * 3 + [-0.42857] * 5, atol=1e-5)


def test_bug_045_a_group_of_one_gets_zero():
    for f in (group, leave_one_out):
        np.testing.assert_array_equal(f(*one_group(0.7)), [0])


def test_bug_046_leave_one_out_is_bounded():
    np.testing.assert_allclose(leave_one_out(*one_group(1, 0, 0, 0)), [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


def test_bug_048_float_noise_is_no_signal():
    data = one_group(1, 1, 0.99999994)
    assert not np.any(group(*data)) and not np.any(leave_one_out(*data)) and not np.any(informative(*data))


def test_bug_049_statistics_are_per_group():
    rewards, groups = np.array([1, 0, 0, 0], np.float32), np.array([0, 0, 1, 1])
    np.testing.assert_allclose(group(rewards, groups), [0.70711, -0.70711, 0, 0], atol=1e-5)


def test_bug_051_an_episode_counts_once_whatever_its_turns():
    np.testing.assert_allclose(group(*one_group(1, 0), normalise_std=False), [0.5, -0.5])  # not 3 rows against 1


@pytest.mark.parametrize("bad", [NAN, np.inf, -np.inf])
def test_bug_052_a_bad_reward_leaves_the_statistics(bad):
    np.testing.assert_allclose(group(*one_group(1, bad, 0, 1)), [0.57735, 0, -1.15470, 0.57735], atol=1e-5)
    assert not np.any(group(*one_group(1, bad, bad, bad)))


def test_bug_055_the_filter_keeps_whole_groups():
    assert informative(*one_group(0, *[0.95] * 7)).all()


def test_bug_056_failed_members_are_absent():
    rewards, groups = np.array([1, 0, 0, 5, 1, 5, 5, 5], np.float32), np.array([0, 0, 0, -1, 1, -1, -1, -1])
    np.testing.assert_allclose(group(rewards, groups)[:3], [1.1547, -0.57735, -0.57735], atol=1e-5)
    assert not np.any(group(rewards, groups)[3:])
    np.testing.assert_array_equal(informative(rewards, groups), [1, 1, 1, 0, 0, 0, 0, 0])


def test_bug_057_share_of_constant_groups():
    rewards = (np.random.default_rng(0).random(20000) < 0.1819).astype(np.float32)
    share = kernels.constant_group_share(rewards, np.repeat(np.arange(10000), 2))
    np.testing.assert_allclose(share, 0.1819**2 + (1 - 0.1819) ** 2, atol=0.02)
    np.testing.assert_allclose(
        kernels.constant_group_share(np.float32([1, 0, 1, 1, 7]), np.array([0, 0, 3, 3, -1])), 0.5
    )


def test_groups_without_a_valid_episode_are_not_counted_as_constant():
    valid = np.array([1, 1, 0, 0], bool)
    share = kernels.constant_group_share(np.float32([1, 0, 1, 1]), np.array([0, 0, 1, 1]), valid=valid)
    assert share == 0  # of one group; with the second it would be ½


def test_anchor_groups_by_state_and_leaves_singletons():
    returns, states = np.array([1, 0, 5, 2, 4], np.float32), np.array([99, 99, 3, -1, -1])
    np.testing.assert_allclose(anchor(returns, states), [0.5, -0.5, 0, 0, 0])


@pytest.mark.parametrize("states", [[2**31, 2**31, 1, 1], [2**32, 2**32, 0, 0], [-1, -(2**40), 7, 7]])
def test_anchor_states_of_64_bits_are_told_apart(states):
    """Their lower 32 bits are negative, hence absent, or equal: hashes of states are such numbers."""
    expected = [0.5, -0.5, 1, -1] if states[0] > 0 else [0, 0, 1, -1]
    np.testing.assert_allclose(kernels.anchor_advantages(np.float32([1, 0, 5, 3]), np.array(states)), expected)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_overlong_penalty(dtype):
    # L_max 100, L_cache 20: free up to 80, −½ at 90, −1 from 100 on, never below
    found = kernels.overlong_penalty(np.array([0, 80, 90, 100, 500], dtype), max_tokens=100, cache_tokens=20)
    np.testing.assert_allclose(found, [0, 0, -0.5, -1, -1])
