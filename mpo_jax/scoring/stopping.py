"""What it would have cost and saved to end hopeless episodes early, from episodes that were played to their end."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from mpo_jax.store.episode import Episode

Flag = Callable[[Sequence[float]], bool]


@dataclasses.dataclass(frozen=True)
class Stopping:
    """Shares of all episodes, of their turns and tokens, and of their successes.

    Attributes:
      flagged: episodes that are flagged before their last turn, and would end there.
      turns_saved: turns that would not have been played.
      tokens_saved: tokens, read and sampled, that would not have been spent.
      successes_lost: successes that would not have been.
    """

    flagged: float
    turns_saved: float
    tokens_saved: float
    successes_lost: float


def early_stopping(
    scores: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], successes: Sequence[bool], flag: Flag
) -> Stopping:
    """Ends each episode after the first turn as of which `flag` flags it.

    Whoever stops at random loses as large a share of the successes as of the episodes.

    Args:
      scores: of each episode's turns.
      tokens: of each episode's turns, as many.
      successes: of each episode, played to its end.
      flag: the scores of an episode's turns so far -> whether it is given up.

    Raises:
      ValueError: no episodes, or lengths that differ.
    """
    if not scores or not len(scores) == len(tokens) == len(successes):
        raise ValueError(f"{len(scores)} episodes' scores, {len(tokens)} of tokens and {len(successes)} successes")
    if wrong := [i for i, (s, t) in enumerate(zip(scores, tokens, strict=True)) if len(s) != len(t)]:
        raise ValueError(f"episode {wrong[0]}: {len(scores[wrong[0]])} scores, {len(tokens[wrong[0]])} turns of tokens")
    flagged, turns, saved, lost = 0, 0, 0, 0
    for of_turns, spent, success in zip(scores, tokens, successes, strict=True):
        end = next((k for k in range(1, len(of_turns)) if flag(of_turns[:k])), None)
        if end is not None:
            flagged, turns = flagged + 1, turns + len(spent) - end
            saved, lost = saved + sum(spent[end:]), lost + bool(success)
    return Stopping(
        flagged=flagged / len(scores),
        turns_saved=turns / max(sum(map(len, tokens)), 1),
        tokens_saved=saved / max(sum(map(sum, tokens)), 1),
        successes_lost=lost / max(int(np.sum(successes)), 1),
    )


def turn_tokens(episode: Episode) -> list[int]:
    """Tokens of each turn, the observation before it included."""
    return np.bincount(episode.turn_ids, minlength=len(episode.rewards)).tolist()


def turn_logprobs(episode: Episode) -> list[float]:
    """Mean log-prob of each turn's sampled tokens under the policy: what a monitor without a reference would see."""
    mask = np.array(episode.action_mask, bool)
    ids, logprobs = np.array(episode.turn_ids)[mask], np.array(episode.logprobs)[mask]
    return (np.bincount(ids, logprobs) / np.bincount(ids)).tolist()
