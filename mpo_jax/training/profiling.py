"""Where the time of a step goes: seconds by part, and traces of chosen steps."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax


class Stopwatch:
    """Seconds by part of a step, as `seconds_<part>`; in a trace the parts have the same names."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Adds what the block takes; whatever runs on a device must have ended within it."""
        start = time.monotonic()
        with jax.profiler.TraceAnnotation(part):
            yield
        name = f"seconds_{part}"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


def throughput(metrics: Mapping[str, float]) -> dict[str, float]:
    """Tokens of the episodes, and tokens of the rows that they were packed into, by second of the whole step.

    And overlap: the share of the step that was not spent waiting for episodes, while the rollout could run. Only the
    evaluation on fixed questions is not part of the step.
    """
    seconds = metrics["seconds"] - metrics["seconds_evaluation"]
    return {
        "tokens_per_second": metrics["tokens"] / seconds,
        "tokens_per_second_padded": metrics["padded_tokens"] / seconds,
        "overlap": 1 - metrics["seconds_wait"] / seconds,
    }


class Trace:
    """Traces the steps first to last into a folder, for XProf (`xprof FOLDER`) and Perfetto (`perfetto_trace.json.gz`).

    Raises:
      ValueError: no steps, or such as do not exist.
    """

    def __init__(self, folder: Path, first: int, last: int):
        if not 0 <= first <= last:
            raise ValueError(f"profile_steps are {first} to {last}, expected a first and a last step from 0 on")
        self.folder, self.first, self.last = folder, first, last
        self._running = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step of the run: the first of those asked for starts the trace, the last ends it.

        A run that goes on in the middle of them traces the rest.
        """
        if self.first <= number <= self.last and not self._running:
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if number >= self.last:
            self.close()

    def close(self) -> None:
        """Writes what was traced, also where the run ends before the last step."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
