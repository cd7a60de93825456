import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given

from kernels.rows import SETTINGS, build, close, rows
from mpo_jax import kernels

X = np.array([3, -1, 2, 9, 5, -4, 1], np.float32)
IDS = np.array([0, 0, 0, 0, 2, 2, -1])
MASK = np.array([1, 1, 1, 0, 1, 1, 0], bool)

REDUCTIONS = {
    "min": (kernels.segment_min, min),
    "max": (kernels.segment_max, max),
    # Two thirds of three values are two of them; of two values, ⌈4/3⌉ = 2.
    "bottom": (kernels.bottom_mean(2 / 3), lambda v: np.mean(sorted(v)[: max(1, math.ceil(2 / 3 * len(v) - 1e-9))])),
    "bottom10": (kernels.bottom_mean(0.1), lambda v: np.mean(sorted(v)[: max(1, math.ceil(0.1 * len(v) - 1e-9))])),
    "discounted": (
        kernels.discounted_mean(0.5),
        lambda v: sum(x * 0.5 ** (len(v) - i) for i, x in enumerate(v, 1)) / sum(0.5**j for j in range(len(v))),
    ),
    "linear": (kernels.linear_mean(), lambda v: sum(i * x for i, x in enumerate(v, 1)) / sum(range(1, len(v) + 1))),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("min", [-1, 0, -4]),
        ("max", [3, 0, 5]),
        ("bottom", [0.5, 0, 0.5]),  # (-1 + 2)/2; (5 - 4)/2
        ("bottom10", [-1, 0, -4]),
        ("discounted", [(3 / 4 - 1 / 2 + 2) / 1.75, 0, (5 / 2 - 4) / 1.5]),
        ("linear", [(3 - 2 + 6) / 6, 0, (5 - 8) / 3]),
    ],
)
def test_by_hand(name, expected):
    np.testing.assert_allclose(REDUCTIONS[name][0](X, IDS, MASK, 3), expected, rtol=1e-6)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_against_a_loop_over_segments(name):
    rng = np.random.default_rng(0)
    reduce, oracle = REDUCTIONS[name]
    jitted = jax.jit(reduce, static_argnums=3)
    for _ in range(20):
        ids, mask = np.sort(rng.integers(-1, 12, 60)), rng.random(60) < 0.7
        mask &= ids >= 0
        x = np.where(mask, rng.normal(size=60).round(1), np.nan).astype(np.float32)  # ties occur; NaN must stay out
        groups = [x[(ids == k) & mask].astype(np.float64) for k in range(12)]
        expected = [oracle(list(group)) if group.size else 0.0 for group in groups]
        np.testing.assert_allclose(jitted(x, ids, mask, 12), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 9, 10, 11, 20, 30, 100, 101])
def test_bottom_share_counts_as_written(count):
    x = np.arange(count, dtype=np.float32)
    lowest = -(-count // 10)  # in whole numbers
    found = kernels.bottom_mean(0.1)(x, np.zeros(count, int), np.ones(count, bool), 1)
    np.testing.assert_allclose(found, [(lowest - 1) / 2], rtol=1e-6)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_nan_that_counts_stays_visible(name):
    x = np.array([1, np.nan, 2, 0, 5], np.float32)
    found = REDUCTIONS[name][0](x, np.array([0, 0, 0, 0, 1]), np.ones(5, bool), 2)
    assert np.isnan(found[0]) and found[1] == 5


def test_discounting_reduces_to_mean_and_last():
    mean = kernels.segment_mean(X, IDS, MASK, 3)
    np.testing.assert_allclose(kernels.discounted_mean(1.0)(X, IDS, MASK, 3), mean, rtol=1e-6)
    np.testing.assert_allclose(
        kernels.discounted_mean(1e-9)(X, IDS, MASK, 3), kernels.segment_last(X, IDS, MASK, 3), rtol=1e-6
    )


@pytest.mark.parametrize("name", REDUCTIONS)
def test_finite_gradients_where_everything_is_masked(name):
    def total(x):
        return jnp.sum(REDUCTIONS[name][0](x, IDS, np.zeros(7, bool), 3))

    np.testing.assert_array_equal(jax.grad(total)(X), np.zeros(7))


@functools.partial(jax.jit, static_argnums=3)
def ranges_and_sums(x, ids, mask, num_segments):
    ranges = kernels.segment_ranges(ids, mask, num_segments)
    return ranges, kernels.range_sum(*ranges)(x, ids, mask, num_segments)


@SETTINGS
@given(rows())
def test_range_sums_match_the_oracle_and_hide_what_is_masked(row):
    x, size = row.draw(), len(row.mask)
    blocks = oracles.actions(row.mask, row.turns)
    (first, last), sums = ranges_and_sums(x, row.turns, row.mask, size)
    close(sums, [x[blocks[k]].astype(np.float64).sum() if k in blocks else 0 for k in range(size)])
    np.testing.assert_array_equal(first, [blocks[k][0] if k in blocks else 0 for k in range(size)])
    np.testing.assert_array_equal(last, [blocks[k][-1] if k in blocks else -1 for k in range(size)])


def test_range_sums_of_long_rows_are_as_precise_as_short_ones():
    # Three levels of blocks, every sum near 1,000 · L and each to 32 roundings; whole-row differences would lose more.
    row = build([[700, 1, 31, 33, 5000, 64, 2, 2000]], length=8192, observations=9)
    x = row.draw(0.1) + np.where(row.mask, np.float32(1000), np.nan)
    _, sums = ranges_and_sums(x, row.turns, row.mask, 8)
    for turn, tokens in oracles.actions(row.mask, row.turns).items():
        np.testing.assert_allclose(sums[turn], x[tokens].astype(np.float64).sum(), rtol=32 * np.finfo(np.float32).eps)


def test_a_ratio_over_known_ranges_is_the_ratio():
    row = build([[3, 40], [70, 1]], length=1024)
    logprobs, anchor = row.draw(0.1), row.draw(0.1)
    reduce = kernels.range_sum(*kernels.segment_ranges(row.turns, row.mask, 5))
    found, pullback = jax.vjp(
        lambda x: kernels.importance_ratio(x, anchor, row.turns, row.mask, reduce=reduce), logprobs
    )
    np.testing.assert_allclose(found, oracles.ratio(logprobs, anchor, row.turns, row.mask), rtol=1e-5)
    np.testing.assert_allclose(pullback(np.ones_like(logprobs))[0], np.where(row.mask, found, 0), rtol=1e-6)
