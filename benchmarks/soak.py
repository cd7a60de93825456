"""A run under fire: workers, learner and disk fail at random, and every episode is trained on exactly once.

    python -m benchmarks.soak --minutes=20

Four workers fill the store and a learner takes from it, as in a run, with a scripted policy in the place of the model.
Whenever some more episodes have been stored, a worker or the learner is killed with -9; some workers come back to a
full disk (their files may not grow); and now and then an episode's tool hangs for longer than its worker's lease. At
the end, what the learner's checkpoint says that it trained on is counted: by id, none is missing or there twice.
"""

import collections
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
from absl import app, flags

from mpo_jax.rollout.protocol import Generation
from mpo_jax.rollout.worker import Rollout, Terms, run_groups
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights

MINUTES = flags.DEFINE_float("minutes", 20.0, "How long.", lower_bound=0)
WORKERS = flags.DEFINE_integer("workers", 4, "Workers side by side.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Of what fails when.")
FOLDER = flags.DEFINE_string("folder", None, "Of the run; a temporary one by default.")

GROUP_SIZE, GROUPS_PER_STEP, MAX_PENDING, LEASE, END = 2, 4, 32, 2.0, 0
CHECKPOINT_EVERY = 3  # steps; a kill in between must neither lose nor repeat what they took


class ScriptedEngine:
    """Answers each turn with ids that depend on the episode's seed, as a sampler's would."""

    num_slots, context_length, exact = 4, 64, True

    def __init__(self):
        self.version = 0

    def generate(self, new_tokens, seeds):
        return {slot: Generation([1 + seeds[slot] % 97, END], [-1.0, -0.5], "stop") for slot in new_tokens}

    def free(self, slot):
        pass

    def load(self, params, version):
        self.version = version


class Letters:
    """One id a letter."""

    end_of_turn = END

    def decode(self, ids):
        return "".join(map(chr, ids))

    def render_prompt(self, text, limit=None):
        return [ord(letter) for letter in text[:limit]]

    render_observation = render_prompt


class HangingTool(gymnasium.Env):
    """Two turns; once in a few hundred, the tool takes longer than a worker's lease."""

    def reset(self, *, seed=None, options=None):
        self.turn, self.random = 0, random.Random(os.urandom(8))
        return "go", {"task_id": str(options["task"])}

    def step(self, action):
        self.turn += 1
        time.sleep(2 * LEASE if self.random.random() < 0.003 else 0.002)
        return "on", float(self.turn == 2), self.turn == 2, False, {}


def work(folder: Path, number: int, full_disk: bool) -> None:
    """A worker's life; on a full disk, its files may not grow."""
    if full_disk:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    store, weights = EpisodeStore(folder / "episodes.sqlite", vocab_size=200), PublishedWeights(folder / "weights")
    rollout = Rollout(
        engine=ScriptedEngine(),
        tokenizer=Letters(),
        make_environment=HangingTool,
        task_stream=lambda group_id: {"task": group_id},
        group_size=GROUP_SIZE,
    )
    terms = Terms(owner=f"worker-{number}", lease=LEASE, max_pending=MAX_PENDING, straggler_seconds=LEASE / 2)
    while True:
        if (latest := weights.latest_version()) is not None and latest != rollout.engine.version:
            rollout.engine.load(None, latest)
        if not run_groups(rollout, store, 2, terms):
            time.sleep(0.05)


def learn(folder: Path) -> None:
    """A learner's life: its state is the list of what it trained on, by step."""
    store, weights = EpisodeStore(folder / "episodes.sqlite", vocab_size=200), PublishedWeights(folder / "weights")
    path = folder / "checkpoint.json"
    trained = json.loads(path.read_text())["trained"] if path.exists() else []
    store.rewind(len(trained) - 1)
    while True:
        weights.publish({"w": np.full(1000, len(trained), np.float32)}, len(trained))
        while (groups := store.take(GROUPS_PER_STEP, len(trained))) is None:
            time.sleep(0.02)
        trained.append([episode.episode_id for group in groups for episode in group])
        if len(trained) % CHECKPOINT_EVERY == 0:
            beside = path.with_suffix(".new")
            beside.write_text(json.dumps({"trained": trained}))
            beside.replace(path)


def start(role: Callable, *arguments) -> multiprocessing.Process:
    """A process of its own, forked: it may be killed at any moment and is back at once."""
    process = multiprocessing.get_context("fork").Process(target=role, args=arguments, daemon=True)
    process.start()
    return process


def memory(process: multiprocessing.Process) -> float:
    """MB that a process holds; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * resource.getpagesize() / 2**20


def await_progress(store: EpisodeStore, episodes: int, patience: float = 20.0) -> None:
    """Waits until so many more episodes are stored, or for some seconds."""
    first, deadline = store.count(), time.monotonic() + patience
    while store.count() < first + episodes and time.monotonic() < deadline:
        time.sleep(0.1)


def attack(folder: Path) -> dict[str, float]:
    """Runs everything for the time given and lets it fail; what happened, in numbers."""
    rng, counts = random.Random(SEED.value), collections.Counter()
    learner, workers = start(learn, folder), [start(work, folder, n, False) for n in range(WORKERS.value)]
    store, sizes = EpisodeStore(folder / "episodes.sqlite", read_only=True), []
    deadline, trained_until = time.monotonic() + 60 * MINUTES.value, 0
    try:
        while time.monotonic() < deadline:
            await_progress(store, rng.randint(8, 200))
            sizes.append(memory(learner))
            steps = len(store.steps())
            if rng.random() < 0.2 and steps > trained_until:  # it has trained since it was last killed
                learner.kill()
                counts["learner killed"] += 1
                trained_until = steps
            else:
                rng.choice(workers).kill()
                counts["worker killed"] += 1
            time.sleep(0.1)
            if not learner.is_alive():
                learner = start(learn, folder)
            for number, worker in enumerate(workers):
                if not worker.is_alive():
                    full = rng.random() < 0.25
                    counts["disk full"] += full
                    counts["worker ended by itself"] += (worker.exitcode or 0) > 0
                    workers[number] = start(work, folder, number, full)
    finally:
        for process in (learner, *workers):
            process.kill()
            process.join()
    return counts | {"learner's memory at most, MB": max(sizes, default=0.0)}


def count(folder: Path) -> dict[str, int]:
    """What the checkpoint says was trained on, held against the store.

    Raises:
      AssertionError: an episode is missing, there twice, or in another place than its group's.
    """
    store = EpisodeStore(folder / "episodes.sqlite", read_only=True)
    trained = json.loads((folder / "checkpoint.json").read_text())["trained"]
    stored = collections.Counter(episode.episode_id for episode in store.episodes())
    assert set(stored.values()) == {1}, "an episode is stored twice"
    flat = [episode_id for step in trained for episode_id in step]
    number = len(trained) * GROUPS_PER_STEP
    assert flat == [f"{group:08d}-{member:03d}" for group in range(number) for member in range(GROUP_SIZE)]
    assert set(flat) <= stored.keys(), "an episode was trained on that is not stored"
    assert not store.quarantined()
    return {"steps": len(trained), "episodes trained on": len(flat), "episodes stored": len(stored)}


def main(_):
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(FOLDER.value or temporary)
        EpisodeStore(folder / "episodes.sqlite").close()
        happened = attack(folder)
        print(json.dumps(happened | count(folder)))


if __name__ == "__main__":
    app.run(main)
