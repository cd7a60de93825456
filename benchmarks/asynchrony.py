"""Episodes a second of asynchronous training beside the loop that alternates rollout and training, and what both learn.

make bench-async                                  # three seeds; hours, and nothing else may run
.venv/bin/python -m benchmarks.asynchrony --steps=4 --skip=1 --seeds=0 --flags=--config.episodes_per_step=16

The contestants are runs of `experiments.train`, one after another and in turns: all of a seed before any of the next,
each seed beginning with another. Rates are of the steps after the first few, in which programs are compiled, and
without the evaluations; they count what was made: what waited before those steps is taken off, what waits after them
added. Final success is compared with its standard error.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from absl import app, flags

from mpo_jax.training.metrics import read_metrics

_STEPS = flags.DEFINE_integer("steps", 100, "Of each run.", lower_bound=2)
_SKIP = flags.DEFINE_integer("skip", 5, "First steps that no rate counts.", lower_bound=0)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Of the runs.")
_FLAGS = flags.DEFINE_multi_string("flags", [], "More flags of experiments.train, for all contestants.")
_ONLY = flags.DEFINE_list("only", [], "Contestants, by the first words of their names; all by default.")
_FOLDER = flags.DEFINE_string("folder", None, "Of the runs, kept; a temporary one by default.")
_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "Folder of the table.")

CONTESTANTS = {
    "alternating, one process": ["--rollout=inline", "--config.max_staleness=0"],
    "staleness 0, two processes": ["--config.max_staleness=0"],
    "staleness 2, two processes": ["--config.max_staleness=2", "--config.in_flight_updates=True"],
    "staleness 2, corrected": [
        "--config.max_staleness=2",
        "--config.in_flight_updates=True",
        "--config.correction=truncated",
    ],
}


def train(folder: pathlib.Path, seed: str, arguments: list[str]) -> list[dict]:
    """The metrics of one run, step by step.

    Raises:
      RuntimeError: it failed; its log is named.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "experiments.train", f"--workdir={folder}", f"--config.seed={seed}"]
    command += [f"--config.num_steps={_STEPS.value}", f"--config.evaluate_every={_STEPS.value}", *arguments]
    with (folder / "train.log").open("w") as log:
        code = subprocess.run([*command, *_FLAGS.value], stdout=log, stderr=log).returncode
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with code {code}; see {folder / 'train.log'}")
    return read_metrics(folder / "metrics.jsonl")


def summary(rows: list[dict], skip: int, group_size: int) -> dict[str, float]:
    """Episodes a second, success at the end, and lags, of one run's metrics."""
    steps = [row for row in rows if "episodes" in row]
    counted = [row for row in steps if row["step"] >= skip]
    waited = [row["pending_groups"] for row in steps if row["step"] < skip]
    seconds = sum(row["seconds"] - row["seconds_evaluation"] for row in counted)
    more_wait = group_size * (counted[-1]["pending_groups"] - (waited[-1] if waited else 0))
    return {
        "rate": (sum(row["episodes"] for row in counted) + more_wait) / seconds,
        "success_train": rows[-1]["success_train"],
        "success_held_out": rows[-1]["success_held_out"],
        "lag": statistics.fmean(row["version_lag"] for row in counted),
        "lag_max": max(row["version_lag_max"] for row in counted),
        "waited": sum(row["seconds_wait"] for row in counted) / seconds,
    }


def equality(found: dict[str, list[dict[str, float]]], questions: int) -> str:
    """How far final success is from the first contestant's, and what chance alone would do to one's mean over seeds.

    A success of p on n questions has a variance of p (1 − p) / n, at most 1 / 4n; a difference of two means of s seeds
    2 / s times that. Seeds of training vary beyond it.
    """
    first, *others = found.values()
    differences = [
        statistics.fmean(run[key] for run in runs) - statistics.fmean(run[key] for run in first)
        for runs in others
        for key in ("success_train", "success_held_out")
    ]
    farthest = max(differences, key=abs, default=0.0)
    error = (2 / len(first) / (4 * questions)) ** 0.5
    return (
        f"Success differs from the first's by {farthest:+.3f} at most; two standard errors of that are {2 * error:.3f}."
    )


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """A Markdown table over the seeds; × is the mean of each seed's ratio to the first contestant."""
    lines = [
        "| contestant | episodes/s | × | training questions | held-out | lag, mean and most | learner waits |",
        "|---|---|---|---|---|---|---|",
    ]
    first = next(iter(found.values()))
    for name, runs in found.items():
        ratio = statistics.fmean(run["rate"] / other["rate"] for run, other in zip(runs, first, strict=True))
        mean = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        spread = {key: f"{mean[key]:.3f} [{', '.join(f'{run[key]:.3f}' for run in runs)}]" for key in mean}
        most = max(run["lag_max"] for run in runs)
        lines.append(
            f"| {name} | {spread['rate']} | {ratio:.2f} | {spread['success_train']} | {spread['success_held_out']} "
            f"| {mean['lag']:.2f}, {most:.0f} | {mean['waited']:.0%} |"
        )
    return "\n".join(lines)


def main(_) -> None:
    from benchmarks import measure

    chosen = {
        name: arguments
        for name, arguments in CONTESTANTS.items()
        if not _ONLY.value or name.startswith(tuple(_ONLY.value))
    }
    before, found = measure.machine(), {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(_FOLDER.value or temporary)
        for turn, seed in enumerate(_SEEDS.value):
            names = list(chosen)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                home = folder / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
                rows, config = train(home, seed, chosen[name]), json.loads((home / "config.json").read_text())
                found[name].append(summary(rows, _SKIP.value, config["group_size"]))
                print(seed, name, found[name][-1], flush=True)
    said = f"`python -m benchmarks.asynchrony {' '.join(sys.argv[1:])}`: {_STEPS.value} steps, mean and [each seed]."
    judged = equality(found, config["evaluation_questions"])
    text = "\n\n".join([said, table(found), judged, f"Before: {before}.", f"After: {measure.machine()}."]) + "\n"
    print(text)
    output = pathlib.Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    (output / "asynchrony.md").write_text(text)


if __name__ == "__main__":
    app.run(main)
