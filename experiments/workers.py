"""The two places where `train.py` can have its episodes played."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_collections

from experiments import parts
from experiments.environments import Setting
from mpo_jax.models import weights
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.rollout.worker import run_groups
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights


class WorkerProcess:
    """A process of its own (`experiments.rollout`), which outlives neither this context nor the learner."""

    def __init__(self, workdir: Path):
        self.workdir = workdir

    def __enter__(self) -> "WorkerProcess":
        self.log = (self.workdir / "rollout.log").open("a")
        command = [sys.executable, "-m", "experiments.rollout", f"--workdir={self.workdir}", f"--parent={os.getpid()}"]
        # Out of the terminal's group: Ctrl-C is told to the learner alone, which then ends the worker.
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)
        return self

    def wait(self) -> None:
        """Sleeps a little while the worker is alive.

        Raises:
          RuntimeError: it has died; its log is named.
        """
        if (code := self.process.poll()) is not None:
            raise RuntimeError(f"the rollout worker ended with code {code}; see {self.workdir / 'rollout.log'}")
        time.sleep(0.05)

    def __exit__(self, *_) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class InlineWorker:
    """The same rollout in this process: whenever a batch is missing, it is made with the newest weights."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        model: Pretrained,
        setting: Setting,
        store: EpisodeStore,
        published: PublishedWeights,
    ):
        self.groups_per_step, self.model, self.store, self.published = config.groups_per_step, model, store, published
        rollout = parts.make_rollout(config, model, setting, group_size=config.group_size, seed=config.seed)
        self.rollout = parts.monitored(config, model, rollout)

    def __enter__(self) -> "InlineWorker":
        return self

    def wait(self) -> None:
        """Makes the groups that the next batch lacks."""
        arrays, version = self.published.load()
        self.rollout.engine.load(weights.unflatten(self.model.params, arrays), version)
        run_groups(self.rollout, self.store, max(self.groups_per_step - self.store.pending(), 1))

    def __exit__(self, *_) -> None:
        pass
