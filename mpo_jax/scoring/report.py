"""A summary of a file of episodes: as numbers, as a table for the terminal, as curves."""

import json
import logging
from pathlib import Path

import matplotlib

from mpo_jax.scoring import outcomes, readers, tables

matplotlib.use("Agg")
from matplotlib import pyplot as plt

log = logging.getLogger(__name__)


def evaluate(
    episodes: Path | str,
    kind: str,
    *,
    scores: Path | str | None = None,
    threshold: float | None = None,
    output: Path | str | None = None,
    num_samples: int = 1000,
) -> dict:
    """Reads episodes and scores, and says how good the one and how telling the other are.

    Args:
      episodes: a file of episodes.
      kind: its format, a key of `readers.FORMATS`.
      scores: a table of their scores.
      threshold: the lowest reward that is a success, as in `evaluation.success`.
      output: a folder for `evaluation.json` and `evaluation.png`.
      num_samples: redraws of the tasks for each interval.

    Returns:
      `outcomes.summarise` of them, and `unreadable`: a line for each episode that was passed over.

    Raises:
      ValueError: a file is missing or is something else, or the scores are of other episodes.
    """
    if output is not None:  # what cannot be written is told before an hour of reading
        Path(output).mkdir(parents=True, exist_ok=True)
    errors: list[str] = []
    found = [outcomes.outcome(transcript) for transcript in readers.read(episodes, kind, errors)]
    for error in errors:
        log.warning("passed over %s", error)
    if not found:
        raise ValueError(f"{episodes}: not one of {len(errors)} episodes can be read")
    if scores is not None:
        tables.check_tasks(scores, {one.episode_id: one.task_id for one in found})
        found = outcomes.with_scores(found, tables.episode_scores(scores))
    summary = {"unreadable": errors, **outcomes.summarise(found, threshold=threshold, num_samples=num_samples)}
    if output is not None:
        folder = Path(output)
        (folder / "evaluation.json").write_text(json.dumps(summary, allow_nan=False, indent=1) + "\n")
        draw(summary, folder / "evaluation.png")
    return summary


def table(summary: dict) -> str:
    """The numbers of `outcomes.summarise` as lines of text, each with its 95 % interval where it has one."""
    intervals = summary["intervals"]
    attempts = "-".join(str(n) for n in sorted(set(summary["attempts_per_task"])))
    lines = [f"{summary['tasks']} tasks, {summary['episodes']} episodes, {attempts} attempts a task"]
    if summary["episodes_without_reward"]:
        lines.append(f"{summary['episodes_without_reward']} episodes without a reward count as failures")
    lines += [f"{name:26}{_number(summary[name], intervals[name])}" for name in intervals if name in summary]
    lines.append("\nreward of the attempt chosen among all of a task")
    lines += [f"{name:26}{_number(value, intervals[name])}" for name, value in summary["best_of_n"].items()]
    lines += [
        f"{name:26}{_number(score['best_of_n'], score['best_of_n_interval'])}"
        for name, score in summary["scores"].items()
    ]
    lines.append(f"\n{'score':32}{'AUROC':26}{'Spearman':26}{'area of risk':>12}{'ECE':>12}")
    for name, score in summary["scores"].items():
        auroc, spearman = (_number(score[key], score[f"{key}_interval"]) for key in ("auroc", "spearman"))
        area, error = score["risk_coverage"]["area"], score["calibration"]["expected_calibration_error"]
        lines.append(f"{name:32}{auroc:26}{spearman:26}{_number(area):>12}{_number(error):>12}")
    return "\n".join(lines)


def draw(summary: dict, path: Path) -> None:
    """Draws pass@k and pass^k, best-of-k, risk against coverage and success against score."""
    figure, ((passes, best), (risk, calibration)) = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    for mark in ("pass@", "pass^"):
        ks = sorted(int(key.removeprefix(mark)) for key in summary if key.startswith(mark))
        passes.plot(ks, [summary[f"{mark}{k}"] for k in ks], marker="o", label=f"{mark}k")
        ends = [summary["intervals"][f"{mark}{k}"] for k in ks]
        passes.fill_between(ks, [low for low, _ in ends], [high for _, high in ends], alpha=0.2)
    passes.set(xlabel="k", ylabel="share of tasks", ylim=(0, 1), xticks=ks)
    for name, value in summary["best_of_n"].items():
        best.axhline(value, linestyle=":", color="gray")
        best.annotate(f"{name}, all attempts", (1, value), fontsize=8)
    for name, score in summary["scores"].items():
        best.plot([int(k) for k in score["best_of_k"]], list(score["best_of_k"].values()), marker="o", label=name)
        risk.plot(score["risk_coverage"]["coverage"], score["risk_coverage"]["risk"], label=name)
        success = score["calibration"]["success"]
        calibration.plot([(i + 0.5) / len(success) for i in range(len(success))], success, marker="o", label=name)
    best.set(xlabel="attempts to choose from", ylabel="reward of the choice")
    risk.set(xlabel="coverage", ylabel="risk (failed share of the accepted)", ylim=(0, 1))
    calibration.set(xlabel="quantile of the score", ylabel="success", ylim=(0, 1))
    for axes in (passes, best, risk, calibration):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _number(value: float | None, interval: tuple[float, float] | None = None) -> str:
    ends = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return "undefined" if value is None else f"{value:.3f}{ends}"
