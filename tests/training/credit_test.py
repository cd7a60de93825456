"""The credit of single tokens: each number beside the place where it comes from, and where it belongs."""

import jax
import numpy as np
import pytest

from mpo_jax.training.credit import token_credit
from training import runs


@pytest.fixture(scope="module")
def judged():
    """A learner whose policy has moved from the reference, two groups of episodes, and their credit."""
    learner, state = runs.learner(), runs.fresh_state()
    reference = state.policy
    moved = state.replace(policy=jax.tree.map(lambda x: x * 1.1, state.policy))
    episodes = runs.as_sampled(learner, state, runs.flat(runs.make_groups()))
    return learner, moved, reference, episodes, token_credit(learner, moved, reference, episodes)


def test_every_episode_has_one_number_a_token_and_none_off_the_actions(judged):
    *_, episodes, credit = judged
    assert credit.keys() == {e.episode_id for e in episodes}
    for episode in episodes:
        channels = credit[episode.episode_id]
        assert channels.keys() == {"advantage", "ratio", "gap", "progress", "entropy", "value"}
        read = ~np.array(episode.action_mask)
        for name, x in channels.items():
            assert x.shape == (len(episode.tokens),) and np.isfinite(x).all()
            assert (x[read] == (name == "ratio")).all(), name


def test_the_numbers_are_what_their_names_say(judged):
    learner, moved, reference, episodes, credit = judged
    now, then = (runs.as_sampled(learner, moved.replace(policy=p), episodes) for p in (moved.policy, reference))
    for episode, after, before in zip(episodes, now, then, strict=True):
        channels, mask = credit[episode.episode_id], np.array(episode.action_mask)
        gap = np.subtract(after.logprobs, before.logprobs)
        np.testing.assert_allclose(channels["gap"], gap, atol=2e-5)
        for turn in range(len(episode.rewards)):
            own = mask & (np.array(episode.turn_ids) == turn)
            # MPO's ratio is the product over the turn; the reference sampled, so both say the same here.
            np.testing.assert_allclose(channels["ratio"][own], np.exp(gap[own].sum()), rtol=1e-4)
            # Each model's mean over the turn, then the difference.
            np.testing.assert_allclose(channels["progress"][own], gap[own].mean(), atol=2e-5)
    advantages = np.concatenate([credit[e.episode_id]["advantage"][np.array(e.action_mask)] for e in episodes])
    assert advantages.std() > 0.1


def test_an_episode_that_failed_before_it_acted_has_no_credit(judged):
    learner, moved, reference, episodes, credit = judged
    lists = ("tokens", "action_mask", "executable_mask", "turn_ids", "logprobs", "rewards", "state_ids", "versions")
    failed = type(episodes[0])(
        episode_id="x", group_id=9, task_id="t", end_reason="truncated", **{name: [] for name in lists}
    )
    again = token_credit(learner, moved, reference, [*episodes, failed])
    assert again.keys() == credit.keys()
    assert token_credit(learner, moved, reference, [failed]) == {}
