import jax
import numpy as np
import oracles
from hypothesis import given

from kernels.rows import SETTINGS, close, rows
from mpo_jax import kernels
from mpo_jax.kernels import diagnostics

variance = jax.jit(diagnostics.value_variance)
visibility = jax.jit(kernels.in_turn_visibility)


def one(*x, dtype=np.float32):
    return np.array([x], dtype)


TURNS, MASK, SEQ = one(0, 0, 0, 1, 1, 1, dtype=np.int32), one(*[1] * 6, dtype=bool), one(*[0] * 6, dtype=np.int32)


@SETTINGS
@given(rows())
def test_variance_and_visibility_match_the_oracle(row):
    values = row.draw()
    between, within = variance(values, row.mask, row.turns, row.sequences)
    for sequence, expected in oracles.value_variance(values, row.mask, row.turns, row.sequences).items():
        close((between[sequence], within[sequence]), expected)
    xy, xx = oracles.visibility(values, row.mask, row.turns, row.sequences)
    found = visibility(*(x[None] for x in (values, row.mask, row.turns, row.sequences)))
    np.testing.assert_allclose(found, xy / xx if xx else 0, rtol=1e-3, atol=1e-5)


def test_variance_share_literal():
    # turn means 1, 3: between 1; within ((1)²+0+(1)²)/3 = 2/3 in both turns
    found = kernels.variance_share(one(0, 1, 2, 2, 3, 4), MASK, TURNS, SEQ)
    np.testing.assert_allclose(found["turn_variance_share"], 1 / (1 + 2 / 3), rtol=1e-6)
    assert found["between_exceeds_within"] == 1


def test_variance_share_is_a_median_over_trajectories():
    # shares .6 (as above), 1 (nothing varies within turns) and 0 (turn means are equal): median .6, mean 8/15
    values = np.concatenate([one(0, 1, 2, 2, 3, 4), one(1, 1, 1, 3, 3, 3), one(0, 1, 2, 0, 1, 2)])
    found = kernels.variance_share(values, *(np.repeat(x, 3, axis=0) for x in (MASK, TURNS, SEQ)))
    np.testing.assert_allclose(found["turn_variance_share"], 0.6, rtol=1e-6)
    np.testing.assert_allclose(found["between_exceeds_within"], 2 / 3, rtol=1e-6)


def test_a_blind_critic_and_a_linear_one():
    assert visibility(one(1, 1, 1, 4, 4, 4), MASK, TURNS, SEQ) == 0
    np.testing.assert_allclose(visibility(one(1, 2, 3, 4, 9, 9), MASK, TURNS, SEQ), 0.5)  # (⅓ + ⅔)/2
    assert kernels.value_jitter(one(1, 2, 3, 4, 5, 6), MASK, TURNS) == 0
    np.testing.assert_allclose(kernels.value_jitter(one(0, 1, 0, 7, 8, 7), MASK, TURNS), 1)  # steps 1, −1, 1, −1


def test_explained_variance_overall_and_at_turn_borders():
    values, returns = one(0, 5, 2, 1, 5, 4), one(0, 1, 2, 1, 0, 4)
    found = kernels.critic_diagnostics(values, returns, MASK, TURNS, SEQ)
    assert found["explained_variance_turn_starts"] == 1 and found["explained_variance_turn_ends"] == 1
    assert found["explained_variance"] < 0
    assert kernels.explained_variance(values, np.ones_like(values), MASK) == 0
    # at the ends 2, 3 against 2, 4: the error varies as much as the returns
    found = kernels.critic_diagnostics(values, one(0, 1, 2, 1, 0, 3), MASK, TURNS, SEQ)
    assert found["explained_variance_turn_starts"] == 1 and found["explained_variance_turn_ends"] == 0


def test_bug_040_value_clip_fraction():
    found = kernels.value_clip_fraction(one(0.5, 0.1, 9), one(0, 0, 0), one(1, 1, 0, dtype=bool), epsilon=0.2)
    assert found == 0.5


def test_effective_sample_size():
    mask = one(1, 1, 1, 0, dtype=bool)
    np.testing.assert_allclose(kernels.effective_sample_size(one(2, 2, 2, np.nan), mask), 1)
    np.testing.assert_allclose(kernels.effective_sample_size(one(1, 0, 0, np.nan), mask), 1 / 3)


def test_ratio_diagnostics_by_turn_length():
    turns = np.repeat(np.arange(2), [3, 5])[None]
    mask, ratio = np.ones((1, 8), bool), one(1.5, 1.5, 1.5, 1, 1, 1, 1, 0.5)
    a, old = one(1, -1, 1, 1, 1, 1, 1, -1), np.zeros((1, 8), np.float32)
    found = kernels.ratio_diagnostics(
        ratio, a, old, old + np.float32(0.1), mask, turns, epsilon_low=0.2, epsilon_high=0.2
    )
    expected = {
        "clip_fraction": 4 / 8,
        "clip_fraction_1_4": 1,
        "clip_fraction_5_16": 1 / 5,
        "clip_fraction_17_64": 0,
        "gradient_removed": 3 / 8,
        "gradient_removed_1_4": 2 / 3,
        "gradient_removed_5_16": 1 / 5,
        "effective_sample_size_1_4": 1,
        "behavior_kl": np.exp(-0.1) - 1 + 0.1,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_each_side_of_the_clip_range_has_its_bound():
    # below 1 − .2, inside 1 + .5, above it
    found = diagnostics.outside_clip(one(0.75, 1.3, 1.6), epsilon_low=0.2, epsilon_high=0.5)
    np.testing.assert_array_equal(found, one(1, 0, 1, dtype=bool))


def test_bug_085_the_mismatch_is_measured_without_the_ratios_clamp():
    mask, turns, zeros = np.ones((1, 2), bool), np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32)
    behavior = one(-25, 0)  # a log-ratio of 25, where ratios are clamped at 20
    found = kernels.ratio_diagnostics(zeros + 1, zeros, zeros, behavior, mask, turns, epsilon_low=0.2, epsilon_high=0.2)
    np.testing.assert_allclose(found["behavior_kl"], (np.exp(25.0) - 25 - 1) / 2, rtol=1e-5)


def test_turn_length_bins():
    lengths = [1, 4, 5, 16, 17, 64, 65, 90]
    turns = np.repeat(np.arange(8), lengths)
    bins = diagnostics.turn_length_bins(np.ones(len(turns), bool), turns)
    assert [int(bins[np.flatnonzero(turns == k)[0]]) for k in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
