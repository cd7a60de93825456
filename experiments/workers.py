"""The three places where `train.py` can have its episodes played."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import ml_collections

from experiments import engines, environments, parts, playing
from experiments.environments import Setting
from experiments.processes import Share
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.rollout.worker import Rollout, run_groups
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights


class WorkerProcess:
    """A process of its own (`experiments.rollout`), which outlives neither this context nor the learner."""

    def __init__(self, workdir: Path, share: Share):
        self.workdir, self.share = workdir, share
        self.path = share.home(workdir) / "rollout.log"

    def __enter__(self) -> "WorkerProcess":
        self.log = self.path.open("a")
        flags = f"--workdir={self.workdir}", f"--parent={os.getpid()}", f"--share={self.share}"
        command = [sys.executable, "-m", "experiments.rollout", *flags]
        # Out of the terminal's group: Ctrl-C is told to the learner alone, which then ends the worker.
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)
        return self

    def wait(self) -> None:
        """Sleeps a little while the worker is alive.

        Raises:
          RuntimeError: it has died; its log is named.
        """
        if (code := self.process.poll()) is not None:
            raise RuntimeError(f"the rollout worker ended with code {code}; see {self.path}")
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
        share: Share,
    ):
        self.groups_per_step, self.store, self.published = config.groups_per_step, store, published
        rollout, self.restore = playing.make_training_rollout(config, model, setting, published)
        self.rollout = dataclasses.replace(rollout, share=(share.index, share.count))

    def __enter__(self) -> "InlineWorker":
        return self

    def wait(self) -> None:
        """Makes the groups that the next batch lacks."""
        arrays, version = self.published.load()
        self.rollout.engine.load(self.restore(arrays), version)
        run_groups(self.rollout, self.store, max(self.groups_per_step - self.store.pending(), 1))

    def __exit__(self, *_) -> None:
        self.rollout.close()


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where a fleet of workers runs.

    Attributes:
      address: of a Ray cluster that this machine is a part of; empty for one on this machine alone.
      workers: how many play.
      gpus: that each of them sees.
    """

    address: str = ""
    workers: int = 2
    gpus: float = 0.0

    def __post_init__(self):
        if importlib.util.find_spec("ray") is None:
            raise ImportError("rollout=ray needs the package ray: pip install ray==2.60.0 (see requirements-test.txt)")


class RayWorkers:
    """Workers on a Ray cluster, which need none of the learner's files: config and model are sent to them.

    A killed one is started anew by Ray and does its groups again; the run fails once an error has ended the last.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        model: Pretrained,
        cluster: Cluster,
        store: EpisodeStore,
        published: PublishedWeights,
    ):
        self.config, self.model, self.cluster = config, model, cluster
        self.store, self.published = store, published

    def __enter__(self) -> "RayWorkers":
        import ray  # an extra

        from mpo_jax.rollout import fleet

        if engines.on_server(self.config) and self.cluster.workers > 1:
            raise ValueError(f"ray_workers={self.cluster.workers} for one server, expected 1: it has its own slots")
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self.model.params))
        fleet.connect(self.cluster.address, workers=self.cluster.workers, object_bytes=size)
        self.fleet = fleet.Fleet(self.store, self.published, self.model.config.vocab_size)
        self.wait, config, model = self.fleet.wait, self.config.to_json(), ray.put(self.model)
        weights = os.path.abspath(self.published.folder)
        for number in range(self.cluster.workers):
            terms = playing.make_terms(self.config, number)
            self.fleet.start(terms, build_remote, config, model, weights, gpus=self.cluster.gpus)
        return self

    def __exit__(self, *_) -> None:
        self.fleet.close()


def build_remote(config: str, model: Pretrained, weights: str) -> tuple[Rollout, Callable]:
    """A training rollout in a worker's process, from the run's config as JSON and the folder of its weights."""
    parts.keep_freed_memory()
    settings = ml_collections.ConfigDict(json.loads(config))
    setting = environments.build(settings, model.tokenizer)
    return playing.make_training_rollout(settings, model, setting, PublishedWeights(weights))
