"""The rollout worker: fills the episode store with groups, with the newest published weights.

One function makes groups (`run_groups`); the learner calls it in its own process, the worker calls it in a loop.
"""

import contextlib
import dataclasses
import logging
import math
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np

from mpo_jax.rollout.agent import Job, Limits, derive_seed, run_episodes, whole_action
from mpo_jax.rollout.protocol import Engine, Tokenizer
from mpo_jax.store.admission import Admission
from mpo_jax.store.episode import Episode
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """How groups are made: the same in the worker's process and in the learner's.

    Attributes:
      engine: samples; its `version` is that of its weights.
      tokenizer: the engine's.
      make_environment: a new gymnasium environment of text.
      task_stream: group index to the options of the environment's reset; deterministic.
      group_size: episodes of one task.
      seed: of the run; every episode's own is derived from it, its group and its place there.
      limits: where episodes are cut.
      executable: marks the part of an action's ids that the environment executes.
    """

    engine: Engine
    tokenizer: Tokenizer
    make_environment: Callable[[], gymnasium.Env]
    task_stream: Callable[[int], Mapping[str, Any]]
    group_size: int
    seed: int = 0
    limits: Limits = dataclasses.field(default_factory=Limits)
    executable: Callable[[list[int]], list[bool]] = whole_action

    def jobs(self, group_id: int) -> list[Job]:
        """The episodes of one group."""
        return [
            Job(
                episode_id=f"{group_id:08d}-{member:03d}",
                group_id=group_id,
                options=self.task_stream(group_id),
                environment_seed=derive_seed(self.seed, group_id),
                seed=derive_seed(self.seed, group_id, member),
            )
            for member in range(self.group_size)
        ]

    def run(self, group_ids: Iterable[int | None], should_stop: Callable[[], bool]) -> Iterator[Episode]:
        """Runs the groups' episodes and yields each as it ends; an index of None says: none for now."""
        return run_episodes(
            self.engine,
            self.tokenizer,
            self.make_environment,
            (job for group_id in group_ids for job in ([None] if group_id is None else self.jobs(group_id))),
            limits=self.limits,
            executable=self.executable,
            should_stop=should_stop,
        )


def run_groups(
    rollout: Rollout,
    store: EpisodeStore,
    num_groups: int,
    *,
    owner: str = "inline",
    lease: float = 120.0,
    max_pending: int | None = None,
    admission: Admission | None = None,
    refresh: Callable[[], None] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Makes the next groups that nobody has stored or is making, and stores each as soon as it is whole.

    A group is begun when a slot is free for it, with the weights of that moment.

    Args:
      rollout: how.
      store: where they are reserved and stored.
      num_groups: how many; fewer where `max_pending` is reached or it was told to stop.
      owner: the producer's name in the store; it holds no reservations afterwards.
      lease: seconds that a reservation outlives its producer; renewed between turns.
      max_pending: the store's back-pressure, None for none.
      admission: the bound on staleness; its version is set to the engine's.
      refresh: called before each call of the engine, to give it new weights while episodes run.
      should_stop: asked before each turn; groups that are not whole by then are given up.

    Returns:
      The number of groups stored.

    Raises:
      ValueError: the engine does not sample from the policy itself, so that its log-probabilities cannot be trained on.
    """
    if not rollout.engine.exact:
        raise ValueError("the engine's decoding is not the policy's own (temperature 1, nothing cut off): no training")
    stored, whole, renew_at = 0, defaultdict[int, list[Episode]](list), time.monotonic() + lease / 3

    def keep_alive() -> bool:
        nonlocal renew_at
        if time.monotonic() >= renew_at:
            store.renew(owner, lease)
            renew_at = time.monotonic() + lease / 3
        refresh()
        return should_stop()

    def reserve() -> Iterator[int | None]:
        """Group indices, or None while there is none but some of ours are being made; ends where there is nothing."""
        for _ in range(num_groups):
            while (group_id := _reserve(rollout, store, owner, lease, max_pending, admission)) is None:
                if not making:
                    return
                yield None
            making.add(group_id)
            yield group_id

    making: set[int] = set()
    store.release(owner)  # of an earlier life that was killed
    try:
        for episode in rollout.run(reserve(), keep_alive):
            group = whole[episode.group_id]
            group.append(episode)
            if len(group) == rollout.group_size:
                store.add(episode.group_id, sorted(whole.pop(episode.group_id), key=lambda e: e.episode_id))
                making.discard(episode.group_id)
                stored += 1
    finally:
        store.release(owner)
    return stored


def _reserve(
    rollout: Rollout,
    store: EpisodeStore,
    owner: str,
    lease: float,
    max_pending: int | None,
    admission: Admission | None,
) -> int | None:
    """The next index that may be begun with the engine's weights."""
    if admission is not None:
        admission = dataclasses.replace(admission, version=rollout.engine.version)
    return store.reserve(owner, lease, max_pending=max_pending, admission=admission)


def run_worker(
    rollout: Rollout,
    store: EpisodeStore,
    weights: PublishedWeights,
    *,
    max_pending_groups: int,
    admission: Admission | None = None,
    in_flight: bool = False,
    should_stop: Callable[[], bool],
    owner: str = "worker-0",
    restore: Callable[[dict[str, np.ndarray]], Any] = lambda params: params,
    poll: float = 0.2,
    parent: int | None = None,
) -> None:
    """Makes groups until told to stop, with the newest published weights.

    Before the first version is published, and while no group may be begun, it sleeps. Weights change between rounds,
    each of which fills the engine's slots once; or, `in_flight`, as soon as they are published, while episodes run, and
    then a free slot waits for no other. A turn's version is that of the oldest weights that sampled any of it.

    Args:
      rollout: how groups are made.
      store: where they go.
      weights: where the learner publishes.
      max_pending_groups: back-pressure over all workers; at least as many as the learner takes at once.
      admission: the bound on staleness, None for none.
      in_flight: take new weights while episodes run.
      should_stop: asked before each turn and while sleeping.
      owner: this worker's name, unlike that of any other and kept over restarts.
      restore: makes what the engine loads of the published arrays.
      poll: seconds of a sleep.
      parent: process id of the learner that started this one: it stops when that is gone.
    """
    round_size = sys.maxsize if in_flight else math.ceil(rollout.engine.num_slots / rollout.group_size)

    def stopped() -> bool:
        return should_stop() or (parent is not None and os.getppid() != parent)

    def refresh() -> None:
        latest = weights.latest_version()
        if latest is not None and latest != rollout.engine.version:
            params, version = weights.load()
            rollout.engine.load(restore(params), version)
            log.info("rollout with weights of version %d", version)

    while not stopped():
        refresh()
        stored = 0
        if weights.latest_version() is not None:
            stored = run_groups(
                rollout,
                store,
                round_size,
                owner=owner,
                max_pending=max_pending_groups,
                admission=admission,
                refresh=refresh if in_flight else lambda: None,
                should_stop=stopped,
            )
        if not stored:
            time.sleep(poll)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Gives a `should_stop` that turns true on SIGINT or SIGTERM; a second signal acts as it did before."""
    told = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def tell(number: int, frame: Any) -> None:
        told.set()
        restore()

    for number in before:
        signal.signal(number, tell)
    try:
        yield told.is_set
    finally:
        restore()
