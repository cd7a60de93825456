r"""Does Progress Advantage tell our agents' successes from their failures? Newest policies against their warm start.

    for seed in 0 1 2; do python -m experiments.train --workdir=runs/mpo-$seed --config.seed=$seed; done
    python -m experiments.study --workdir=runs/mpo-0,runs/mpo-1,runs/mpo-2 --output=docs/progress_advantage.json

Each policy plays held-out questions, and its episodes are scored under it and the warm start, next to every baseline.
Results lie in OUTPUT by seed and number of steps, and are added to; the table of all is printed. A run's folder keeps
its newest policies only: for several, train with --config.num_steps=25 --config.rate_decay=constant, study that, and go
on with 50.
"""

import json
from pathlib import Path

from absl import flags, logging

from experiments import environments, parts, playing, programs, workdirs
from mpo_jax.models import weights
from mpo_jax.scoring import study
from mpo_jax.store.weights import PublishedWeights

WORKDIR = flags.DEFINE_list("workdir", None, "Folders of runs that differ in their seed.", required=True)
OUTPUT = flags.DEFINE_string("output", "runs/study.json", "Results.")
QUESTIONS = flags.DEFINE_integer("questions", 128, "Held-out questions.", lower_bound=1)
SAMPLES = flags.DEFINE_integer("samples", 8, "Episodes a question.", lower_bound=2)


def measure(workdir: Path) -> dict:
    """Plays and scores the newest policy of a run."""
    config = workdirs.read_config(workdir)
    model = parts.load_model(config)
    setting = environments.build(config, model.tokenizer)
    asked = setting.fixed_tasks("held_out", QUESTIONS.value)
    rollout = playing.make_rollout(
        config, model, setting, tasks=asked.__getitem__, group_size=SAMPLES.value, seed=config.seed + 2
    )
    arrays, version = PublishedWeights(workdir / "weights").load()
    policy = study.with_params(model, weights.unflatten(model.params, arrays))
    rollout.engine.load(policy.params, version)
    found = study.score_episodes(playing.play(rollout, len(asked)), policy, model)
    return {"algorithm": config.algorithm, "seed": config.seed, "step": version, **study.measure(found)}


def main(_):
    logging.set_verbosity(logging.WARNING)
    parts.keep_freed_memory()
    path = Path(OUTPUT.value)
    measured = json.loads(path.read_text()) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    for workdir in WORKDIR.value:
        one = measure(Path(workdir))
        same = ("algorithm", "seed", "step")
        measured = [other for other in measured if any(other[key] != one[key] for key in same)] + [one]
        path.write_text(json.dumps(measured, indent=1) + "\n")
    print(study.table(measured))


if __name__ == "__main__":
    programs.run(main)
