r"""Trains an agent: rollout (in its own process or in this one) → store → learner → published weights.

    python -m experiments.train --workdir=runs/search
    python -m experiments.train --workdir=runs/gspo --config.algorithm=gspo --rollout=inline

A run that was stopped, in whatever way, goes on where its last checkpoint left it when the same command is given.
"""

import contextlib
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from experiments import adapters, environments, parts, watching
from experiments.workers import InlineWorker, WorkerProcess
from mpo_jax.rollout.worker import stop_on_signals
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights
from mpo_jax.training.checkpoints import Checkpoints
from mpo_jax.training.learner import Learner, learn
from mpo_jax.training.metrics import MetricsLog
from mpo_jax.training.report import write_report

CONFIG = config_flags.DEFINE_config_file("config", "experiments/configs/search.py", "What to train, and how.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
ROLLOUT = flags.DEFINE_enum(
    "rollout", "process", ["process", "inline"], "Where episodes are played; inline repeats bit for bit from its seed."
)
PROFILE = flags.DEFINE_list("profile_steps", None, "First and last step to trace into the workdir's trace/.")


def main(_):
    logging.set_verbosity(logging.WARNING)
    parts.keep_freed_memory()
    config, workdir = CONFIG.value, Path(WORKDIR.value)
    algorithm = parts.make_algorithm(config)
    parts.settle_groups(config, algorithm)
    settings = parts.make_settings(config)
    model = parts.load_model(config)
    setting = environments.build(config, model.tokenizer)
    parts.claim_workdir(workdir, config)
    optimizers = parts.make_optimizers(config)
    learner = Learner(
        algorithm,
        parts.make_models(config, model),
        optimizers,
        settings,
        model.tokenizer.render_hint,
        parts.make_shaping(config, model),
    )
    checkpoints = Checkpoints(workdir / "checkpoints")
    state = parts.restore_state(checkpoints, parts.make_state(config, model, algorithm, optimizers))
    store, published = EpisodeStore(workdir / "episodes.sqlite"), PublishedWeights(workdir / "weights")
    evaluate = parts.make_evaluate(config, model, setting, learner)
    inline = ROLLOUT.value == "inline"
    worker = InlineWorker(config, model, setting, store, published) if inline else WorkerProcess(workdir)
    trace = watching.make_trace(workdir, PROFILE.value)
    utilisation = watching.make_utilisation(config, model, state)
    log = MetricsLog(
        workdir, total_steps=settings.num_steps, first_step=int(state.step), trace=trace, utilisation=utilisation
    )
    with contextlib.closing(checkpoints), worker, stop_on_signals() as should_stop:
        state = learn(
            learner,
            state,
            store,
            published,
            checkpoints,
            log,
            wait=worker.wait,
            evaluate=evaluate,
            should_stop=should_stop,
        )
    log.close()
    adapters.save(workdir, config, model, state)
    print(write_report(workdir, finished=int(state.step) >= settings.num_steps))


if __name__ == "__main__":
    app.run(main)
