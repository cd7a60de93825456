"""Who takes part in the soak: workers with a scripted policy, a learner that notes its episodes, a tool that hangs."""

import json
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np

from mpo_jax.environments.isolated import IsolatedEnvironment
from mpo_jax.rollout.protocol import Generation
from mpo_jax.rollout.worker import Rollout, Terms, run_groups
from mpo_jax.store.admission import Admission
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights

GROUP_SIZE, GROUPS_PER_STEP, MAX_PENDING, LEASE, VOCABULARY, END = 2, 4, 32, 2.0, 200, 0
CHECKPOINT_EVERY = 3  # steps; a kill in between must neither lose nor repeat what they took
TOOL_SECONDS = 0.5  # that a tool in a process of its own may take: less than after which others help out


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
    """Two turns; once in a few hundred, the tool takes longer than a worker's lease and an isolated one's time."""

    def reset(self, *, seed=None, options=None):
        self.turn, self.random = 0, random.Random(os.urandom(8))
        return "go", {"task_id": str(options["task"])}

    def step(self, action):
        self.turn += 1
        time.sleep(2 * LEASE if self.random.random() < 0.003 else 0.02)
        return "on", float(self.turn == 2), self.turn == 2, False, {}


def isolated_tool() -> IsolatedEnvironment:
    """The same in a process of its own, which is given up when it hangs."""
    return IsolatedEnvironment("benchmarks.soak_roles:HangingTool", seconds=TOOL_SECONDS)


def fill_disk(limit: int | None) -> None:
    """From here on, no file of this process can be written beyond so many bytes."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def open_run(folder: Path) -> tuple[EpisodeStore, PublishedWeights]:
    """What the roles share."""
    return EpisodeStore(folder / "episodes.sqlite", vocab_size=VOCABULARY), PublishedWeights(folder / "weights")


def make_rollout(isolated: bool) -> Rollout:
    """Groups of a scripted policy."""
    return Rollout(
        engine=ScriptedEngine(),
        tokenizer=Letters(),
        make_environment=isolated_tool if isolated else HangingTool,
        task_stream=lambda group_id: {"task": group_id},
        group_size=GROUP_SIZE,
    )


def make_terms(number: int) -> Terms:
    """Of the worker of a number."""
    bound = Admission(max_pending=MAX_PENDING, straggler_seconds=LEASE / 2)
    return Terms(owner=f"worker-{number}", lease=LEASE, admission=bound)


def work(folder: Path, number: int, disk: int | None) -> None:
    """A worker's life; the first one's tools are isolated."""
    store, weights = open_run(folder)
    rollout, terms = make_rollout(isolated=number == 0), make_terms(number)
    fill_disk(disk)
    while True:
        if (latest := weights.latest_version()) is not None and latest != rollout.engine.version:
            rollout.engine.load(None, latest)
        if not run_groups(rollout, store, 2, terms):
            time.sleep(0.05)


def learn(folder: Path, disk: int | None) -> None:
    """A learner's life: its state is the ids of what it trained on, a line a step, up to what its checkpoint says."""
    store, weights = open_run(folder)
    checkpoint, log = folder / "checkpoint.json", folder / "trained.jsonl"
    step, size = json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, 0)
    log.touch()
    os.truncate(log, size)
    store.rewind(step - 1)
    fill_disk(disk)
    with log.open("a") as lines:
        while True:
            weights.publish({"w": np.full(1000, step, np.float32)}, step)
            while (groups := store.take(GROUPS_PER_STEP, step)) is None:
                time.sleep(0.02)
            lines.write(json.dumps([episode.episode_id for group in groups for episode in group]) + "\n")
            lines.flush()
            step += 1
            if step % CHECKPOINT_EVERY == 0:
                beside = checkpoint.with_suffix(".new")
                beside.write_text(json.dumps([step, log.stat().st_size]))
                beside.replace(checkpoint)


def build(folder: str, number: int) -> tuple[Rollout, Callable]:
    """A worker on Ray, which says which process it is."""
    (Path(folder) / f"worker-{number}.pid").write_text(str(os.getpid()))
    return make_rollout(isolated=False), lambda arrays: None


def host(folder: Path, workers: int) -> None:
    """The life of a process that has a cluster, workers on it, and says which process the desk is."""
    import ray

    from mpo_jax.rollout import fleet

    fleet.connect("", workers=workers, object_bytes=0)
    made = fleet.Fleet(*open_run(folder), VOCABULARY)
    for number in range(workers):
        made.start(make_terms(number), build, str(folder), number)
    while True:
        pid = ray.get(made.desk.__ray_call__.remote(lambda desk: os.getpid()))
        (folder / "desk.pid").write_text(str(pid))
        made.wait()
        time.sleep(0.5)
