"""The monitor against a float64 forward pass of the reference, and what the agent loop does with its flags."""

import jax
import numpy as np
import pytest
from fakes import END, Counting, Letters, ScriptedEngine, say
from models import tiny

from mpo_jax.rollout.agent import run_episodes
from mpo_jax.rollout.conversation import Job, Limits
from mpo_jax.rollout.monitor import MonitoredEngine, mean_below
from mpo_jax.rollout.protocol import Engine, Generation
from mpo_jax.store.episode import decode, encode

CONFIG = tiny.config(vocab_size=128, num_layers=1)
REFERENCE = tiny.params(CONFIG)
CONTEXT = 64


def never(scores):
    return False


def monitored(engine, flag=never, **options):
    return MonitoredEngine(engine, CONFIG, REFERENCE, flag=flag, **options)


def scripted(script, num_slots=2):
    return ScriptedEngine(script, num_slots=num_slots, context_length=CONTEXT)


def expected(tokens, mask, turn_ids, logprobs):
    """mean log π − mean log π_ref of each turn's actions, by the oracle."""
    logits = tiny.log_softmax(tiny.oracle(CONFIG, REFERENCE, tokens))
    reference = np.append(0.0, logits[np.arange(len(tokens) - 1), tokens[1:]])
    gap, mask, turn_ids = np.array(logprobs) - reference, np.array(mask), np.array(turn_ids)
    return [gap[mask & (turn_ids == turn)].mean() for turn in range(max(turn_ids) + 1)]


def play(engine, *options, **settings):
    jobs = [Job(f"e{i}", i, options=o, environment_seed=1, seed=100 + i) for i, o in enumerate(options)]
    return sorted(run_episodes(engine, Letters(), Counting, jobs, **settings), key=lambda e: e.episode_id)


def words(context, seed):
    return [97 + (seed + len(context) + n) % 26 for n in range(1 + (seed + len(context)) % 3)] + [END]


def test_every_turn_is_scored_as_the_oracle_scores_it_in_slots_that_are_refilled():
    engine = monitored(scripted(words))
    assert isinstance(engine, Engine)
    episodes = play(engine, *({"turns": 1 + i % 3, "say": "abc"[: i + 1]} for i in range(5)))
    assert sorted(len(e.rewards) for e in episodes) == [1, 1, 2, 2, 3]
    for episode in episodes:
        scores = episode.metadata["progress"]
        found = expected(episode.tokens, episode.action_mask, episode.turn_ids, episode.logprobs)
        np.testing.assert_allclose(scores, found, atol=1e-4)
        assert "flagged_turn" not in episode.metadata
        assert decode(encode(episode)) == episode


def test_beta_scales_the_scores():
    (once,), (twice,) = (play(monitored(scripted(words), beta=b), {"turns": 2}) for b in (1.0, 2.0))
    np.testing.assert_allclose(twice.metadata["progress"], 2 * np.array(once.metadata["progress"]), rtol=1e-5)


class Slow(ScriptedEngine):
    """Its turns in slot 1 end one call late."""

    def generate(self, new_tokens, seeds):
        late = getattr(self, "late", {})
        answers = super().generate(new_tokens, seeds)
        self.late = {slot: answers.pop(slot) for slot in [1] if slot in answers}
        return answers | late


def test_turns_that_end_later_than_others_are_scored_alike():
    options = {"turns": 2}, {"turns": 2, "say": "xy"}, {"turns": 1}
    plain = play(monitored(scripted(words)), *options)
    slow = play(monitored(Slow(words, num_slots=2, context_length=CONTEXT)), *options)
    for a, b in zip(plain, slow, strict=True):
        np.testing.assert_allclose(a.metadata["progress"], b.metadata["progress"], atol=1e-5)


def test_a_turn_that_was_cut_scores_zero():
    (episode,) = play(monitored(scripted(lambda context, seed: [97, 98])), {"turns": 2})
    assert (episode.end_reason, episode.metadata["progress"]) == ("token_limit", [0.0])


@pytest.mark.parametrize("stops", [False, True])
def test_a_flagged_episode_is_marked_and_ends_only_where_the_limits_say_so(stops):
    engine = monitored(scripted(words), flag=lambda scores: len(scores) >= 2)
    one, long = play(engine, {"turns": 1}, {"turns": 4}, limits=Limits(flagged=stops))
    assert ("flagged_turn" in one.metadata, one.end_reason) == (False, "terminated")
    assert long.metadata["flagged_turn"] == 1
    assert (len(long.rewards), long.end_reason) == ((2, "truncated") if stops else (4, "terminated"))
    (over,) = play(engine, {"turns": 2}, limits=Limits(flagged=stops))
    assert (over.metadata["flagged_turn"], over.end_reason) == (1, "terminated")  # the environment's end comes first


def test_mean_below_a_threshold():
    flag = mean_below(-0.5, min_turns=2)
    # Means: 1 turn is too few; (−2 + 1)/2 = −.5 is not below; (−2 + .9)/2 = −.55 is.
    assert [flag(scores) for scores in ([-9.0], [-2.0, 1.0], [-2.0, 0.9])] == [False, False, True]


def test_the_policy_is_the_engines_and_only_its_weights_are_replaced():
    inner = scripted(say("a"))
    engine = monitored(inner)
    engine.load("weights", 7)
    assert (engine.version, inner.loaded, engine.num_slots, engine.exact) == (7, [7], 2, True)
    answer = engine.generate({0: [5, 6]}, {0: 1})[0]
    assert isinstance(answer, Generation) and not answer.flagged
    engine.free(0)
    assert inner.contexts == {}
    assert jax.tree.all(jax.tree.map(np.array_equal, engine._reference, REFERENCE))
