"""Rollout workers on a Ray cluster: all that they share with the learner crosses through one actor beside it.

The learner, its store and its published weights stay as they are without Ray, and so does `run_worker`: what is here
gives a worker on any machine the two things that it asks for, a store of groups and a source of weights. A killed
worker is started anew by Ray, on another machine if its own is gone, and does the groups again that it had reserved.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mpo_jax.rollout.worker import Rollout, Terms, run_worker
from mpo_jax.store.admission import Admission
from mpo_jax.store.episode import Episode, decode, encode
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights

MAX_RESTARTS = 100  # of one worker: a machine that ends it at every start does not keep the learner waiting for ever
_ATTEMPTS = 4  # to start Ray here, which gives up after 30 seconds, on a machine that is busy
_STORE_BYTES = 1 << 27  # Ray's own memory at least; it refuses less than 75 MB

log = logging.getLogger(__name__)


class Desk:
    """The actor beside the learner, which has the learner's store and weights open.

    It remembers nothing that is not in their files, and every call may come twice: Ray may start it anew at any moment.
    Records come as bytes and are checked like any other's.
    """

    def __init__(self, store: str, weights: str, vocab_size: int):
        """Opens the files, by their paths."""
        self._store, self._published = EpisodeStore(store, vocab_size=vocab_size), PublishedWeights(weights)
        self._vocab_size = vocab_size
        self._shared: tuple[int, ray.ObjectRef] | None = None

    def reserve(self, owner: str, lease: float, admission: Admission) -> int | None:
        """See `EpisodeStore.reserve`."""
        return self._store.reserve(owner, lease, admission)

    def renew(self, owner: str, lease: float) -> None:
        """See `EpisodeStore.renew`."""
        self._store.renew(owner, lease)

    def release(self, owner: str) -> None:
        """See `EpisodeStore.release`."""
        self._store.release(owner)

    def add(self, group_id: int, records: list[bytes]) -> None:
        """See `EpisodeStore.add`."""
        self._store.add(group_id, [decode(record, self._vocab_size) for record in records])

    def latest_version(self) -> int | None:
        """See `PublishedWeights.latest_version`."""
        return self._published.latest_version()

    def weights(self) -> tuple[list[ray.ObjectRef], int]:
        """The newest weights as one object of the cluster, which goes to each machine once, and their version."""
        if self._shared is None or self._shared[0] != self._published.latest_version():
            arrays, version = self._published.load()
            self._shared = version, ray.put(arrays)
        version, shared = self._shared
        return [shared], version  # in a list, or Ray would send what it refers to


class RemoteStore:
    """The store as a producer elsewhere sees it: a `GroupStore`."""

    def __init__(self, desk: ray.actor.ActorHandle):
        self._desk = desk

    def reserve(self, owner: str, lease: float, admission: Admission = Admission()) -> int | None:
        """See `EpisodeStore.reserve`."""
        return ray.get(self._desk.reserve.remote(owner, lease, admission))

    def renew(self, owner: str, lease: float) -> None:
        """See `EpisodeStore.renew`."""
        ray.get(self._desk.renew.remote(owner, lease))

    def release(self, owner: str) -> None:
        """See `EpisodeStore.release`."""
        ray.get(self._desk.release.remote(owner))

    def add(self, group_id: int, episodes: Sequence[Episode]) -> None:
        """See `EpisodeStore.add`."""
        ray.get(self._desk.add.remote(group_id, [encode(episode) for episode in episodes]))


class RemoteWeights:
    """The published weights as a worker elsewhere sees them: a `WeightSource`."""

    def __init__(self, desk: ray.actor.ActorHandle):
        self._desk = desk

    def latest_version(self) -> int | None:
        """See `PublishedWeights.latest_version`."""
        return ray.get(self._desk.latest_version.remote())

    def load(self) -> tuple[dict[str, np.ndarray], int]:
        """The newest version; asked for again if the desk was started anew meanwhile, as its objects go with it."""
        while True:
            (shared,), version = ray.get(self._desk.weights.remote())
            try:
                return ray.get(shared), version
            except ray.exceptions.ObjectLostError:
                time.sleep(0.1)


class Worker:
    """The actor that plays: `run_worker`, with what it needs from the desk."""

    def __init__(self, desk: ray.actor.ActorHandle, build: Callable[..., tuple[Rollout, Callable]], *arguments: Any):
        """Builds the rollout in the worker's own process.

        Args:
          desk: of the fleet.
          build: (*arguments) -> rollout, and what makes the engine's weights of the published arrays.
          *arguments: its own; objects of the cluster come as what they are.
        """
        self._desk, (self._rollout, self._restore) = desk, build(*arguments)

    def run(self, terms: Terms) -> None:
        """Makes groups until it is killed."""
        store, weights = RemoteStore(self._desk), RemoteWeights(self._desk)
        run_worker(self._rollout, store, weights, terms, should_stop=lambda: False, restore=self._restore)


class Fleet:
    """Workers of one learner, from `start` until `close`, wherever the cluster has room for them.

    Those for which it has none yet wait for a machine to join; those whose machine leaves wait for another.

    Attributes:
      desk: the actor that has the store and the weights open for them.
    """

    def __init__(self, store: EpisodeStore, published: PublishedWeights, vocab_size: int):
        """Starts the desk on this machine, which must be connected to a cluster (`connect`)."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        desk = ray.remote(Desk).options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
        self._store = store
        self.desk = desk.remote(os.path.abspath(store.path), os.path.abspath(published.folder), vocab_size)
        self._running: dict[ray.ObjectRef, tuple[str, Any]] = {}  # run -> name, all that a new life of it needs

    def start(self, terms: Terms, build: Callable[..., Any], *arguments: Any, gpus: float = 0.0) -> None:
        """Starts one worker.

        Args:
          terms: with its name.
          build: see `Worker`; a function of a module that every machine of the cluster can import.
          *arguments: of `build`.
          gpus: that it sees, beside the one core that is set aside for it.
        """
        actor = ray.remote(Worker).options(num_cpus=1, num_gpus=gpus, max_restarts=MAX_RESTARTS, max_task_retries=-1)
        worker = actor.remote(self.desk, build, *arguments)
        self._running[worker.run.remote(terms)] = terms.owner, (worker, arguments)

    def wait(self) -> None:
        """Sleeps a little while any worker is alive; those that an error has ended are warned about.

        Raises:
          RuntimeError: none is left.
        """
        ended, _ = ray.wait(list(self._running), timeout=0.05)
        for run in ended:
            owner, _ = self._running.pop(run)
            try:
                ray.get(run)
            except ray.exceptions.RayError as error:
                log.warning("%s has ended: %s", owner, error)
                if not self._running:
                    raise RuntimeError(f"no rollout worker is left; the last, {owner}, ended by: {error}") from error

    def close(self) -> None:
        """Leaves the cluster, which ends the workers and the desk, and gives back what they had reserved."""
        ray.shutdown()
        for owner, _ in self._running.values():
            self._store.release(owner)


def connect(address: str, *, workers: int, object_bytes: int) -> None:
    """Joins a cluster, of which this machine must be a part, or starts one here.

    Args:
      address: as in "10.0.0.1:6379" or "auto"; empty for a cluster of this machine alone, which ends with this process.
      workers: that it must hold, if it is started here; they may be more than there are cores.
      object_bytes: of the largest object that crosses.

    Raises:
      ValueError: the address is that of a client's port, through which this machine would not be a part of it.
      ConnectionError: no cluster answers there, or it wants a token.
    """
    if address.startswith("ray://"):
        raise ValueError(
            f"ray_address is {address!r}: the learner must run on a machine of the cluster, expected host:port or auto"
        )
    if address:
        try:
            ray.init(address=address, log_to_driver=False)
        except ConnectionError as error:
            raise ConnectionError(
                f"ray_address is {address!r}: no cluster of Ray answers there, or it wants its token: set "
                "RAY_AUTH_MODE=token where that is in ~/.ray/auth_token"
            ) from error
        return
    memory = max(_STORE_BYTES, 6 * object_bytes)
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            ray.init(
                address="local",
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=memory,
                log_to_driver=False,
            )
            return
        except Exception as error:  # Ray raises no narrower one
            if "timed out during startup" not in str(error) or not attempts_left:
                raise
            log.warning("Ray was not up in its 30 seconds; once more")
            ray.shutdown()
