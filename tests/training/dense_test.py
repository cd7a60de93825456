"""The dense reward by hand, and in a learner's batch against the models' own log-probs."""

import dataclasses

import numpy as np
import pytest
from models import tiny

from experiments import parts
from mpo_jax.models import pretrained
from mpo_jax.training.dense import progress_rewards, progress_shaping
from training import runs


def batch():
    """Two sequences in a row: turns of 2 and 1 actions with an observation between, one of 2, and padding."""
    found = tiny.lay_out([[[1, 2, 3, 4, 5], [6, 7], None]], 8, sequences=2)
    rewards = np.zeros((1, 8), np.float32)
    rewards[0, [4, 6]] = 1.0, 0.5
    return found.replace(
        turn_ids=np.array([[0, 0, 0, 1, 1, 2, 2, -1]]),
        action_mask=np.array([[0, 1, 1, 0, 1, 1, 1, 0]], bool),
        rewards=rewards,
    )


def test_each_turns_score_is_added_to_its_last_token():
    logprobs = np.array([[9, -1, -2, 9, -3, -1, -3, 9]], np.float32)
    reference = np.array([[8, -2, -3, 8, -1, -1, -1, 8]], np.float32)
    found = progress_rewards(batch(), logprobs, reference, coefficient=0.5, beta=2.0)
    # Means −1.5, −3, −2 less −2.5, −1, −1: scores 2·(1, −2, −1), half of which is added at tokens 2, 4 and 6.
    np.testing.assert_allclose(found.rewards, [[0, 0, 1, 0, 1 - 2, 0, 0.5 - 1, 0]])
    untouched = progress_rewards(batch(), logprobs, reference, coefficient=0.0)
    np.testing.assert_array_equal(untouched.rewards, batch().rewards)


def test_a_non_finite_logprob_off_the_actions_does_not_spread():
    logprobs = np.where(batch().action_mask, -1.0, np.nan).astype(np.float32)
    assert np.isfinite(progress_rewards(batch(), logprobs, logprobs, coefficient=1.0).rewards).all()


def pair():
    config = tiny.config(vocab_size=16, num_layers=1)
    base = pretrained.Pretrained(config, tiny.params(config), runs.model().tokenizer)
    return dataclasses.replace(base, params=tiny.params(config, seed=1)), base


def test_a_pair_of_models_shapes_by_their_own_logprobs():
    policy, reference = pair()
    found = progress_shaping(policy, reference, coefficient=0.5)(batch())
    logprobs = np.zeros((2, 1, 8), np.float32)
    for i, model in enumerate((policy, reference)):
        for start, ids in ((0, [1, 2, 3, 4, 5]), (5, [6, 7])):
            table = tiny.log_softmax(tiny.oracle(model.config, model.params, ids))
            logprobs[i, 0, start + 1 : start + len(ids)] = table[np.arange(len(ids) - 1), ids[1:]]
    expected = progress_rewards(batch(), *logprobs, coefficient=0.5)
    np.testing.assert_allclose(found.rewards, expected.rewards, atol=1e-5)
    same = progress_shaping(policy, policy, coefficient=0.5)(batch())
    np.testing.assert_allclose(same.rewards, batch().rewards, atol=1e-6)  # no learning between them: no signal


def test_models_that_do_not_fit_are_refused():
    policy, reference = pair()
    other = dataclasses.replace(reference, config=tiny.config(vocab_size=17))
    with pytest.raises(ValueError, match="a policy of 16 token ids and a reference of 17"):
        progress_shaping(policy, other, coefficient=0.1)
    config = runs.config()
    plain = batch()
    assert parts.make_shaping(config, runs.model())(plain) is plain
    config.dense.policy = "search_tiny"
    with pytest.raises(ValueError, match=r"dense\.policy=search_tiny has not the vocabulary of model="):
        parts.make_shaping(config, runs.model())
    config.algorithm = "vapo"
    with pytest.raises(ValueError, match="vapo tells the successes"):
        parts.make_shaping(config, runs.model())
