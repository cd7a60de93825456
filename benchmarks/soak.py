"""A run under fire: workers, learner and disk fail at random, and every episode is trained on exactly once.

    python -m benchmarks.soak --minutes=20

Four workers fill the store and a learner takes from it, as in a run, with a scripted policy in the place of the model.
Whenever some more groups have been stored, a worker or the learner is killed with -9; some come back to a full disk
(their files may not grow beyond a random size); and now and then an episode's tool hangs for longer than its worker's
lease, or, in a process of its own, than it may. The store has no process: whoever has its file open may be killed in
the middle of a commit. At the end, what the learner's checkpoint says that it trained on is counted: by id, none is
missing or there twice. So that a leak would show, the last worker is spared, and the learner in the second half.

With `--ray` the workers are actors on Ray, and the desk, the process that has the store open for them, is killed too.
"""

import collections
import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from absl import app, flags

from benchmarks.soak_roles import GROUP_SIZE, GROUPS_PER_STEP, host, learn, work
from mpo_jax.store.sqlite import EpisodeStore

MINUTES = flags.DEFINE_float("minutes", 20.0, "How long.", lower_bound=0)
WORKERS = flags.DEFINE_integer("workers", 4, "Workers side by side.", lower_bound=2)
SEED = flags.DEFINE_integer("seed", 0, "Of what fails when.")
RAY = flags.DEFINE_bool("ray", False, "Workers on a Ray cluster of this machine.")
FOLDER = flags.DEFINE_string("folder", None, "Of the run; a temporary one by default.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "Folder of the table.")

ROLES = {"learn": "learner", "work": "worker", "desk": "desk"}
DEADLOCK_SECONDS = 60.0  # without a step or a stored group, after which all is taken to stand still


def start(role: Callable, *arguments) -> multiprocessing.Process:
    """A process of its own, forked: it may be killed at any moment and is back at once."""
    process = multiprocessing.get_context("fork").Process(target=role, args=arguments, name=role.__name__)
    process.start()
    return process


@dataclasses.dataclass(frozen=True)
class Actor:
    """A process that Ray starts anew by itself; a file says which it is at the moment."""

    file: Path
    name: str

    @property
    def pid(self) -> int:
        return int(self.file.read_text() or 0) if self.file.exists() else 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid or 2**22, signal.SIGKILL)  # no process has that number

    def is_alive(self) -> bool:
        return True

    def join(self) -> None:
        pass


def memory(process: multiprocessing.Process | Actor) -> float:
    """MB that a process holds; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * resource.getpagesize() / 2**20


class Attack:
    """All processes of the run, and what has happened to them."""

    def __init__(self, folder: Path, seed: int, workers: int, ray: bool):
        self.folder, self.random, self.happened = folder, random.Random(seed), collections.Counter()
        self.learner = start(learn, folder, None)
        self.host = start(host, folder, workers) if ray else None
        if ray:
            self.workers = [Actor(folder / "desk.pid", "desk")]
            self.workers += [Actor(folder / f"worker-{number}.pid", "work") for number in range(workers)]
        else:
            self.workers = [start(work, folder, number, None) for number in range(workers)]
        self.seen, self.seen_at, self.longest_wait = (0, 0), time.monotonic(), 0.0

    def look(self) -> tuple[int, int]:
        """The highest stored group and the learner's next step.

        Raises:
          AssertionError: nothing moves any more.
        """
        # Closed again before anybody is forked: what SQLite knows of its locks must not be inherited.
        with contextlib.closing(EpisodeStore(self.folder / "episodes.sqlite", read_only=True)) as store:
            now, seen = time.monotonic(), (store.last_group() or 0, store.next_step())
        self.longest_wait = max(self.longest_wait, now - self.seen_at)
        assert now - self.seen_at < DEADLOCK_SECONDS, f"nothing moves any more at group and step {seen}"
        if seen != self.seen:
            self.seen, self.seen_at = seen, now
        return seen

    def await_groups(self, number: int, deadline: float) -> None:
        """Waits until so many more groups are stored, or for some seconds; whoever has gone is started anew."""
        first, patience = self.look()[0], min(time.monotonic() + 20, deadline)
        while self.look()[0] < first + number and time.monotonic() < patience:
            self.revive()
            time.sleep(0.1)

    def strike(self, spare_learner: bool) -> None:
        """Kills one of those that are not spared."""
        if not spare_learner and self.random.random() < 0.2:
            victim = self.learner
        else:
            victim = self.random.choice(self.workers[:-1])
        victim.kill()
        self.happened[f"{ROLES[victim.name]} killed"] += 1

    def revive(self) -> None:
        """Starts anew whoever has gone, some of them on a full disk."""
        if not self.learner.is_alive():
            self.learner = start(learn, self.folder, self._disk(self.learner))
        for number, worker in enumerate(self.workers):
            if not worker.is_alive():
                self.workers[number] = start(work, self.folder, number, self._disk(worker))

    def _disk(self, gone: multiprocessing.Process) -> int | None:
        gone.join()
        self.happened[f"{ROLES[gone.name]} ended by itself"] += gone.exitcode > 0
        if self.random.random() >= 0.25:
            return None
        self.happened["disk full"] += 1
        return self.random.choice([4096, self.random.randrange((self.folder / "episodes.sqlite").stat().st_size)])

    def close(self) -> None:
        """Ends all."""
        if self.host is not None:
            self.host.terminate()  # which takes the cluster with it
            self.host.join()
        for process in (self.learner, *self.workers):
            process.kill()
            process.join()


def run(folder: Path, minutes: float) -> tuple[dict[str, float], list[tuple[float, ...]]]:
    """Lets everything run for the time given, and fail; what happened, and (minute, MB of …) over time."""
    attack, begun, sizes = Attack(folder, SEED.value, WORKERS.value, RAY.value), time.monotonic(), []
    deadline, trained_until = begun + 60 * minutes, 0
    try:
        while (now := time.monotonic()) < deadline:
            attack.await_groups(attack.random.randint(4, 100), deadline)
            file = (folder / "episodes.sqlite").stat().st_size / 2**20
            sizes.append(((now - begun) / 60, memory(attack.learner), memory(attack.workers[-1]), file))
            _, steps = attack.look()  # a learner is killed only if it has trained since the last time
            attack.strike(spare_learner=now > (begun + deadline) / 2 or steps <= trained_until)
            trained_until = max(trained_until, steps) if not attack.learner.is_alive() else trained_until
            time.sleep(0.1)  # until it is gone
    finally:
        attack.close()
    return dict(attack.happened) | {"seconds without any progress, at most": attack.longest_wait}, sizes


def count(folder: Path) -> dict[str, int]:
    """What the checkpoint says was trained on, held against the store.

    Raises:
      AssertionError: an episode is missing, there twice, or in another place than its group's.
    """
    store = EpisodeStore(folder / "episodes.sqlite", read_only=True)
    steps, size = json.loads((folder / "checkpoint.json").read_text())
    trained = [json.loads(line) for line in (folder / "trained.jsonl").read_bytes()[:size].splitlines()]
    stored, hung = collections.Counter(), 0
    for episode in store.episodes():
        stored[episode.episode_id] += 1
        hung += "did not answer" in episode.metadata.get("error", "")
    flat = [episode_id for step in trained for episode_id in step]
    expected = [f"{g:08d}-{m:03d}" for g in range(steps * GROUPS_PER_STEP) for m in range(GROUP_SIZE)]
    found = {
        "steps": steps,
        "episodes stored": len(stored),
        "episodes trained on": len(flat),
        "lost": len(set(expected) - set(flat)),
        "trained on twice": len(flat) - len(set(flat)),
        "stored twice": sum(number > 1 for number in stored.values()),
        "trained on but not stored": len(set(flat) - stored.keys()),
        "quarantined": len(store.quarantined()),
        "isolated tools that hung": hung,
    }
    wrong = ("lost", "trained on twice", "stored twice", "trained on but not stored", "quarantined")
    assert not any(found[name] for name in wrong) and flat == expected, found
    return found


def table(happened: dict[str, float], sizes: list[tuple[float, ...]]) -> str:
    """What happened, and memory at five moments, in Markdown."""
    lines = [
        "| what | number |",
        "|---|---|",
        *(f"| {name} | {round(value, 1):,} |" for name, value in happened.items()),
    ]
    lines += ["", "| minute | learner, MB | spared worker, MB | store's file, MB |", "|---|---|---|---|"]
    moments = sorted({round(i * (len(sizes) - 1) / 8) for i in range(9)})
    return "\n".join(lines + [f"| {' | '.join(f'{value:.1f}' for value in sizes[i])} |" for i in moments])


def main(_):
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(FOLDER.value or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        EpisodeStore(folder / "episodes.sqlite").close()
        happened, sizes = run(folder, MINUTES.value)
        happened |= count(folder)
    print(json.dumps(happened))
    output = Path(OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    said = f"`python -m benchmarks.soak --minutes={MINUTES.value:g} --workers={WORKERS.value} --seed={SEED.value}"
    said += " --ray`" if RAY.value else "`"
    name = "soak_ray.md" if RAY.value else "soak.md"
    (output / name).write_text(f"{said}\n\n{table(happened, sizes)}\n")


if __name__ == "__main__":
    app.run(main)
