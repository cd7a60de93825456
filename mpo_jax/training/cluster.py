"""The devices of a run: its mesh, and the processes that share it and must do the same at the same time."""

import contextlib
import dataclasses
import functools
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from mpo_jax.training import sharding

_CONNECTION = re.compile(r"gloo|coordination|heartbeat|connection (reset|closed|refused)|unavailable", re.IGNORECASE)
SUMS = ("episodes", "tokens", "failed_environments", "deadlines_passed")  # metrics that add up over processes


class ProcessLost(RuntimeError):
    """Another process of the run is gone, hangs, or does something else."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where a run computes. Every process has episodes of its own and takes the same steps.

    Attributes:
      mesh: over the devices of all processes; None for one device.
      patience: seconds that processes with a batch wait for those without, which then take part with empty rows.
      timeout: seconds without an answer after which another process counts as lost, though it may live.
    """

    mesh: Mesh | None = None
    patience: float = 60.0
    timeout: float = 600.0

    def __post_init__(self):
        if self.count > 1 and self.mesh is None:
            raise ValueError(f"{self.count} processes without a mesh: each would train a model of its own")
        if self.mesh is not None:
            self._check_rows()

    def _check_rows(self) -> None:
        """A process gives rows to devices of its own only, as many as every other."""
        by_rows = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index("tensor"), -1)
        by_rows = by_rows.reshape(-1, self.mesh.shape["tensor"])
        owners = [{device.process_index for device in group} for group in by_rows]
        if any(len(group) > 1 for group in owners):
            raise ValueError(f"mesh axis tensor={self.mesh.shape['tensor']} crosses processes: keep it within one")
        rows = [sum(group == {process} for group in owners) for process in range(self.count)]
        if len(set(rows)) > 1:
            raise ValueError(f"processes have {rows} of the mesh's places for rows, expected as many each")

    @property
    def count(self) -> int:
        """How many processes there are."""
        return jax.process_count()

    @property
    def index(self) -> int:
        """Which of them this is."""
        return jax.process_index()

    @property
    def row_shards(self) -> int:
        """Among how many devices the rows of a batch are divided."""
        return 1 if self.mesh is None else sharding.row_shards(self.mesh)

    def on_mesh(self, function: Callable) -> Callable:
        """The function, called with the mesh in use."""
        if self.mesh is None:
            return function

        @functools.wraps(function)
        def call(*arguments):
            with jax.set_mesh(self.mesh):
                return function(*arguments)

        return call

    def place_state(self, state: Any) -> Any:
        """A state that every process holds whole, laid out on the mesh."""
        return self.on_mesh(sharding.place_state)(state)

    def place_rows(self, batch: Any) -> Any:
        """A batch on the mesh, of which this process gives its own rows."""
        return self.on_mesh(sharding.place_rows)(batch)

    def whole(self, params: Any) -> Any:
        """Parameters that a computation of this process alone can use; all processes must ask."""
        return params if self.mesh is None else jax.tree.map(np.asarray, sharding.gathered(params))

    def agree(self, **numbers: int | float) -> dict[str, np.ndarray]:
        """What every process says, each number float64[processes]; returns when all have spoken.

        Raises:
          ProcessLost: one did not within `timeout` seconds, or its connection broke.
        """
        said = np.array(list(numbers.values()), np.float64)
        if self.count == 1:
            return dict(zip(numbers, said[:, None], strict=True))
        answer: queue.SimpleQueue = queue.SimpleQueue()

        def ask() -> None:
            try:  # as bytes, since devices have no float64
                answer.put(multihost_utils.process_allgather(said.view(np.uint8)))
            except Exception as error:
                answer.put(error)

        threading.Thread(target=ask, daemon=True).start()
        try:
            found = answer.get(timeout=self.timeout)
        except queue.Empty:
            raise ProcessLost(
                f"process {self.index} of {self.count}: not every other answered within {self.timeout:g} s"
            ) from None
        if isinstance(found, Exception):
            raise ProcessLost(f"process {self.index} of {self.count}: another is gone: {found}") from found
        return dict(zip(numbers, np.asarray(found).view(np.float64).T, strict=True))

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Around what all processes compute together.

        Raises:
          ProcessLost: in place of the runtime's error where a connection between processes broke.
        """
        try:
            yield
        except ProcessLost:
            raise
        except Exception as error:  # the runtime's are of many types
            if self.count > 1 and _CONNECTION.search(str(error)):
                raise ProcessLost(f"process {self.index} of {self.count}: another is gone: {error}") from error
            raise

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(self.agree(flag=flag)["flag"].any())

    def all(self, flag: bool) -> bool:
        """Whether every process says so."""
        return bool(self.agree(flag=flag)["flag"].all())

    def in_turn(self, act: Callable[[], None]) -> None:
        """Calls it in the first process, and then in the others."""
        if self.index == 0:
            act()
        self.agree(done=True)
        if self.index > 0:
            act()

    def combined(self, metrics: Mapping[str, int | float]) -> dict[str, float]:
        """Metrics of each process's episodes as metrics of all: sums, maxima, or means weighted by episodes."""
        if self.count == 1:
            return dict(metrics)
        said = self.agree(**metrics)
        weights = said["episodes"]

        def combine(name: str, values: np.ndarray) -> float:
            if name in SUMS:
                return values.sum()
            if name.endswith("_max"):
                return values.max()
            return np.sum(np.where(weights > 0, values * weights, 0)) / max(weights.sum(), 1)

        return {name: combine(name, values) for name, values in said.items()}

    def take(
        self,
        take: Callable[[], Sequence | None],
        wait: Callable[[], None],
        should_stop: Callable[[], bool],
        step: int,
    ) -> Sequence | None:
        """This process's part of a batch, when all processes have theirs.

        Args:
          take: gives it, or None while it is not there.
          wait: called while it is not there.
          should_stop: whether to stop rather than wait; asked while it is not there.
          step: of the batch.

        Returns:
          The part, empty where this process has none while others have waited for `patience` seconds; None where one
          without was told to stop.

        Raises:
          ProcessLost: a process is gone, or at another step.
        """
        part, since = None, None
        while True:
            part = take() if part is None else part
            waited = 0.0 if since is None else time.monotonic() - since
            stop = part is None and should_stop()
            said = self.agree(step=step, ready=part is not None, waited=waited, stop=stop)
            if part is not None and since is None:
                since = time.monotonic()  # all have come by now
            if len(set(said["step"])) > 1:
                raise ProcessLost(f"processes are at steps {said['step'].astype(int).tolist()}, expected the same")
            if said["ready"].all() or said["waited"].max() > self.patience:
                return part or []
            if said["stop"].any():
                return None
            (wait if part is None else functools.partial(time.sleep, 0.05))()
