import numpy as np
import pytest

from mpo_jax import kernels

LP, REF = np.array([-1, -2, 9, -3], np.float32), np.array([-1.5, -2.5, np.nan, -1], np.float32)
IDS, MASK = np.array([0, 0, -1, 2]), np.array([1, 1, 0, 1], bool)


@pytest.mark.parametrize(
    "reduce,expected",
    [(kernels.segment_mean, [0.5, 0, -2]), (kernels.segment_sum, [1, 0, -2]), (kernels.segment_last, [0.5, 0, -2])],
)
def test_steps_are_scored_over_their_own_tokens(reduce, expected):
    np.testing.assert_allclose(kernels.progress_advantage(LP, REF, IDS, MASK, reduce=reduce, num_segments=3), expected)
    doubled = kernels.progress_advantage(LP, REF, IDS, MASK, reduce=reduce, beta=2.0)
    np.testing.assert_allclose(doubled, 2 * np.append(expected, 0))
