"""Where numbers go: one JSON line a step, TensorBoard, and the progress bar that a person watches."""

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from tensorboardX import SummaryWriter
from tqdm import tqdm

from mpo_jax.training.profiling import Trace


class MetricsLog:
    """Writes the metrics of a run; a resumed run goes on in the same files, its repeated steps taken out.

    Args:
      folder: of the run.
      total_steps, first_step: of the bar; rows from `first_step` on are taken out.
      quiet: no bar.
      trace: of some steps, if wanted.
      utilisation: (tokens of an episode, tokens a second) -> MFU, where the peak of the devices is known.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        first_step: int = 0,
        quiet: bool = False,
        trace: Trace | None = None,
        utilisation: Callable[[float, float], float] | None = None,
    ):
        self.path, self._trace, self._utilisation = folder / "metrics.jsonl", trace, utilisation
        kept = [row for row in read_metrics(self.path) if row["step"] < first_step]
        beside = self.path.with_suffix(".new")
        beside.write_text("".join(json.dumps(row) + "\n" for row in kept))
        beside.replace(self.path)  # so that a kill at this moment loses nothing
        self._file = self.path.open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        self._bar = tqdm(total=total_steps, initial=first_step, unit="step", disable=quiet, dynamic_ncols=True)

    def traced(self, step: int) -> AbstractContextManager:
        """Around a step: traces it, if it is one of those asked for."""
        return contextlib.nullcontext() if self._trace is None else self._trace.step(step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step; what is not finite is written as null."""
        row = {name: float(value) for name, value in metrics.items()}
        if self._utilisation is not None and "tokens_per_second" in row:
            row["mfu"] = self._utilisation(row["tokens"] / row["episodes"], row["tokens_per_second"])
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        for name, value in finite.items():
            if value is not None:
                self._board.add_scalar(name, value, step)
        shown = ("success", "return", "entropy", "tokens_per_second")
        self._bar.set_postfix_str(" ".join(f"{name}={row[name]:.3g}" for name in shown if name in row))
        self._bar.update(min(step + 1, self._bar.total) - self._bar.n)

    def close(self) -> None:
        """Flushes everything."""
        if self._trace is not None:
            self._trace.close()
        self._file.close()
        self._board.close()
        self._bar.close()


def read_metrics(path: Path) -> list[dict[str, int | float | None]]:
    """The rows of a `metrics.jsonl`, the last of which may have been cut off by a kill."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
