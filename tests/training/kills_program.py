"""A program: a loop over store and checkpoints that is killed again and again, and one that is not. Run by kills_test.

Arguments: a folder, and how many kills. Each life of the loop is a fork, so that only its work takes time.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from store.sqlite_test import episode as make_episode

from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.training.checkpoints import Checkpoints

STEPS, EVERY = 60, 2


def live(folder: Path, report: int) -> None:
    """One life: goes on from the newest checkpoint, and says each step that it has done."""
    step_function = jax.jit(_step, donate_argnums=0)
    store, checkpoints = EpisodeStore(folder / "episodes.sqlite"), Checkpoints(folder / "checkpoints")
    state = first_state()
    if restored := checkpoints.restore(state):
        state = restored[1]
    step = int(state["step"])
    store.rewind(step - 1)
    while step < STEPS:
        ((episode,),) = store.take(1, step)
        state, step = step_function(state, episode.group_id), step + 1
        if step % EVERY == 0:
            checkpoints.save(step, state)
        os.write(report, b".")
    checkpoints.wait()


def first_state() -> dict:
    return {
        "step": jnp.int32(0),
        "seen": jnp.zeros(STEPS, jnp.int32),
        "params": jnp.ones(20_000),
        "rng": jax.random.key_data(jax.random.key(0)),
    }


def _step(state, group):
    """Adds noise that depends on all before: a step lost, repeated or out of order would show in every bit."""
    key = jax.random.wrap_key_data(state["rng"])
    noise = jax.random.normal(jax.random.fold_in(key, group), state["params"].shape)
    return {
        "step": state["step"] + 1,
        "seen": state["seen"].at[group].add(1),
        "params": state["params"] * 0.9 + noise,
        "rng": jax.random.key_data(jax.random.split(key)[0]),
    }


def born(folder: Path) -> tuple[int, int]:
    """Forks a life; its process and where it reports."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        try:
            live(folder, write)
        finally:
            os._exit(0)
    os.close(write)
    return process, read


def run(folder: Path, kills: int) -> int:
    """A run that is killed so many times at random moments; how many steps its lives told of."""
    folder.mkdir()
    store = EpisodeStore(folder / "episodes.sqlite")
    for group in range(STEPS):
        store.add(group, [make_episode(group, 0)])
    store.close()
    rng, told = random.Random(kills), 0
    for remaining in range(kills, -1, -1):
        process, reports = born(folder)
        if remaining:
            told += len(os.read(reports, rng.randrange(1, 4)))  # after a step or more …
            time.sleep(rng.uniform(0, 0.03))  # … somewhere in the next, or in the writing of a checkpoint
            os.kill(process, signal.SIGKILL)
        while part := os.read(reports, 1024):
            told += len(part)
        os.close(reports)
        os.waitpid(process, 0)
    return told


def end(folder: Path) -> dict:
    """What is in the last checkpoint, read by a process of its own."""
    step, state = Checkpoints(folder / "checkpoints").restore(first_state())
    return {"saved": step} | {name: np.asarray(x).tobytes().hex() for name, x in state.items()}


def main():
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    told = {name: run(folder / name, number) for name, number in (("killed", kills), ("whole", 0))}
    ends = {name: end(folder / name) for name in told}  # only now does this process, that was forked, start a backend
    print(json.dumps({"told": told, "ends": ends}))


if __name__ == "__main__":
    main()
