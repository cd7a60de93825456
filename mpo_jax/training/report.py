"""What a run leaves for a person: a learning curve, a summary, a table."""

import json
from pathlib import Path

import matplotlib

from mpo_jax.training.metrics import read_metrics

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_CURVES = {"success_train": "training questions", "success_held_out": "held-out countries"}


def write_report(folder: Path, *, finished: bool) -> str:
    """Writes `summary.json` and `curve.png` from a run's metrics.

    Args:
      folder: of the run.
      finished: whether it got to its last step.

    Returns:
      A table for the terminal, which says where everything lies.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    episodes, points = 0.0, []
    for row in rows:
        if "success_train" in row:  # measured before the row's batch was trained on
            points.append((episodes, row["success_train"], row["success_held_out"]))
        episodes += row.get("episodes", 0)
    summary = {
        "finished": finished,
        "steps": sum("episodes" in row for row in rows),
        "episodes": int(episodes),
        "wall_seconds": sum(row.get("seconds", 0.0) for row in rows),
    }
    if points:
        _, *ends = zip(points[0], points[-1], strict=True)
        summary |= {name: list(pair) for name, pair in zip(_CURVES, ends, strict=True)}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _draw(points, folder / "curve.png")
    return _table(summary, folder)


def _draw(points: list[tuple[float, float, float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for index, label in enumerate(_CURVES.values(), start=1):
        axes.plot([p[0] for p in points], [p[index] for p in points], marker="o", label=label)
    axes.set(xlabel="episodes trained on", ylabel="success", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _table(summary: dict, folder: Path) -> str:
    lines = [f"{'':22}{'before':>8}{'after':>8}"]
    for name, label in _CURVES.items():
        if name in summary:
            lines.append(f"{label:22}{summary[name][0]:8.3f}{summary[name][1]:8.3f}")
    state = "finished" if summary["finished"] else "stopped; the same command goes on"
    lines += [
        "",
        f"{state}: {summary['steps']} steps, {summary['episodes']} episodes, {summary['wall_seconds']:.0f} s",
        f"curve      {folder / 'curve.png'}",
        f"summary    {folder / 'summary.json'}",
        f"metrics    {folder / 'metrics.jsonl'}, tensorboard --logdir {folder / 'tensorboard'}",
        f"episodes   {folder / 'episodes.sqlite'}",
        f"weights    {folder / 'weights'}, checkpoints {folder / 'checkpoints'}",
    ]
    return "\n".join(lines)
