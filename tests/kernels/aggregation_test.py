import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given

from kernels.rows import SETTINGS, build, close, rows
from mpo_jax import kernels

token_mean, turn_mean, sequence_mean = map(jax.jit, (kernels.token_mean, kernels.turn_mean, kernels.sequence_mean))
MODES = (token_mean, turn_mean, sequence_mean, kernels.constant_length(4.0))


def batch(*masks):
    """One turn and one sequence a row."""
    mask = np.array(masks, bool)
    return mask, np.zeros(mask.shape, np.int32), np.zeros(mask.shape, np.int32)


def total(weights, loss):
    return float(jnp.sum(jnp.where(weights > 0, weights * np.float32(loss), 0)))


@SETTINGS
@given(rows(), rows())
def test_weights_match_the_oracle_and_sum_to_one(a, b):
    length = max(len(a.mask), len(b.mask))

    def stacked(name, fill):
        return np.stack([np.pad(getattr(r, name), (0, length - len(r.mask)), constant_values=fill) for r in (a, b)])

    mask, turns, sequences = stacked("mask", False), stacked("turns", -1), stacked("sequences", -1)
    every = np.tile(np.arange(length), (2, 1))
    for f, ids in ((token_mean, every), (turn_mean, turns), (sequence_mean, sequences)):
        weights = np.asarray(f(mask, turns, sequences))
        np.testing.assert_allclose(weights, oracles.weights(mask, ids), rtol=1e-5)
        np.testing.assert_allclose(weights.sum(), float(mask.any()), rtol=1e-5)


def test_constant_length_is_the_mean_of_sums_over_the_constant():
    row = build([[3, 2], [4], [1]], length=64)
    weights = kernels.constant_length(10.0)(row.mask[None], row.turns[None], row.sequences[None])
    close(weights[0], row.mask / (3 * 10.0))


@pytest.mark.parametrize("mode", MODES)
def test_all_masked_batches_have_zero_weights(mode):
    assert not np.any(mode(*batch([0, 0], [0, 0])))


def test_bug_001_and_002_the_loss_counts_assistant_tokens_only():
    np.testing.assert_allclose(total(token_mean(*batch([1, 1, 0, 1, 1, 0])), [[1, 2, 100, 3, 4, 50]]), 2.5)
    np.testing.assert_allclose(total(token_mean(*batch([1, 1, 0, 1])), [[1, 1, 7, 1]]), 1.0)


def test_bug_036_dropped_rows_leave_the_denominator():
    found = token_mean(*batch([1, 1, 1, 1, 0, 0], [0] * 6))
    np.testing.assert_allclose(total(found, np.ones((2, 6))), 1.0)


def test_bug_059_microbatches_add_up():
    mask = np.zeros((2, 900), bool)
    mask[0, :100], mask[1] = True, True
    loss = np.array([[0.5], [0.3]], np.float32) * np.ones(900, np.float32)
    weights = token_mean(mask, np.zeros((2, 900), np.int32), np.zeros((2, 900), np.int32))
    np.testing.assert_allclose(sum(total(weights[i : i + 1], loss[i : i + 1]) for i in range(2)), 0.32, rtol=1e-5)


def test_bug_061_the_constant_does_not_scale_with_microbatches():
    weights = kernels.constant_length(4.0)(*batch([1, 1, 1, 1, 0], [1, 1, 0, 0, 0]))
    loss = np.ones((2, 5))
    np.testing.assert_allclose(total(weights, loss), 0.75)
    np.testing.assert_allclose(sum(total(weights[i : i + 1], loss[i : i + 1]) for i in range(2)), 0.75)


@pytest.mark.parametrize("mode,expected", [(m, 2.0) for m in MODES[:3]] + [(kernels.constant_length(1.0), 4.0)])
def test_bug_063_nan_behind_the_mask_is_not_seen(mode, expected):
    weights, loss = mode(*batch([1, 0, 1])), np.array([[1, np.nan, 3]], np.float32)
    found, grad = jax.value_and_grad(lambda x: jnp.sum(jnp.where(weights > 0, weights * x, 0)))(loss)
    np.testing.assert_allclose(found, expected)
    assert grad[0, 1] == 0 and np.isfinite(grad).all()


def test_bug_064_sequence_losses_are_not_multiplied_by_length():
    weights = sequence_mean(*batch([1, 0, 0], [1, 1, 1]))
    np.testing.assert_allclose(total(weights, [[1, 9, 9], [2, 2, 2]]), 1.5)


def test_turn_mean_weighs_turns_equally_across_rows():
    # turns of 2, 1 and 3 tokens: each has a third of the weight
    mask = np.ones((2, 3), bool)
    found = turn_mean(mask, np.array([[0, 0, 1], [0, 0, 0]]), np.zeros((2, 3), np.int32))
    np.testing.assert_allclose(found, np.array([[1, 1, 2], [2 / 3] * 3]) / 6, rtol=1e-6)
