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

from mpo_jax.rollout.agent import run_episodes
from mpo_jax.rollout.conversation import Job, Limits, derive_seed, whole_action
from mpo_jax.rollout.protocol import Engine, GroupStore, Tokenizer, WeightSource
from mpo_jax.store.admission import Admission
from mpo_jax.store.episode import Episode

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
      threads: in which environments reset and step; 0: in the loop itself, while the engine waits.
      share: (index, count) of the processes that divide the run's groups, each with a store of its own: the group that
        this one calls g is number g · count + index of the run, which decides over its task and seeds.
      resting: environments that are used again in the next round, as some take long to start; `close` ends them.
    """

    engine: Engine
    tokenizer: Tokenizer
    make_environment: Callable[[], gymnasium.Env]
    task_stream: Callable[[int], Mapping[str, Any]]
    group_size: int
    seed: int = 0
    limits: Limits = dataclasses.field(default_factory=Limits)
    executable: Callable[[list[int]], list[bool]] = whole_action
    threads: int = 0
    share: tuple[int, int] = (0, 1)
    resting: list[gymnasium.Env] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def close(self) -> None:
        """Closes the environments that rest."""
        while self.resting:
            self.resting.pop().close()

    def jobs(self, group_id: int) -> list[Job]:
        """The episodes of one group, which is begun now."""
        seconds = self.limits.group_seconds
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        index, count = self.share
        number = group_id * count + index
        return [
            Job(
                episode_id=f"{number:08d}-{member:03d}",
                group_id=group_id,
                options=self.task_stream(number),
                environment_seed=derive_seed(self.seed, number),
                seed=derive_seed(self.seed, number, member),
                deadline=deadline,
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
            threads=self.threads,
            resting=self.resting,
            should_stop=should_stop,
        )


@dataclasses.dataclass(frozen=True)
class Terms:
    """On what terms a worker makes groups.

    Attributes:
      owner: its name in the store, unlike that of any other worker and kept over restarts.
      lease: seconds that a reservation outlives its producer; renewed between turns.
      admission: which groups it may begin; the version is set to the engine's.
      in_flight: take new weights while episodes run.
      poll: seconds of a sleep while there is nothing to do.
    """

    owner: str = "worker-0"
    lease: float = 120.0
    admission: Admission = Admission()
    in_flight: bool = False
    poll: float = 0.2


def run_groups(
    rollout: Rollout,
    store: GroupStore,
    num_groups: int,
    terms: Terms = Terms(),
    *,
    refresh: Callable[[], None] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Makes the next groups that nobody has stored or is making, and stores each as soon as it is whole.

    A group is begun when a slot is free for it, with the weights of that moment.

    Args:
      rollout: how.
      store: where they are reserved and stored.
      num_groups: how many; fewer where none may be begun or it was told to stop.
      terms: on what terms; the owner holds no reservations afterwards.
      refresh: called before each call of the engine, to give it new weights while episodes run.
      should_stop: asked before each turn; groups that are not whole by then are given up.

    Returns:
      The number of groups made.

    Raises:
      ValueError: the engine does not sample from the policy itself, so that its log-probabilities cannot be trained on.
    """
    if not rollout.engine.exact:
        raise ValueError("the engine's decoding is not the policy's own (temperature 1, nothing cut off): no training")
    made, whole, renew_at = 0, defaultdict[int, list[Episode]](list), time.monotonic() + terms.lease / 3

    def keep_alive() -> bool:
        nonlocal renew_at
        if time.monotonic() >= renew_at:
            store.renew(terms.owner, terms.lease)
            renew_at = time.monotonic() + terms.lease / 3
        refresh()
        return should_stop()

    making: set[int] = set()
    store.release(terms.owner)  # of an earlier life that was killed
    try:
        for episode in rollout.run(_reserve(rollout, store, num_groups, terms, making), keep_alive):
            group = whole[episode.group_id]
            group.append(episode)
            if len(group) == rollout.group_size:
                store.add(episode.group_id, sorted(whole.pop(episode.group_id), key=lambda e: e.episode_id))
                making.discard(episode.group_id)
                made += 1
    finally:
        store.release(terms.owner)
    return made


def _reserve(
    rollout: Rollout, store: GroupStore, num_groups: int, terms: Terms, making: set[int]
) -> Iterator[int | None]:
    """Indices of groups that may be begun, which join those in the making; ends where there are none of either.

    None says that there is none for now, but some are being made.
    """
    for _ in range(num_groups):
        while True:
            admission = dataclasses.replace(terms.admission, version=rollout.engine.version)
            group_id = store.reserve(terms.owner, terms.lease, admission)
            if group_id is not None and group_id not in making:  # ours may be given out again, after a long turn
                break
            if not making:
                return
            yield None
        making.add(group_id)
        yield group_id


def run_worker(
    rollout: Rollout,
    store: GroupStore,
    weights: WeightSource,
    terms: Terms,
    *,
    should_stop: Callable[[], bool],
    restore: Callable[[dict[str, np.ndarray]], Any] = lambda params: params,
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
      terms: on what terms.
      should_stop: asked before each turn and while sleeping.
      restore: makes what the engine loads of the published arrays.
      parent: process id of the learner that started this one: it stops when that is gone.
    """
    round_size = sys.maxsize if terms.in_flight else math.ceil(rollout.engine.num_slots / rollout.group_size)

    def stopped() -> bool:
        return should_stop() or (parent is not None and os.getppid() != parent)

    def refresh() -> None:
        latest = weights.latest_version()
        if latest is not None and latest != rollout.engine.version:
            params, version = weights.load()
            rollout.engine.load(restore(params), version)
            log.info("rollout with weights of version %d", version)

    with contextlib.closing(rollout):
        while not stopped():
            refresh()
            made = 0
            if weights.latest_version() is not None:
                during = refresh if terms.in_flight else lambda: None
                made = run_groups(rollout, store, round_size, terms, refresh=during, should_stop=stopped)
            if not made:
                time.sleep(terms.poll)


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
