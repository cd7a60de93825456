import numpy as np
import pytest

from mpo_jax.scoring.stopping import early_stopping, judge_monitor

SCORES = [[0.5, -2.0, 1.0], [-1.0, -1.0], [1.0, 1.0], [-3.0]]
TOKENS = [[10, 20, 30], [10, 10], [5, 5], [10]]
SUCCESSES = [True, False, True, False]


def below(threshold):
    return lambda scores: np.mean(scores) < threshold


def test_stopping_by_hand():
    # Threshold −.5: the first ends after its second turn (mean −.75), saving 30, a success; the second after its first,
    # saving 10; the last is flagged at its end only, where there is nothing to save. 8 turns, 100 tokens, 2 successes.
    found = early_stopping(SCORES, TOKENS, SUCCESSES, below(-0.5))
    assert (found.flagged, found.turns_saved, found.tokens_saved, found.successes_lost) == (0.5, 0.25, 0.4, 0.5)
    nobody = early_stopping(SCORES, TOKENS, SUCCESSES, below(-9))
    assert (nobody.flagged, nobody.turns_saved, nobody.tokens_saved, nobody.successes_lost) == (0, 0, 0, 0)
    # Everybody: saves all but the four first turns, and all but 10 + 10 + 5 + 10 tokens.
    everybody = early_stopping(SCORES, TOKENS, SUCCESSES, below(9))
    assert (everybody.flagged, everybody.turns_saved) == (0.75, 0.5)
    assert (everybody.tokens_saved, everybody.successes_lost) == (0.65, 1)


def test_a_monitor_by_hand():
    def make_flag(threshold, least):
        return lambda scores: len(scores) >= least and np.mean(scores) < threshold

    settings = {"quantiles": (0.0, 1.0), "make_flag": make_flag}
    found = judge_monitor(SCORES, TOKENS, np.array(SUCCESSES), list("aabb"), min_turns=2, **settings)
    # First turns .5 and 1 of successes, −1 and −3 of failures. Means of two: −.75 and 1 of successes, −1.
    assert [found["auroc"][k]["value"] for k in (1, 2)] == [1.0, 1.0]
    assert [found["auroc"][k]["episodes"] for k in (1, 2, 3)] == [4, 3, 1]
    assert found["auroc"][3] == {"episodes": 1, "value": None, "interval": None}
    # Below −1 is nobody's mean; below 1 is the first's, whose third turn and 30 tokens are saved, and a success lost.
    nobody, somebody = found["stopping"]
    assert (nobody["threshold"], nobody["flagged"], somebody["threshold"]) == (-1.0, 0, 1.0)
    kinds = ("flagged", "turns_saved", "tokens_saved", "successes_lost")
    assert [somebody[kind] for kind in kinds] == [0.25, 1 / 8, 0.3, 0.5]
    with pytest.raises(ValueError, match="min_turns=4, but no episode has more than 3 turns"):
        judge_monitor(SCORES, TOKENS, np.array(SUCCESSES), list("aabb"), min_turns=4, **settings)


def test_lengths_that_differ_are_named():
    with pytest.raises(ValueError, match="episode 3: 1 scores, 2 turns of tokens"):
        early_stopping(SCORES, [*TOKENS[:3], [1, 2]], SUCCESSES, below(0))
    with pytest.raises(ValueError, match="4 episodes' scores, 4 of tokens and 3 successes"):
        early_stopping(SCORES, TOKENS, SUCCESSES[:3], below(0))
