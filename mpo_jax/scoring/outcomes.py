"""How good the episodes of a file are, and how well scores tell the good ones from the bad."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpo_jax import evaluation
from mpo_jax.scoring.transcripts import Transcript

BINS = 10

Numbers = Sequence[float] | Sequence[int] | np.ndarray


class Outcome(NamedTuple):
    """What is kept of an episode: which attempt at which task, its reward (NaN for none), answer and scores."""

    episode_id: str
    task_id: str
    reward: float
    answer: str | None
    scores: dict[str, float]


def outcome(transcript: Transcript) -> Outcome:
    """An episode's outcome, with the scores that its file alone gives.

    `negative_message_count` and `negative_action_count` (shorter is better); `sequence_logprob` and `mean_logprob`
    where every action has log-probs; the file's own `scores`; `message_score`, the mean of its messages' scores.
    """
    actions = [message for message in transcript.messages if message.action]
    scores = {
        "negative_message_count": -float(len(transcript.messages)),
        "negative_action_count": -float(len(actions)),
        **transcript.scores,
    }
    if actions and all(message.logprobs for message in actions):
        logprobs = np.concatenate([message.logprobs for message in actions])
        scores |= {"sequence_logprob": float(logprobs.sum()), "mean_logprob": float(logprobs.mean())}
    if scored := [message.score for message in actions if message.score is not None]:
        scores["message_score"] = float(np.mean(scored))
    reward = float("nan") if transcript.reward is None else transcript.reward
    return Outcome(transcript.episode_id, transcript.task_id, reward, transcript.answer, scores)


def with_scores(outcomes: Iterable[Outcome], scores: Mapping[str, Mapping[str, float]]) -> list[Outcome]:
    """The outcomes with further scores, given by episode and name.

    Raises:
      ValueError: no episode has any of them, which means that the ids are not the file's.
    """
    joined = [one._replace(scores=one.scores | dict(scores.get(one.episode_id, {}))) for one in outcomes]
    if joined and not any(one.episode_id in scores for one in joined):
        raise ValueError(f"the scores are of episodes {list(scores)[:3]}…, of none such as {joined[0].episode_id!r}")
    return joined


def expected_best(scores: Numbers, rewards: Numbers, k: int) -> float:
    """The expected reward of the highest-scored of k attempts drawn from n without replacement.

    Σ_i r_(i) C(i−1, k−1) / C(n, k), attempts in rising order of score; the first of equals counts as the higher.
    At k = n this is best-of-n, at k = 1 the mean; with rewards as scores it is the oracle.

    Raises:
      ValueError: unless 1 ≤ k ≤ n.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, expected 1..{n}, the number of attempts")
    order = np.lexsort((-np.arange(n), scores))
    chances = np.array([math.comb(rank, k - 1) / math.comb(n, k) for rank in range(n)])
    return float(chances @ np.asarray(rewards, np.float64)[order])


def summarise(
    outcomes: Iterable[Outcome], *, threshold: float | None = None, num_samples: int = 1000, seed: int = 0
) -> dict:
    """All numbers of a file of episodes.

    Args:
      outcomes: one an episode; one without a reward counts as a failure with reward 0.
      threshold: as in `evaluation.success`.
      num_samples: redraws of the tasks for each 95 % bootstrap interval.
      seed: of the redraws.

    Returns:
      Plain numbers, lists and dicts for JSON, None where a number is undefined: `tasks`, `episodes`,
      `episodes_without_reward`, `pass@k` and `pass^k` for each k up to the fewest attempts (powers of two beyond 16),
      `best_of_n` with mean, oracle and majority vote, `intervals` of these, and for each score `auroc`, `spearman`,
      `best_of_n`, `risk_coverage`, `calibration`.

    Raises:
      ValueError: there are no episodes.
    """
    outcomes = list(outcomes)
    if not outcomes:
        raise ValueError("no episodes that can be read")
    tasks: dict[str, list[int]] = {}
    for index, one in enumerate(outcomes):
        tasks.setdefault(one.task_id, []).append(index)
    groups = [np.array(members) for members in tasks.values()]
    given = np.array([one.reward for one in outcomes])
    rewards, labels = np.where(np.isnan(given), 0.0, given), np.asarray(evaluation.success(given, threshold))
    bootstrap = {"num_samples": num_samples, "seed": seed}
    rates, choices = _rates(labels, groups), _choices(outcomes, rewards, groups)
    names = dict.fromkeys(name for one in outcomes for name in one.scores)
    columns = {name: np.array([one.scores.get(name, np.nan) for one in outcomes]) for name in names}
    return {
        "tasks": len(groups),
        "episodes": len(outcomes),
        "episodes_without_reward": int(np.isnan(given).sum()),
        "attempts_per_task": [min(map(len, groups)), max(map(len, groups))],
        **{name: float(np.mean(values)) for name, values in rates.items()},
        "best_of_n": {name: float(np.mean(values)) for name, values in choices.items()},
        "intervals": {
            name: evaluation.bootstrap_interval(values, **bootstrap) for name, values in (rates | choices).items()
        },
        "scores": {name: _judge(column, labels, rewards, groups, bootstrap) for name, column in columns.items()},
    }


def _rates(labels: np.ndarray, groups: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Success, pass@k and pass^k of each task."""
    n, c = np.array([group.size for group in groups]), np.array([labels[group].sum() for group in groups])
    smallest = int(n.min())
    rates = {"success_rate": c / n}
    for k in range(1, smallest + 1) if smallest <= 16 else _sizes(smallest):
        rates |= {f"pass@{k}": evaluation.pass_at_k(n, c, k), f"pass^{k}": evaluation.pass_hat_k(n, c, k)}
    return rates


def _choices(outcomes: Sequence[Outcome], rewards: np.ndarray, groups: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The reward of each task's attempt that is chosen without a score."""
    choices = {
        "mean": np.array([rewards[group].mean() for group in groups]),
        "oracle": np.array([rewards[group].max() for group in groups]),
    }
    if any(one.answer is not None for one in outcomes):
        choices["majority"] = np.array([_majority(outcomes, rewards, group) for group in groups])
    return choices


def _judge(scores: np.ndarray, labels: np.ndarray, rewards: np.ndarray, groups: list, bootstrap: Mapping) -> dict:
    """What one score is worth; episodes without one are left out of all but best-of-N, where they are never chosen."""
    known = np.isfinite(scores)
    ranked = np.where(known, scores, -np.inf)
    pairs = {"auroc": (evaluation.auroc, labels), "spearman": (evaluation.spearman, rewards)}
    result: dict = {"scored": int(known.sum())}
    for name, (statistic, truth) in pairs.items():

        def value(index: np.ndarray, statistic=statistic, truth=truth) -> float:
            index = index[known[index]]
            return statistic(truth[index], scores[index])

        result[name] = _finite(value(np.arange(len(scores))))
        result[f"{name}_interval"] = resampled_interval(groups, value, **bootstrap)
    best = [expected_best(ranked[group], rewards[group], len(group)) for group in groups]
    smallest = min(len(group) for group in groups)
    curve = {k: [expected_best(ranked[group], rewards[group], k) for group in groups] for k in _sizes(smallest)}
    result["best_of_n"] = float(np.mean(best))
    result["best_of_n_interval"] = evaluation.bootstrap_interval(best, **bootstrap)
    result["best_of_k"] = {str(k): float(np.mean(values)) for k, values in curve.items()}
    coverage, risk = evaluation.risk_coverage(labels[known], scores[known])
    kept = np.unique(np.linspace(0, len(risk) - 1, min(len(risk), 200)).astype(int))
    result["risk_coverage"] = {
        "area": _finite(float(risk @ np.diff(coverage, prepend=0.0))) if known.any() else None,
        "coverage": coverage[kept].tolist(),
        "risk": risk[kept].tolist(),
    }
    result["calibration"] = calibration(labels[known], scores[known])
    return result


def calibration(labels: np.ndarray, scores: np.ndarray, bins: int = BINS) -> dict:
    """Success against score, in bins of about equally many episodes.

    Args:
      labels: bool[N].
      scores: float[N].
      bins: most bins; equal scores are never torn apart.

    Returns:
      `score` and `success`, means of each bin, `episodes` in it, and the expected calibration error Σ_b n_b/N
      |success_b − score_b|: None unless every score is a probability.
    """
    order = np.argsort(scores, kind="stable")
    edges = np.searchsorted(scores[order], np.quantile(scores, np.arange(1, bins) / bins)) if len(scores) else []
    members = [part for part in np.split(order, np.unique(edges).astype(int)) if part.size]
    mean_score = np.array([scores[part].mean() for part in members])
    mean_success = np.array([labels[part].mean() for part in members])
    sizes = np.array([part.size for part in members])
    probabilities = bool(len(scores)) and scores.min() >= 0 and scores.max() <= 1
    error = float(sizes @ np.abs(mean_success - mean_score) / sizes.sum()) if probabilities else None
    return {
        "score": mean_score.tolist(),
        "success": mean_success.tolist(),
        "episodes": sizes.tolist(),
        "expected_calibration_error": error,
    }


def resampled_interval(
    groups: Sequence[np.ndarray], statistic: Callable[[np.ndarray], float], *, num_samples: int, seed: int
) -> tuple[float, float] | None:
    """The 95 % percentile bootstrap interval over tasks of a statistic that is no mean over tasks.

    Args:
      groups: the indices of each task's episodes.
      statistic: of the indices of some episodes; redraws where it is undefined (NaN) are left out.
      num_samples: how many times the tasks are redrawn.
      seed: of the draws.

    Returns:
      The ends, None where the statistic is undefined in every redraw.
    """
    rng = np.random.default_rng(seed)
    draws = (rng.integers(len(groups), size=len(groups)) for _ in range(num_samples))
    values = np.array([statistic(np.concatenate([groups[i] for i in drawn])) for drawn in draws])
    values = values[~np.isnan(values)]
    return tuple(np.quantile(values, [0.025, 0.975]).tolist()) if values.size else None


def _majority(outcomes: Sequence[Outcome], rewards: np.ndarray, group: np.ndarray) -> float:
    """The reward of the first attempt that gave the most frequent answer; without any answer, of the first attempt."""
    answers = [outcomes[index].answer for index in group]
    return float(rewards[group[answers.index(evaluation.majority_vote(answers))]])


def _sizes(largest: int) -> list[int]:
    """1, 2, 4, … and the largest."""
    return sorted({2**i for i in range(largest.bit_length()) if 2**i <= largest} | {largest})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
