"""Which step made a failed episode fail: rules over step scores, and how often they hit what people labelled.

See *Which Agent Causes Task Failures and When?* (arXiv:2505.00212) for the benchmark, and *Progress Advantage*
(arXiv:2606.26080) for the rules.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpo_jax import evaluation
from mpo_jax.scoring import readers, tables
from mpo_jax.scoring.transcripts import Mistake, Transcript

SPLITS = ("Algorithm-Generated", "Hand-Crafted")
Scores = Sequence[float] | np.ndarray  # of the K ≥ 1 action steps of an episode, in order


def min_cumulative(scores: Scores) -> int:
    """argmin_k Σ_{j≤k} s_j, the step after which the episode has sunk lowest; the first of equals."""
    return int(np.argmin(np.cumsum(scores)))


def sharpest_drop(scores: Scores) -> int:
    """argmin_k s_k, the step with the lowest score; the first of equals.

    The authors' code names the first step where no score is negative.
    """
    return int(np.argmin(scores))


def sharpest_abs_drop(scores: Scores) -> int:
    """argmin_{k≥2} s_k − s_{k−1}, the step with the largest fall from the one before; a lone step is named itself.

    The authors' code names the first step where no score falls.
    """
    return int(np.argmin(np.diff(scores))) + 1 if len(scores) > 1 else 0


class Rule(NamedTuple):
    """How a step is chosen: by scores of a column of the table (None: no scores needed), or from their number alone."""

    choose: Callable[[Scores, np.random.Generator], int]
    column: str | None = None


RULES = {
    "min_cumulative": Rule(lambda scores, _: min_cumulative(scores), "score"),
    "sharpest_drop": Rule(lambda scores, _: sharpest_drop(scores), "score"),
    "sharpest_abs_drop": Rule(lambda scores, _: sharpest_abs_drop(scores), "score"),
    "lowest_logprob": Rule(lambda scores, _: sharpest_drop(scores), "mean_logprob"),
    "random": Rule(lambda scores, rng: int(rng.integers(len(scores)))),
    "first": Rule(lambda scores, _: 0),
    "last": Rule(lambda scores, _: len(scores) - 1),
}


class Prediction(NamedTuple):
    """A step's index among all messages, its agent's name, and its label in the file, remarks included."""

    step: int
    agent: str
    label: str


def exact(predicted: Prediction, actual: Mistake) -> tuple[bool, bool]:
    """Whether the agent's name and the step's index are the labelled ones."""
    return predicted.agent == actual.agent, predicted.step == actual.step


def benchmark(predicted: Prediction, actual: Mistake) -> tuple[bool, bool]:
    """The benchmark's own looser matching: what is labelled is a substring of what is predicted.

    An index of 12 hits a labelled 1 or 2, and `Orchestrator (-> WebSurfer)` hits WebSurfer too.
    """
    return actual.agent in predicted.label, str(actual.step) in str(predicted.step)


def attribute(
    folder: Path | str,
    split: str,
    rule: str,
    *,
    scores: Path | str | None = None,
    column: str | None = None,
    only_scored: bool = False,
    seed: int = 0,
) -> dict:
    """Applies a rule to a split of Who&When.

    Args:
      folder: holds a folder of JSON files for each split.
      split: one of `SPLITS`.
      rule: a key of `RULES`.
      scores: a table with the scores of its steps, as `experiments.score` writes it; rules over scores need it.
      column: of the table; None for the rule's own.
      only_scored: files that are not in the table do not count, whatever the rule; without it they are wrong.
      seed: of the rule `random`.

    Returns:
      For JSON: `files`, `unreadable` and `unscored` files by name (both count as wrong), `exact` and `benchmark`, each
      the accuracy by `agent` and by `step`, `intervals` of these (95 %, bootstrap over files), `mean_distance` of the
      steps predicted, and `predictions` by file.

    Raises:
      ValueError: the folder or the table is missing or is something else, or a rule lacks its scores, all of them if
        only files with scores count.
    """
    chosen = RULES[rule]
    if (chosen.column is not None or only_scored) and scores is None:
        raise ValueError(f"rule {rule!r} needs --scores, a table that `python -m experiments.score` wrote")
    by_episode = None if scores is None else tables.step_scores(scores, column or chosen.column or "mean_logprob")
    rng, errors = np.random.default_rng(seed), []
    actual, predicted, unscored, tasks = {}, {}, [], {}
    for transcript in readers.read(Path(folder, split), "who_and_when", errors):
        name = transcript.episode_id
        if only_scored and name not in by_episode:
            continue
        actual[name], tasks[name] = transcript.mistake, transcript.task_id
        if (found := _predict(transcript, chosen, by_episode if chosen.column else None, rng)) is None:
            unscored.append(name)
        else:
            predicted[name] = found
    files = len(actual) + (0 if only_scored else len(errors))
    if not files:
        raise ValueError(f"{scores}: scores of {list(by_episode)[:3]}…, of none of the files in {Path(folder, split)}")
    if scores is not None:
        tables.check_tasks(scores, tasks)
    accuracy, intervals = _accuracies(actual, predicted, files)
    distances = [abs(found.step - actual[name].step) for name, found in predicted.items()]
    return {
        "split": split,
        "rule": rule,
        "files": files,
        "unreadable": errors,
        "unscored": unscored,
        **accuracy,
        "intervals": intervals,
        "mean_distance": float(np.mean(distances)) if distances else None,
        "predictions": {name: {"agent": found.agent, "step": found.step} for name, found in predicted.items()},
    }


def _accuracies(
    actual: Mapping[str, Mistake], predicted: Mapping[str, Prediction], files: int
) -> tuple[dict[str, dict], dict[str, dict]]:
    """Both matchings' shares of hits by agent and by step, and their intervals; what was not predicted is wrong."""
    accuracy, intervals = {}, {}
    for match in (exact, benchmark):
        hits = np.zeros((files, 2))
        for row, (name, found) in enumerate(predicted.items()):
            hits[row] = match(found, actual[name])
        columns = {"agent": hits[:, 0], "step": hits[:, 1]}
        accuracy[match.__name__] = {kind: float(column.mean()) for kind, column in columns.items()}
        intervals[match.__name__] = {kind: evaluation.bootstrap_interval(column) for kind, column in columns.items()}
    return accuracy, intervals


def _predict(
    transcript: Transcript, rule: Rule, scores: Mapping[str, Mapping[int, float]] | None, rng: np.random.Generator
) -> Prediction | None:
    """The step that the rule names; None where a score is missing or nobody acts."""
    actions = [index for index, message in enumerate(transcript.messages) if message.action]
    given = {index: 0.0 for index in actions} if scores is None else scores.get(transcript.episode_id, {})
    if not actions or any(index not in given for index in actions):
        return None
    step = actions[rule.choose([given[index] for index in actions], rng)]
    message = transcript.messages[step]
    return Prediction(step, message.agent, message.role)
