import jax
import numpy as np
import oracles
import pytest
from hypothesis import given

from kernels.rows import SETTINGS, close, rows
from mpo_jax import kernels
from mpo_jax.kernels import segments

REDUCERS = {
    "sum": (jax.jit(kernels.segment_sum, static_argnums=3), np.sum),
    "mean": (jax.jit(kernels.segment_mean, static_argnums=3), np.mean),
    "first": (jax.jit(kernels.segment_first, static_argnums=3), lambda x: x[0]),
    "last": (jax.jit(kernels.segment_last, static_argnums=3), lambda x: x[-1]),
}


@SETTINGS
@given(rows())
def test_reducers_match_numpy_and_hide_what_is_masked(row):
    x, size = row.draw(), len(row.mask)
    for f, reference in REDUCERS.values():
        expected = np.zeros(size)
        for turn, tokens in oracles.actions(row.mask, row.turns).items():
            expected[turn] = reference(x[tokens].astype(np.float64))
        close(f(x, row.turns, row.mask, size), expected)
        grad = jax.grad(lambda x, f=f: f(x, row.turns, row.mask, size).sum())(x)
        assert np.isfinite(grad).all() and not grad[~row.mask].any()


@SETTINGS
@given(rows())
def test_starts_and_ends(row):
    blocks = oracles.actions(row.mask, row.turns).values()
    for f, k in ((segments.starts, 0), (segments.ends, -1)):
        np.testing.assert_array_equal(np.flatnonzero(f(row.turns, row.mask)), sorted(t[k] for t in blocks))


def test_spread_gives_back_and_is_zero_elsewhere():
    ids, mask = np.array([0, 0, 1, 1, -1]), np.array([1, 1, 1, 0, 0], bool)
    np.testing.assert_array_equal(kernels.spread(np.float32([3, 5]), ids, mask), [3, 3, 5, 0, 0])


def test_granularities():
    mask, turns, sequences = np.array([1, 0, 1, 1, 0], bool), np.array([0, 1, 1, 2, -1]), np.array([0, 0, 0, 1, -1])
    np.testing.assert_array_equal(kernels.token_ids(mask, turns, sequences), [0, -1, 2, 3, -1])
    np.testing.assert_array_equal(kernels.turn_ids(mask, turns, sequences), [0, -1, 1, 2, -1])
    np.testing.assert_array_equal(kernels.sequence_ids(mask, turns, sequences), [0, -1, 0, 1, -1])


@pytest.mark.parametrize("name", REDUCERS)
def test_nothing_at_all_is_zero(name):
    x, ids, mask = np.full(3, np.nan, np.float32), np.full(3, -1), np.zeros(3, bool)
    assert not np.any(REDUCERS[name][0](x, ids, mask, 3))
