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


def test_the_order_of_reducing_and_subtracting_matters_for_extremes_only():
    logprobs, ref = np.array([-1, -4], np.float32), np.array([-5, -3], np.float32)
    ids, mask = np.zeros(2, int), np.ones(2, bool)
    # Smallest: -4 - (-5) = 1, against min(-1 + 5, -4 + 3) = -1. Largest: -1 - (-3) = 2, against max(4, -1) = 4.
    for reduce, first, last in ((kernels.segment_min, 1, -1), (kernels.segment_max, 2, 4)):
        assert kernels.progress_advantage(logprobs, ref, ids, mask, reduce=reduce)[0] == first
        assert kernels.progress_advantage(logprobs, ref, ids, mask, reduce=reduce, subtract_first=True)[0] == last
    for reduce in (kernels.segment_mean, kernels.linear_mean()):
        one, other = (
            kernels.progress_advantage(logprobs, ref, ids, mask, reduce=reduce, subtract_first=flag)
            for flag in (False, True)
        )
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_bug_175_padding_reaches_no_score():
    logprobs, mask = np.array([-1, -2, -50], np.float32), np.array([1, 1, 0], bool)
    ids, zeros = np.zeros(3, int), np.zeros(3, np.float32)
    for reduce, expected in ((kernels.segment_sum, -3), (kernels.segment_mean, -1.5), (kernels.segment_min, -2)):
        found = kernels.progress_advantage(logprobs, zeros, ids, mask, reduce=reduce, num_segments=1)
        np.testing.assert_allclose(found, [expected])
        episode = kernels.episode_advantage(
            np.array([-1, -2, -50], np.float32), np.array([0, 0, -1]), np.array([1, 1, 0], bool), reduce=reduce
        )
        np.testing.assert_allclose(episode, [expected])


def test_episodes_count_steps_that_were_cut_off_but_no_observations():
    scores = np.array([3, 7, 0, 1, 2], np.float32)  # the third step was cut off: 0
    episodes, is_action = np.array([0, 0, 0, 1, -1]), np.array([1, 0, 1, 1, 0], bool)
    found = kernels.episode_advantage(scores, episodes, is_action, num_episodes=3)
    np.testing.assert_allclose(found, [1.5, 1, 0])
    lowest = kernels.episode_advantage(scores, episodes, is_action, reduce=kernels.bottom_mean(0.1), num_episodes=2)
    np.testing.assert_allclose(lowest, [0, 1])
