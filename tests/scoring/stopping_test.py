import numpy as np
import pytest

from mpo_jax.scoring.stopping import early_stopping

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


def test_lengths_that_differ_are_named():
    with pytest.raises(ValueError, match="episode 3: 1 scores, 2 turns of tokens"):
        early_stopping(SCORES, [*TOKENS[:3], [1, 2]], SUCCESSES, below(0))
    with pytest.raises(ValueError, match="4 episodes' scores, 4 of tokens and 3 successes"):
        early_stopping(SCORES, TOKENS, SUCCESSES[:3], below(0))
