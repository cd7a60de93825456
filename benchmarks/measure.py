"""Measuring in turns: every contestant runs once before any runs again, so that load meets them alike."""

import dataclasses
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compared, by name of the contestant; the first is ours.

    Processor time, not time on the clock: it is the same on an idle and on a busy core, but for the caches.

    Attributes:
      name: of the case.
      contestants: what to run, by name.
      repeats: runs of each, after one that compiles.
      beyond: bytes that a contestant needs at once beyond its inputs and results, by name; found after the runs.
    """

    name: str
    contestants: dict[str, Callable[[], Any]]
    repeats: int
    beyond: dict[str, Callable[[], int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """One contestant: seconds of each run, the median of processor time relative to ours, memory as `Case.beyond`."""

    case: str
    contestant: str
    seconds: list[float]
    wall_seconds: list[float]
    times_ours: float
    beyond: int | None = None


def run(case: Case) -> list[Row]:
    """Warms every contestant up, measures them in turns, compares the medians of processor time with the first's."""
    for contestant in case.contestants.values():
        jax.block_until_ready(contestant())
    seconds, walls = ({name: [] for name in case.contestants} for _ in range(2))
    for _ in range(case.repeats):
        for name, contestant in case.contestants.items():
            processor, wall = time.process_time(), time.perf_counter()
            jax.block_until_ready(contestant())
            seconds[name].append(time.process_time() - processor)
            walls[name].append(time.perf_counter() - wall)
    ours = statistics.median(next(iter(seconds.values())))
    beyond = {name: found() for name, found in case.beyond.items()}
    return [
        Row(case.name, name, seconds[name], walls[name], statistics.median(seconds[name]) / ours, beyond.get(name))
        for name in case.contestants
    ]


def table(rows: list[Row]) -> str:
    """A Markdown table: milliseconds of processor time, median with minimum and maximum, and the ratio of medians."""
    lines = [
        "| case | contestant | ms, median [min, max] | wall ms | × ours | MB beyond inputs and results |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, mid, high = (1e3 * f(row.seconds) for f in (min, statistics.median, max))
        wall = 1e3 * statistics.median(row.wall_seconds)
        beyond = "" if row.beyond is None else f"{row.beyond / 1e6:,.1f}"
        numbers = f"{mid:,.2f} [{low:,.2f}, {high:,.2f}] | {wall:,.2f} | {row.times_ours:,.2f} | {beyond}"
        lines.append(f"| {row.case} | {row.contestant} | {numbers} |")
    return "\n".join(lines)


def machine() -> str:
    """Processor, cores in use, load and versions, in a line."""
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
    model = next((x.split(":")[1].strip() for x in cpuinfo.splitlines() if x.startswith("model name")), "unknown")
    load = "/".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"{model}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, load {load} (1/5/15 minutes), "
        f"Python {platform.python_version()}, jax {jax.__version__}, on {jax.default_backend()}"
    )
