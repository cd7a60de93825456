r"""How good a policy is, or how good the episodes of a file are.

    python -m experiments.evaluate --workdir=runs/quickstart
    python -m experiments.evaluate --workdir=runs/mine --set=documents.held_out=gaia.jsonl --set=documents.format=gaia
    python -m experiments.evaluate --episodes=results.json --format=tau_bench --output=runs/evaluation

With a run: pass@1 … pass@k on held-out questions, of its policy, the warm start and, where there is one, the scripted
policy. Over documents of one's own also the recall of what was retrieved (where the config names relevance judgements),
and with `--run_files` what BrowseComp-Plus's evaluator reads.
With a file: pass@k and pass^k; best-of-n, AUROC, rank correlation, risk-coverage and calibration of every score that
the file has, and of those that `experiments.score` wrote (`--scores`).
"""

import json
import random
from pathlib import Path

import numpy as np
from absl import flags, logging

from experiments import environments, parts, playing, programs, run_files, workdirs
from mpo_jax import evaluation
from mpo_jax.environments.question_files import read_qrels
from mpo_jax.environments.questions import Question
from mpo_jax.environments.search import SearchEnvironment
from mpo_jax.environments.search_policy import ScriptedPolicy
from mpo_jax.models import weights
from mpo_jax.scoring import readers, report
from mpo_jax.store.weights import PublishedWeights

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.")
EPISODES = flags.DEFINE_string("episodes", None, "File of episodes, in place of a run.")
FORMAT = flags.DEFINE_enum("format", "messages", list(readers.FORMATS), "Of that file.")
SCORES = flags.DEFINE_string("scores", None, "Table of the episodes' scores (.parquet, .csv, .jsonl).")
THRESHOLD = flags.DEFINE_float("threshold", None, "Lowest reward that is a success; |reward - 1| <= 1e-6 without it.")
OUTPUT = flags.DEFINE_string("output", None, "Folder for evaluation.json and evaluation.png.")
SPLIT = flags.DEFINE_enum("split", "held_out", ["train", "held_out"], "Which questions.")
QUESTIONS = flags.DEFINE_integer("questions", 128, "How many of them.", lower_bound=1)
SAMPLES = flags.DEFINE_integer("samples", 16, "Episodes a question; the largest k.", lower_bound=1)
NOISE = flags.DEFINE_float("noise", 0.3, "Of the scripted policy that the warm start imitated.")
RUN_FILES = flags.DEFINE_string("run_files", None, "Folder for run files of episodes over one's own documents.")
SET = flags.DEFINE_multi_string("set", [], "Changes a key of the run's config, as in documents.held_out=other.jsonl.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")


def play_scripted(asked: list[Question], noise: float) -> np.ndarray:
    """Successes [questions, samples] of the scripted policy."""
    environment, policy = SearchEnvironment(), ScriptedPolicy(noise, random.Random(0))

    def succeeds(question: Question) -> bool:
        observation, info = environment.reset(options={"question": question})
        policy.reset(question)
        over = False
        while not over:
            observation, _, terminated, truncated, info = environment.step(policy.act(observation))
            over = terminated or truncated
        return info["success"]

    return np.array([[succeeds(question) for _ in range(SAMPLES.value)] for question in asked])


def rates(successes: np.ndarray) -> dict[str, list[float]]:
    """pass@k for k = 1, 2, 4, …, samples: mean over questions, and the ends of its 95 % bootstrap interval."""
    samples = successes.shape[1]
    ks = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    by_task = {k: evaluation.pass_at_k(np.full(len(successes), samples), successes.sum(axis=1), k) for k in ks}
    return {f"pass@{k}": [float(x.mean()), *evaluation.bootstrap_interval(x)] for k, x in by_task.items()}


def main(_):
    logging.set_verbosity(logging.WARNING)
    if EPISODES.value:
        summary = report.evaluate(
            EPISODES.value, FORMAT.value, scores=SCORES.value, threshold=THRESHOLD.value, output=OUTPUT.value
        )
        print(json.dumps(summary, allow_nan=False) if JSON.value else report.table(summary))
        return
    parts.keep_freed_memory()
    workdir = Path(WORKDIR.value)
    config = workdirs.read_config(workdir)
    workdirs.change(config, SET.value)
    model = parts.load_model(config)
    setting = environments.build(config, model.tokenizer)
    asked = setting.fixed_tasks(SPLIT.value, QUESTIONS.value)
    qrels = read_qrels(config.documents.qrels) if config.documents.qrels else {}
    if RUN_FILES.value:  # what cannot be written is told before anything is played
        Path(RUN_FILES.value).mkdir(parents=True, exist_ok=True)
    rollout = playing.make_rollout(
        config, model, setting, tasks=asked.__getitem__, group_size=SAMPLES.value, seed=config.seed + 1
    )
    arrays, version = PublishedWeights(workdir / "weights").load()
    policies = {f"step {version}": weights.unflatten(model.params, arrays), "warm start": model.params}
    table = {}
    for name, params in policies.items():
        rollout.engine.load(params, version)
        episodes = playing.play(rollout, len(asked))
        returns = [sum(episode.rewards) for episode in episodes]
        table[name] = rates(evaluation.success(np.reshape(returns, (len(asked), -1))))
        table[name] |= run_files.retrieved(episodes, qrels)
        if RUN_FILES.value and params is not model.params:
            run_files.write(Path(RUN_FILES.value), episodes, config.documents.actions, f"{config.model}, {name}")
    if config.environment == "search":  # the only one with a scripted policy
        for noise in (NOISE.value, 0.0):
            table[f"scripted, noise {noise}"] = rates(play_scripted([task["question"] for task in asked], noise))
    if JSON.value:
        print(json.dumps(table, allow_nan=False))
        return
    print(f"{len(asked)} {SPLIT.value} questions, {SAMPLES.value} episodes each; mean [95 % interval]")
    for name, row in table.items():
        shown = (f"{k} {m:.3f}" + (f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "") for k, (m, *ends) in row.items())
        print(f"{name:22}" + "  ".join(shown))


flags.register_multi_flags_validator(
    ["workdir", "episodes"],
    lambda given: bool(given["workdir"]) != bool(given["episodes"]),
    message="give one of --workdir and --episodes",
)

if __name__ == "__main__":
    programs.run(main)
