"""How good were the episodes: pass@k, pass^k, AUROC, rank correlation, best-of-N and intervals.

Everything is numpy in float64 and runs on the host. Functions of counts and of groups give one number per task:
`np.mean` of them is the benchmark's number, `bootstrap_interval` its uncertainty.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from mpo_jax.types import Array

Numbers = Array | np.generic | Sequence | float | int  # whatever `np.asarray` makes numbers of


def success(reward: Numbers, threshold: float | None = None) -> np.ndarray | bool:
    """Whether an episode succeeded: |r − 1| ≤ 1e-6, or r ≥ threshold where one is given.

    Args:
      reward: float[...], the episodes' rewards. NaN is no success.
      threshold: the lowest reward that counts, for environments that pay partial or larger rewards.

    Returns:
      bool[...], a plain bool for a scalar.
    """
    reward = np.asarray(reward, np.float64)
    result = np.abs(reward - 1.0) <= 1e-6 if threshold is None else reward >= threshold
    return bool(result) if result.ndim == 0 else result


def pass_at_k(n: Numbers, c: Numbers, k: Numbers) -> np.ndarray | float:
    """The chance that at least one of k attempts succeeds, estimated without bias from n attempts.

    pass@k = 1 − C(n−c, k) / C(n, k)

    See *Evaluating Large Language Models Trained on Code* (arXiv:2107.03374), Eq. 1.

    Args:
      n: int[...], attempts at each task.
      c: int[...], how many of them succeeded.
      k: int[...], attempts allowed; the three broadcast.

    Returns:
      float64[...], one number per task, a plain float for scalars.

    Raises:
      ValueError: unless all are whole numbers, 0 ≤ c ≤ n and 1 ≤ k ≤ n (no unbiased estimate exists for k > n).
    """
    n, c, k = _checked_counts(n, c, k)
    return 1.0 - _all_drawn_from(n, np.asarray(n - c), k)


def pass_hat_k(n: Numbers, c: Numbers, k: Numbers) -> np.ndarray | float:
    """The chance that all of k attempts succeed (pass^k, reliability), estimated without bias from n attempts.

    pass^k = C(c, k) / C(n, k), which is not the plug-in (c/n)^k: that one is biased upwards.

    See *τ-bench: A Benchmark for Tool-Agent-User Interaction in Real-World Domains* (arXiv:2406.12045).

    Args:
      n: int[...], attempts at each task.
      c: int[...], how many of them succeeded.
      k: int[...], attempts that must all succeed; the three broadcast.

    Returns:
      float64[...], one number per task, a plain float for scalars.

    Raises:
      ValueError: unless all are whole numbers with 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    return _all_drawn_from(*_checked_counts(n, c, k))


def pass_rates(n: Numbers, c: Numbers, ks: Sequence[int] | None = None) -> dict[str, float]:
    """pass@k and pass^k averaged over tasks, each under its own name.

    Args:
      n: int[tasks] or int, attempts at each task.
      c: int[tasks], how many of them succeeded.
      ks: the k to report; every k up to the fewest attempts at any task when not given.

    Returns:
      `{"pass@1": …, "pass^1": …, "pass@2": …}`.

    Raises:
      ValueError: without tasks, with one not attempted, or as `pass_at_k` does, if only for one of the tasks.
    """
    n, c = np.broadcast_arrays(n, c)
    if n.size == 0 or n.min() < 1:
        raise ValueError("pass rates need at least one task and one attempt at each")
    rates = {}
    for k in range(1, int(n.min()) + 1) if ks is None else ks:
        rates[f"pass@{k}"] = float(np.mean(pass_at_k(n, c, k)))
        rates[f"pass^{k}"] = float(np.mean(pass_hat_k(n, c, k)))
    return rates


def auroc(labels: Numbers, scores: Numbers) -> float:
    """The chance that a success scores higher than a failure, a tie counting half.

    AUROC = P(s⁺ > s⁻) + ½ P(s⁺ = s⁻)

    Args:
      labels: bool[N] or 0/1, which episodes succeeded.
      scores: float[N], higher for likelier success; infinities are ordered as usual.

    Returns:
      A number in [0, 1]; NaN when all labels are equal (undefined, neither 0 nor 0.5): average several with `nanmean`.

    Raises:
      ValueError: if a score is NaN, a label neither 0 nor 1, or the shapes are not one and the same [N].
    """
    labels, scores = _labels_and_scores(labels, scores)
    positives = int(labels.sum())
    negatives = labels.size - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    # The rank sum of the positives is the pairs they win plus the ranks they have among themselves (Mann-Whitney's U).
    wins = _average_ranks(scores)[labels].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


def spearman(x: Numbers, y: Numbers) -> float:
    """Spearman's ρ: the correlation of the ranks, ties sharing their average rank.

    Args:
      x: float[N].
      y: float[N].

    Returns:
      A number in [−1, 1]; NaN when either is constant (one value or none included).

    Raises:
      ValueError: if a value is NaN or the shapes are not one and the same [N].
    """
    x, y = _paired(x, y)
    middle = (x.size + 1) / 2
    x, y = _average_ranks(x) - middle, _average_ranks(y) - middle
    scale = np.sqrt((x @ x) * (y @ y))
    return float(np.clip(x @ y / scale, -1.0, 1.0)) if scale > 0 else float("nan")


class BestOfN(NamedTuple):
    """What choosing among N attempts yields; every field is float64[...], one number per task.

    Attributes:
      best_of_n: the reward of the attempt with the highest score.
      oracle: the highest reward, which no selection can beat (pass@N when rewards are 0 or 1).
      mean: the average reward, what choosing at random yields.
    """

    best_of_n: np.ndarray | float
    oracle: np.ndarray | float
    mean: np.ndarray | float


def best_of_n(scores: Numbers, rewards: Numbers) -> BestOfN:
    """Choose the attempt with the highest score; the first wins ties.

    Args:
      scores: float[..., N], of the attempts at each task; −inf for one without a score, so that it is chosen only when
        none has one (then the first is).
      rewards: float[..., N], or 0/1 successes, of the same attempts.

    Returns:
      `BestOfN`, float64[...] each, plain floats for one task.

    Raises:
      ValueError: if the shapes differ, N is 0, or a score or reward is NaN.
    """
    scores, rewards = np.asarray(scores, np.float64), np.asarray(rewards, np.float64)
    if scores.shape != rewards.shape or scores.ndim == 0 or scores.shape[-1] == 0:
        raise ValueError(f"scores and rewards must share one shape [..., N >= 1], got {scores.shape}, {rewards.shape}")
    _refuse_nan(scores, "scores (use -inf for an attempt without one)")
    _refuse_nan(rewards, "rewards")
    chosen = np.take_along_axis(rewards, scores.argmax(-1)[..., None], axis=-1)[..., 0]
    return BestOfN(_unwrap(chosen), _unwrap(rewards.max(-1)), _unwrap(rewards.mean(-1)))


def majority_vote(answers: Sequence[Hashable]) -> Hashable:
    """The most frequent answer (self-consistency); the first seen wins ties.

    Args:
      answers: the final answer of each attempt, None for an attempt without one, which has no vote.

    Returns:
      The answer, None when no attempt has one.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes, key=votes.__getitem__, default=None)  # a Counter keeps the order of first sight


def risk_coverage(labels: Numbers, scores: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """How often the accepted episodes fail when those that score at least a threshold are accepted.

    Equal scores are accepted together, so that the order of the episodes changes nothing.

    Args:
      labels: bool[N] or 0/1, which episodes succeeded.
      scores: float[N], confidence.

    Returns:
      coverage: float64[D], accepted share at each of the D distinct scores, highest score first; rises to 1.
      risk: float64[D], failed share of the accepted.

    Raises:
      ValueError: as `auroc` does.
    """
    labels, scores = _labels_and_scores(labels, scores)
    values, positions = np.unique(-scores, return_inverse=True)
    accepted = np.cumsum(np.bincount(positions, minlength=values.size))
    failed = np.cumsum(np.bincount(positions, weights=~labels, minlength=values.size))
    return accepted / max(labels.size, 1), failed / accepted


def bootstrap_interval(
    per_task_values: Numbers, *, level: float = 0.95, num_samples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of a mean over tasks.

    Tasks are drawn with replacement, not episodes: the attempts at one task are not independent of each other.

    Args:
      per_task_values: float[tasks], for example `pass_hat_k` of each task.
      level: the share of resampled means that lies inside.
      num_samples: how many times the tasks are redrawn.
      seed: of the draws; equal seeds give equal intervals.

    Returns:
      The lower and the upper end. With a single task both are its value, which says nothing of the uncertainty.

    Raises:
      ValueError: without tasks, if a value is NaN, or unless 0 < level < 1 and num_samples ≥ 1.
    """
    values = np.asarray(per_task_values, np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"per_task_values must be [tasks >= 1], got shape {values.shape}")
    if not 0 < level < 1 or num_samples < 1:
        raise ValueError(f"need 0 < level < 1 and num_samples >= 1, got {level} and {num_samples}")
    _refuse_nan(values, "per_task_values")
    rng = np.random.default_rng(seed)
    # One redraw at a time: memory grows with the tasks only.
    means = [values[rng.integers(values.size, size=values.size)].mean() for _ in range(num_samples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _all_drawn_from(n: np.ndarray, a: np.ndarray, k: np.ndarray) -> np.ndarray | float:
    """C(a, k) / C(n, k) = Π_{i<k} (a−i)/(n−i), the chance that k draws out of n all lie among a given ones.

    Every factor lies in [0, 1], so nothing overflows, and one of them is 0 where a < k.
    """
    draws = np.arange(k.max(initial=0))
    left, among = n[..., None] - draws, np.maximum(a[..., None] - draws, 0)
    return _unwrap(np.where(draws < k[..., None], among / np.maximum(left, 1), 1.0).prod(-1))


def _checked_counts(n: Numbers, c: Numbers, k: Numbers) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The counts as float64 arrays of one shape, or a ValueError that shows the first wrong ones."""
    n, c, k = np.broadcast_arrays(*(np.asarray(value, np.float64) for value in (n, c, k)))
    whole = (n == np.floor(n)) & (c == np.floor(c)) & (k == np.floor(k))
    wrong = np.asarray(~(whole & (c >= 0) & (c <= n) & (k >= 1) & (k <= n)))
    if wrong.any():
        first = ", ".join(f"{name}={value[wrong][0]:g}" for name, value in (("n", n), ("c", c), ("k", k)))
        raise ValueError(f"need whole numbers with 0 <= c <= n and 1 <= k <= n, got {first}")
    return n, c, k


def _average_ranks(values: np.ndarray) -> np.ndarray:
    """float64[N]: ranks from 1, equal values sharing the average of theirs."""
    _, positions, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[positions]


def _paired(x: Numbers, y: Numbers) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"need two arrays of one shape [N], got {x.shape} and {y.shape}")
    _refuse_nan(x, "first argument")
    _refuse_nan(y, "second argument")
    return x, y


def _labels_and_scores(labels: Numbers, scores: Numbers) -> tuple[np.ndarray, np.ndarray]:
    labels, scores = _paired(labels, scores)
    if not np.isin(labels, (0, 1)).all():
        raise ValueError("labels must be 0 or 1 (see `success` to make them of rewards)")
    return labels.astype(bool), scores


def _refuse_nan(values: np.ndarray, name: str) -> None:
    if np.isnan(values).any():
        raise ValueError(f"NaN at {np.argwhere(np.isnan(values))[0].tolist()} of the {name}")


def _unwrap(values: np.ndarray | np.generic) -> np.ndarray | float:
    return float(values) if np.ndim(values) == 0 else values
