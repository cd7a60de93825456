import numpy as np
import pytest

from mpo_jax.scoring import baselines


def test_windows_by_hand():
    values = np.array([1.0, 2, 6, 3])
    np.testing.assert_allclose(baselines.windows(values, 2), [1.5, 4, 4.5])
    np.testing.assert_allclose(baselines.windows(values, 4), [3])
    np.testing.assert_allclose(baselines.windows(values, 9), [3])  # shorter than a window: the mean


def test_deepconf_by_a_loop():
    values = np.random.default_rng(0).exponential(size=60)
    found = baselines.deepconf(values, width=8)
    groups = sorted(np.mean(values[start : start + 8]) for start in range(53))
    assert found == pytest.approx(
        {
            "mean": np.mean(values),
            "tail": np.mean(values[-8:]),
            "bottom": np.mean(groups[:5]),  # ⌊.1 · 53⌋
            "lowest": groups[0],
        }
    )
    assert baselines.deepconf(values[:3])["bottom"] == pytest.approx(np.mean(values[:3]))


def test_the_authors_sign_is_the_opposite_and_their_unit_the_step():
    tops = np.array([-3.0, -1.0, -2.0])
    assert baselines.compat(tops) == pytest.approx({"self_certainty": -2, "deepconf_tail": -2, "deepconf_bottom": -3})
    assert baselines.deepconf(-tops)["mean"] == 2


def test_nothing_is_undefined():
    for values in (baselines.deepconf(np.zeros(0)), baselines.compat(np.zeros(0))):
        assert all(np.isnan(value) for value in values.values())
