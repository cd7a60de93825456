"""Several processes, one run: what they agree on, and that they train as one does."""

import concurrent.futures
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.processes import Share, join
from mpo_jax import kernels
from mpo_jax.training import cluster as clusters
from mpo_jax.training.batching import pack, padded
from mpo_jax.training.cluster import Cluster, ProcessLost
from training import batching_test

ROOT = Path(__file__).parents[2]


class Scripted(Cluster):
    """A process whose only other one says what a list has."""

    count, index = 2, 0

    def __post_init__(self):
        pass

    def agree(self, **numbers):
        other = self.others.pop(0)
        return {name: np.array([float(x), float(other.get(name, x))]) for name, x in numbers.items()}


def scripted(*others, **settings):
    found = Scripted(**settings)
    object.__setattr__(found, "others", list(others))
    return found


def nothing():
    raise AssertionError("nobody is to wait")


def test_a_batch_is_taken_when_all_have_theirs():
    parts, waits = iter([None, ["group"]]), []
    cluster = scripted({"ready": False}, {"ready": False}, {"ready": True})
    assert cluster.take(lambda: next(parts), lambda: waits.append(0), lambda: False, 3) == ["group"]
    assert len(waits) == 1, "only while it has none does it make some"


def test_a_process_without_episodes_takes_part_with_none():
    cluster = scripted({"ready": True, "waited": 0.5}, {"ready": True, "waited": 1.5}, patience=1.0)
    assert cluster.take(lambda: None, lambda: None, lambda: False, 0) == []


def test_a_stop_of_any_stops_all_but_not_what_is_ready():
    assert scripted({"stop": True}).take(lambda: None, nothing, lambda: False, 0) is None
    assert scripted({"stop": True, "ready": True}).take(lambda: ["group"], nothing, lambda: False, 0) == ["group"]


def test_processes_at_different_steps_are_told_so():
    with pytest.raises(ProcessLost, match=r"processes are at steps \[3, 4\], expected the same"):
        scripted({"step": 4}).take(lambda: None, nothing, lambda: False, 3)


def test_metrics_add_up_or_are_weighted_by_episodes():
    cluster = scripted({"episodes": 3, "tokens": 30, "turns": 2.0, "version_lag_max": 5, "return": np.nan})
    found = cluster.combined({"episodes": 1, "tokens": 12, "turns": 4.0, "version_lag_max": 1, "return": 1.0})
    assert found["episodes"] == 4 and found["tokens"] == 42 and found["version_lag_max"] == 5
    assert found["turns"] == (1 * 4 + 3 * 2) / 4 and np.isnan(found["return"])
    empty = scripted({"episodes": 0, "return": np.nan}).combined({"episodes": 2, "return": 0.5})
    assert empty == {"episodes": 2, "return": 0.5}, "a process without episodes has nothing to say"


def test_a_process_that_does_not_answer_is_lost(monkeypatch):
    monkeypatch.setattr(clusters.multihost_utils, "process_allgather", lambda x: time.sleep(0.2))
    cluster = Scripted(timeout=0.05)
    with pytest.raises(ProcessLost, match=r"process 0 of 2: not every other answered within 0.05 s"):
        Cluster.agree(cluster, step=1)


class Threads(Cluster):
    """A process that is a thread; what all say lies in a list, between two barriers."""

    def __init__(self, index, said, barrier, patience):
        for name, value in {"thread": index, "said": said, "barrier": barrier, "patience": patience}.items():
            object.__setattr__(self, name, value)

    count = property(lambda self: len(self.said))
    index = property(lambda self: self.thread)

    def agree(self, **numbers):
        self.said[self.index] = numbers
        self.barrier.wait()
        found = {name: np.array([float(other[name]) for other in self.said]) for name in numbers}
        self.barrier.wait()
        return found


def in_threads(count, act, patience=60.0):
    """act(cluster) of every process of a cluster, at the same time."""
    said, barrier = [None] * count, threading.Barrier(count, timeout=20)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda index: act(Threads(index, said, barrier, patience)), range(count)))


def test_bug_160_all_take_as_many_steps_whoever_runs_out_first():
    """145 samples of 3 processes, in batches of 16: 49 are four batches, the last of one; 48 are three."""

    def train(cluster):
        left, sizes = [49, 48, 48][cluster.index], []
        for step in range(4):

            def take():
                return [0] * min(left, 16) or None  # noqa: B023

            part = cluster.take(take, lambda: time.sleep(0.01), lambda: False, step)
            sizes.append(len(part))
            left -= len(part)
        return sizes

    assert in_threads(3, train, patience=0.05) == [[16, 16, 16, 1], [16, 16, 16, 0], [16, 16, 16, 0]]


def test_bug_157_a_light_process_has_as_many_rows_as_the_others_and_the_loss_is_one_devices():
    """5 rows of a token with losses 1 to 5 in one process, 1 row with loss 6 in the other: a mean of 21 / 6."""
    episodes = [batching_test.make_episode([(0, 1)], seed=i, name=f"e{i}", rewards=[i + 1.0]) for i in range(6)]

    def train(cluster):
        mine = episodes[:5] if cluster.index == 0 else episodes[5:]
        batch, slots = pack(mine, row_tokens=1, row_sequences=1)
        return padded(batch, slots, int(cluster.agree(rows=len(slots))["rows"].max()))[0]

    parts = in_threads(2, train)
    assert [part.tokens.shape for part in parts] == [(5, 1), (5, 1)]
    assert parts[1].action_mask[:, 0].tolist() == [True, False, False, False, False]
    whole = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    weights = kernels.token_mean(whole.action_mask, whole.turn_ids, whole.sequence_ids)
    np.testing.assert_allclose(np.sum(weights * whole.rewards), 21 / 6, rtol=1e-6)


def test_bug_159_metrics_are_combined_by_all_processes():
    """Every one calls and every one has the result; a process that only the first waited for would stop the barrier."""
    found = in_threads(2, lambda cluster: cluster.combined({"episodes": cluster.index + 1, "success": cluster.index}))
    assert found[0] == found[1] == {"episodes": 3, "success": (1 * 0 + 2 * 1) / 3}


def test_what_all_or_any_say():
    assert (
        in_threads(2, lambda cluster: (cluster.any(cluster.index == 1), cluster.all(cluster.index == 1)))
        == [(True, False)] * 2
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("UNKNOWN: Gloo AllReduce failed: Connection reset by peer", "process 0 of 2: another is gone: UNKNOWN: Gloo"),
        ("episode e has 4 tokens, a row holds row_tokens=3", "^episode e has 4"),
    ],
)
def test_a_broken_connection_is_a_lost_process_and_another_error_is_none(error, expected):
    with pytest.raises(Exception, match=expected) as found, Scripted().connected():
        raise ValueError(error)  # as jax does
    assert found.type is (ProcessLost if "Gloo" in error else ValueError)


def test_one_process_agrees_with_itself():
    assert Cluster().agree(rows=3) == {"rows": np.array([3.0])}


@pytest.mark.parametrize("text", ["", "2/2", "a/2", "1"])
def test_a_share_that_is_none_is_named(text):
    with pytest.raises(ValueError, match=f"share='{text}', expected index/count"):
        Share.parse(text)
    assert str(Share.parse("1/2")) == "1/2"


def test_numbers_without_a_coordinator_are_refused():
    with pytest.raises(ValueError, match=r"{'process_id': 1} with coordinator=None, expected host:port"):
        join(None, None, 1, 10.0)
    with pytest.raises(ValueError, match=r"coordinator=here:1 with .* expected both"):
        join("here:1", 2, None, 10.0)


def test_an_automatic_coordinator_needs_a_known_cluster(monkeypatch):
    def initialize(*arguments, **seconds):
        raise ValueError("coordinator_address should be defined.")  # as jax does, where it may still begin

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ValueError, match=r"coordinator=auto .*; auto knows Slurm, Open MPI, Kubernetes and Cloud TPU"):
        join("auto", None, None, 10.0)


def slurm(index, count, port):
    """What Slurm tells the tasks of a job on one machine."""
    found = {"SLURM_JOB_ID": 7, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": count, "SLURM_PROCID": index}
    found |= {"SLURM_LOCALID": index, "JAX_COORDINATOR_PORT": port}
    return {name: str(value) for name, value in found.items()}


def start(index, count, port, path, mesh, auto):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    environment |= slurm(index, count, port) if auto else {}
    arguments = [str(index), str(count), "auto" if auto else f"127.0.0.1:{port}", str(path), mesh]
    return subprocess.Popen(
        [sys.executable, "-m", "training.processes_program", *arguments],
        cwd=ROOT,
        env=environment | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={4 if mesh else 1}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(count, path, mesh, auto):
    port = free_port()
    processes = [start(index, count, port, path, mesh, auto) for index in range(count)]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # those that have not ended
    return [process.returncode for process in processes], outputs


@pytest.mark.slow
def test_bug_157_160_four_processes_or_a_mesh_train_as_one_device_does(tmp_path):
    """Two updates of MPO by policy and critic: of groups 0 to 3, divided; of two that the first process has.

    The others come a second late to the first step, and have nothing in the second, in which they take part with rows
    of padding. The mesh has 4 devices. The four find each other by what Slurm tells them.
    """
    kinds = {"one": (1, "", False), "four": (4, "", True), "mesh": (1, "fsdp=2,tensor=2", False)}
    for name, (count, mesh, auto) in kinds.items():
        codes, outputs = run(count, tmp_path / f"{name}.npz", mesh, auto)
        assert codes == [0] * count, outputs
    one, *others = (np.load(tmp_path / f"{name}.npz") for name in kinds)
    assert one["numbers"][:, 2].tolist() == [16, 8], "episodes of all processes"
    for other in others:
        np.testing.assert_allclose(other["numbers"], one["numbers"], rtol=1e-5, atol=1e-6)
        for name in one.files:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-4, atol=1e-5, err_msg=name)
