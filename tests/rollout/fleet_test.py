"""Workers on Ray, one killed, one asleep, one broken, the desk killed: every group is made once; scripted engines."""

import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from fakes import Counting, ScriptedEngine
from worker_test import random_words, rollout

from mpo_jax.rollout.worker import Terms, run_groups
from mpo_jax.store.admission import Admission
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights

pytest.importorskip("ray")
import ray

from mpo_jax.rollout import fleet

pytestmark = pytest.mark.slow
TERMS = Terms(admission=Admission(max_pending=12, straggler_seconds=1.0), poll=0.05)


class Faulty(Counting):
    """Fails in its worker's ninth episode: kills the worker, the first time; or never answers."""

    episodes = 0

    def __init__(self, fault, folder):
        self.fault, self.marker = fault, pathlib.Path(folder, fault)

    def step(self, action):
        Faulty.episodes += 1
        if Faulty.episodes == 9 and not (self.marker.exists() and self.fault == "killed"):
            self.marker.touch()
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10**6)
        return super().step(action)


def build(fault, folder):
    if fault == "broken":
        raise OSError("no such corpus")
    made = rollout(engine=ScriptedEngine(random_words, num_slots=2), make_environment=lambda: Faulty(fault, folder))
    return made, lambda params: params["w"].tolist()


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
    fleet.connect("", workers=4, object_bytes=0)
    yield
    ray.shutdown()


def await_groups(made, store, number, step):
    deadline = time.monotonic() + 120
    while (groups := store.take(number, step)) is None:
        made.wait()
        assert time.monotonic() < deadline
    return groups


def test_BUG_139_killed_sleeping_and_broken_workers_hold_nobody_up(cluster, tmp_path, caplog):
    store, published = EpisodeStore(tmp_path / "episodes.sqlite"), PublishedWeights(tmp_path / "weights")
    made = fleet.Fleet(store, published, vocab_size=200)
    for number, fault in enumerate(("killed", "asleep", "broken")):
        made.start(dataclasses.replace(TERMS, owner=f"worker-{number}"), build, fault, str(tmp_path))
    published.publish({"w": np.ones(2)}, 0)
    groups = await_groups(made, store, 12, 0)
    os.kill(ray.get(made.desk.__ray_call__.remote(lambda desk: os.getpid())), signal.SIGKILL)  # it comes back
    published.publish({"w": np.ones(2)}, 1)
    groups += await_groups(made, store, 12, 1) + await_groups(made, store, 12, 2)

    assert (tmp_path / "killed").exists() and (tmp_path / "asleep").exists()
    assert "worker-2 has ended" in caplog.text and "no such corpus" in caplog.text
    ids = [episode.episode_id for group in groups for episode in group]
    assert ids == [f"{group:08d}-{member:03d}" for group in range(36) for member in range(3)]
    versions = [episode.versions[0] for group in groups for episode in group]
    assert set(versions[:36]) == {0} and set(versions[-36:]) == {1}  # at most 12 groups run ahead

    # What a group holds does not depend on who made it.
    alone = EpisodeStore(tmp_path / "alone.sqlite")
    run_groups(rollout(), alone, 12)
    assert list(alone.episodes()) == [episode for group in groups[:12] for episode in group]

    lonely = fleet.Fleet(store, published, vocab_size=200)
    lonely.start(TERMS, build, "broken", "")
    with pytest.raises(RuntimeError, match=r"(?s)no rollout worker is left; the last, worker-0, .*no such corpus"):
        await_groups(lonely, store, 99, 3)
    made.close()
    assert not ray.is_initialized()


BY_HAND = """
import pathlib, sys
sys.path.insert(0, {tests!r})
from fleet_test import *

fleet.connect({address!r}, workers=1, object_bytes=0)
folder = pathlib.Path({folder!r})
store, published = EpisodeStore(folder / "episodes.sqlite"), PublishedWeights(folder / "weights")
published.publish({{"w": np.ones(2)}}, 0)
made = fleet.Fleet(store, published, vocab_size=200)
(folder / "killed").touch()  # that fault has been
made.start(TERMS, build, "killed", {folder!r})
print(len(await_groups(made, store, 6, 0)), "groups")
made.close()
"""


def test_a_cluster_that_was_started_by_hand(tmp_path, monkeypatch):
    """Its token is that of `~/.ray/auth_token`, which must be asked for on both sides."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray_program = os.path.join(os.path.dirname(sys.executable), "ray")
    flags = ["--head", f"--port={port}", "--num-cpus=1", "--include-dashboard=false", "--object-store-memory=100000000"]
    subprocess.run([ray_program, "get-auth-token", "--generate"], check=True, capture_output=True)
    started = subprocess.Popen([ray_program, "start", *flags, "--block"], stdout=subprocess.DEVNULL)
    try:
        script = BY_HAND.format(
            tests=os.path.dirname(__file__), address=f"127.0.0.1:{port}", folder=os.fspath(tmp_path)
        )
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:  # it takes its time to come up
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
            if done.returncode == 0:
                break
        assert done.stdout == "6 groups\n", done.stderr
    finally:
        started.terminate()
        started.wait(60)


def test_a_client_is_no_part_of_the_cluster():
    with pytest.raises(ValueError, match="ray_address is 'ray://h:10001': the learner must run on a machine of"):
        fleet.connect("ray://h:10001", workers=1, object_bytes=0)
