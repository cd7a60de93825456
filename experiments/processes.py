"""Several processes of one run: how they find each other, and which part of the episodes each of them makes."""

import contextlib
import copy
import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_collections

from mpo_jax.training.cluster import ProcessLost

FAREWELL = 3.0  # seconds that process 0, without whose service jax aborts the others, leaves them to say the same


def join(coordinator: str | None, num_processes: int | None, process_id: int | None, timeout: float) -> None:
    """Joins the other processes of the run, before anything else touches a device.

    Args:
      coordinator: host:port of process 0; "auto" takes it and the numbers from the cluster's environment (Slurm, Open
        MPI, Kubernetes, Cloud TPU); None, no others.
      num_processes, process_id: how many there are, and which this is.
      timeout: seconds after which a process that gives no sign of life is lost, and the others end.

    Raises:
      ValueError: a number without a coordinator, or a coordinator without both.
    """
    numbers = {"num_processes": num_processes, "process_id": process_id}
    given = {name: number for name, number in numbers.items() if number is not None}
    if coordinator in (None, "auto") and given:
        raise ValueError(f"{given} with coordinator={coordinator}, expected host:port of process 0")
    if coordinator is None:
        return
    if coordinator != "auto" and len(given) < 2:
        raise ValueError(f"coordinator={coordinator} with {numbers}, expected both")
    try:
        jax.distributed.initialize(
            None if coordinator == "auto" else coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=int(timeout),
            shutdown_timeout_seconds=int(timeout),
        )
    except ValueError as error:
        known = "; auto knows Slurm, Open MPI, Kubernetes and Cloud TPU by their environment variables"
        raise ValueError(f"coordinator={coordinator} with {numbers}: {error}{known}") from error


@contextlib.contextmanager
def ended_at_once() -> Iterator[None]:
    """Of several processes, ends one that fails, or that has lost another, at once; its last line says why.

    Nothing is closed: writing out a checkpoint, or leaving `jax.distributed`, would wait for the others.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        if not isinstance(error, ProcessLost):
            traceback.print_exception(error)
        print(f"{error}\nThe same command goes on from the last checkpoint.", file=sys.stderr, flush=True)
        if jax.process_index() == 0:
            time.sleep(FAREWELL)
        os._exit(1)


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a run's episodes that a process makes and trains on: every `count`-th group from `index` on."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Share":
        """Of a text such as "0/2".

        Raises:
          ValueError: it is none.
        """
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise ValueError(f"share={text!r}, expected index/count such as 0/2, the index below the count")
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def home(self, workdir: Path) -> Path:
        """Where the process keeps its episodes, its metrics and its logs: the run's folder, or one within it."""
        return workdir if self.index == 0 else workdir / f"process_{self.index}"

    def part(self, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
        """The run's config with this process's groups.

        Raises:
          ValueError: the groups cannot be divided.
        """
        mine = copy.deepcopy(config)
        for name in ("groups_per_step", "max_pending_groups"):
            if config[name] % self.count:
                raise ValueError(f"{name}={config[name]} cannot be divided among {self.count} processes")
            mine[name] = config[name] // self.count
        return mine
