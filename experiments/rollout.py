r"""A rollout worker: plays episodes for the run in a workdir, with its newest published weights, until told to stop.

    python -m experiments.rollout --workdir=runs/search --worker=1

`train.py` starts one by itself; more of them, on the same machine, may be started by hand.
"""

from pathlib import Path

from absl import app, flags, logging

from experiments import environments, parts
from mpo_jax.rollout.worker import run_worker, stop_on_signals
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
WORKER = flags.DEFINE_integer("worker", 0, "Number of this worker, unlike that of any other.")
PARENT = flags.DEFINE_integer("parent", None, "Stop when this process is no longer the parent.")


def main(_):
    logging.set_verbosity(logging.WARNING)
    parts.keep_freed_memory()
    workdir = Path(WORKDIR.value)
    config = parts.read_config(workdir)
    model = parts.load_model(config)
    rollout, restore = parts.make_training_rollout(config, model, environments.build(config, model.tokenizer))
    store = EpisodeStore(workdir / "episodes.sqlite", vocab_size=model.config.vocab_size)
    with stop_on_signals() as should_stop:
        run_worker(
            rollout,
            store,
            PublishedWeights(workdir / "weights"),
            parts.make_terms(config, WORKER.value),
            should_stop=should_stop,
            restore=restore,
            parent=PARENT.value,
        )
    store.close()


if __name__ == "__main__":
    app.run(main)
