"""What it would have cost and saved to end hopeless episodes early, from episodes that were played to their end."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from mpo_jax import evaluation
from mpo_jax.scoring.outcomes import resampled_interval
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
    scores: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    successes: Sequence[bool] | np.ndarray,
    flag: Flag,
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


def judge_monitor(
    scores: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    successes: np.ndarray,
    tasks: Sequence[str],
    *,
    min_turns: int,
    quantiles: Sequence[float],
    make_flag: Callable[[float, int], Flag],
) -> dict:
    """What the mean score of the turns so far knows of success after each turn, and what ending episodes by it costs.

    Args:
      scores: of each episode's turns.
      tokens: of each episode's turns, as many.
      successes: bool[N] of the episodes, played to their end.
      tasks: of the episodes.
      min_turns: no episode ends before so many.
      quantiles: of the means after so many turns: the thresholds.
      make_flag: threshold and least number of turns -> the flag, as `rollout.monitor.mean_below` does.

    Returns:
      For JSON: `auroc` by number of turns, with `episodes` that have so many, `value` and 95 % bootstrap `interval`
      over tasks (None where all end alike); `stopping`, a row for each threshold.

    Raises:
      ValueError: as `early_stopping` does, or no episode has so many turns.
    """
    longest, auroc, limits = max(map(len, scores)), {}, np.array([])
    if longest < min_turns:
        raise ValueError(f"min_turns={min_turns}, but no episode has more than {longest} turns")
    for turns in range(1, longest + 1):
        running = np.array([np.mean(one[:turns]) if len(one) >= turns else np.nan for one in scores])
        auroc[turns] = _auroc(running, successes, tasks)
        if turns == min_turns:
            limits = np.nanquantile(running, quantiles)
    rows = [
        {"threshold": float(limit)}
        | dataclasses.asdict(early_stopping(scores, tokens, successes, make_flag(float(limit), min_turns)))
        for limit in limits
    ]
    return {"auroc": auroc, "stopping": rows}


def _auroc(scores: np.ndarray, successes: np.ndarray, tasks: Sequence[str]) -> dict:
    """Over the episodes that have a score."""
    groups: dict[str, list[int]] = {}
    for index in np.flatnonzero(np.isfinite(scores)):
        groups.setdefault(tasks[index], []).append(index)
    members = [np.array(indices) for indices in groups.values()]

    def value(index: np.ndarray) -> float:
        return float(evaluation.auroc(successes[index], scores[index]))

    every = np.concatenate(members)
    found = value(every)
    interval = resampled_interval(members, value, num_samples=1000, seed=0)
    return {"episodes": len(every), "value": None if np.isnan(found) else found, "interval": interval}


def turn_tokens(episode: Episode) -> list[int]:
    """Tokens of each turn, the observation before it included."""
    return np.bincount(episode.turn_ids, minlength=len(episode.rewards)).tolist()


def turn_logprobs(episode: Episode) -> list[float]:
    """Mean log-prob of each turn's sampled tokens under the policy: what a monitor without a reference would see."""
    mask = np.array(episode.action_mask, bool)
    ids, logprobs = np.array(episode.turn_ids)[mask], np.array(episode.logprobs)[mask]
    return (np.bincount(ids, logprobs) / np.bincount(ids)).tolist()
