r"""A rollout worker: plays episodes for the run in a workdir, with its newest published weights, until told to stop.

    python -m experiments.rollout --workdir=runs/search --worker=1

`train.py` starts one by itself; more of them, on the same machine, may be started by hand.
"""

import dataclasses
from pathlib import Path

from absl import app, flags, logging

from experiments import environments, parts, playing, workdirs
from experiments.processes import Share
from mpo_jax.rollout.worker import run_worker, stop_on_signals
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
WORKER = flags.DEFINE_integer("worker", 0, "Number of this worker, unlike that of any other.")
SHARE = flags.DEFINE_string("share", "0/1", "Index and number of the learner's processes, of which it works for one.")
PARENT = flags.DEFINE_integer("parent", None, "Stop when this process is no longer the parent.")


def main(_):
    logging.set_verbosity(logging.WARNING)
    parts.keep_freed_memory()
    workdir = Path(WORKDIR.value)
    share = Share.parse(SHARE.value)
    config = share.part(workdirs.read_config(workdir))
    model = parts.load_model(config)
    published = PublishedWeights(workdir / "weights")
    setting = environments.build(config, model.tokenizer)
    rollout, restore = playing.make_training_rollout(config, model, setting, published)
    rollout = dataclasses.replace(rollout, share=(share.index, share.count))
    store = EpisodeStore(share.home(workdir) / "episodes.sqlite", vocab_size=model.config.vocab_size)
    with stop_on_signals() as should_stop:
        run_worker(
            rollout,
            store,
            published,
            playing.make_terms(config, WORKER.value),
            should_stop=should_stop,
            restore=restore,
            parent=PARENT.value,
        )
    store.close()


if __name__ == "__main__":
    app.run(main)
