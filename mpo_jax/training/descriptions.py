"""What the episodes of a batch look like, whatever is learnt from them."""

from collections.abc import Sequence
from typing import get_args

import numpy as np

from mpo_jax import evaluation, kernels
from mpo_jax.store.episode import EndReason, Episode


def started(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that hold anything: one whose environment failed at its reset has no token."""
    return [episode for episode in episodes if episode.tokens]


def informative(group: Sequence[Episode]) -> bool:
    """Whether the returns of a group differ, by the same rule as in the advantages."""
    returns = np.array([sum(episode.rewards) for episode in group], np.float32)
    return bool(np.any(kernels.informative_groups(returns, np.zeros(len(group), np.int32))))


def describe(episodes: Sequence[Episode], step: int) -> dict[str, float]:
    """What the episodes of a batch look like, whatever is learnt from them."""
    returns = np.array([sum(episode.rewards) for episode in episodes])
    finite = returns[np.isfinite(returns)]
    lags = [step - version for episode in episodes for version in episode.versions] or [0]
    lengths = [len(episode.tokens) for episode in episodes] or [0]
    ends = [episode.end_reason for episode in episodes]
    reasons = {f"end_{reason}": ends.count(reason) / max(len(ends), 1) for reason in get_args(EndReason)}
    return reasons | {
        "success": _mean(evaluation.success(returns)),
        "return": _mean(finite),
        "episodes": len(episodes),
        "tokens": sum(lengths),
        "episode_tokens": _mean(lengths),
        "episode_tokens_max": max(lengths),
        "turns": _mean([len(episode.rewards) for episode in episodes]),
        "truncated": _mean([episode.end_reason != "terminated" for episode in episodes]),
        "failed_environments": sum("error" in episode.metadata for episode in episodes),
        "deadlines_passed": sum("deadline_passed" in episode.metadata for episode in episodes),
        "version_lag": _mean(lags),
        "version_lag_max": max(lags),
    }


def _mean(values: Sequence | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else np.nan
