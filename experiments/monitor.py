r"""How well a live monitor tells hopeless episodes early, and what ending them would save.

    python -m experiments.monitor --workdir=runs/quickstart

Plays held-out questions with a run's newest policy to their end, the warm start reading along as the reference, and
tells what an early end would have saved in turns and tokens and lost in successes; beside it a monitor that sees the
policy's log-probs alone. `--config.monitor.threshold=-0.1 --config.monitor.stop=True` ends episodes while a run trains.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from absl import flags, logging

from experiments import environments, parts, playing, programs, workdirs
from mpo_jax import evaluation
from mpo_jax.models import weights
from mpo_jax.rollout.monitor import MonitoredEngine, mean_below
from mpo_jax.scoring.stopping import judge_monitor, turn_logprobs, turn_tokens
from mpo_jax.store.weights import PublishedWeights

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.", required=True)
SPLIT = flags.DEFINE_enum("split", "held_out", ["train", "held_out"], "Which questions.")
QUESTIONS = flags.DEFINE_integer("questions", 128, "How many of them.", lower_bound=1)
SAMPLES = flags.DEFINE_integer("samples", 4, "Episodes a question.", lower_bound=1)
MIN_TURNS = flags.DEFINE_integer("min_turns", 2, "No episode ends before so many turns.", lower_bound=1)
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")
QUANTILES = (0.05, 0.1, 0.2, 0.3, 0.5)  # of the running means after `min_turns`: the thresholds


def main(_):
    logging.set_verbosity(logging.WARNING)
    parts.keep_freed_memory()
    workdir = Path(WORKDIR.value)
    config = workdirs.read_config(workdir)
    model = parts.load_model(config)
    setting = environments.build(config, model.tokenizer)
    asked = setting.fixed_tasks(SPLIT.value, QUESTIONS.value)
    rollout = playing.make_rollout(
        config, model, setting, tasks=asked.__getitem__, group_size=SAMPLES.value, seed=config.seed + 1
    )
    engine = MonitoredEngine(rollout.engine, model.config, model.params, flag=lambda scores: False)
    arrays, version = PublishedWeights(workdir / "weights").load()
    engine.load(weights.unflatten(model.params, arrays), version)
    episodes = [e for e in playing.play(dataclasses.replace(rollout, engine=engine), len(asked)) if e.tokens]
    success = evaluation.success(np.array([sum(e.rewards) for e in episodes]))
    table = {"episodes": len(episodes), "version": version, "success": float(success.mean())}
    tasks, spent = [e.task_id for e in episodes], [turn_tokens(e) for e in episodes]
    scores = {"progress advantage": [e.metadata["progress"] for e in episodes]}
    scores["log-prob"] = [turn_logprobs(e) for e in episodes]
    for name, of_turns in scores.items():
        table[name] = judge_monitor(
            of_turns, spent, success, tasks, min_turns=MIN_TURNS.value, quantiles=QUANTILES, make_flag=mean_below
        )
    print(json.dumps(table, allow_nan=False) if JSON.value else describe(table))


def describe(table: dict) -> str:
    """The table for a terminal."""
    lines = [f"{table['episodes']} episodes by version {table['version']}, success {table['success']:.3f}"]
    for name in ("progress advantage", "log-prob"):
        lines += ["", f"{name}: AUROC of success after so many turns, with its 95 % interval over questions"]
        for turns, auroc in table[name]["auroc"].items():
            if auroc["value"] is not None:
                ends = ", ".join(f"{end:.3f}" for end in auroc["interval"])
                lines.append(f"  {turns}: {auroc['value']:.3f} [{ends}], {auroc['episodes']} episodes")
        lines += ["", "| threshold | flagged | turns saved | tokens saved | successes lost |", "|---|---|---|---|---|"]
        for row in table[name]["stopping"]:
            kinds = ("threshold", "flagged", "turns_saved", "tokens_saved", "successes_lost")
            lines.append(f"| {' | '.join(f'{row[kind]:.3f}' for kind in kinds)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    programs.run(main)
