"""Several processes, one run: what they agree on, and that they train as one does."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from experiments.processes import Share, join
from mpo_jax.training import cluster as clusters
from mpo_jax.training.cluster import Cluster, ProcessLost

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


def start(index, count, port, path, mesh):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    arguments = [str(index), str(count), f"127.0.0.1:{port}", str(path), mesh]
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


def run(count, path, mesh=""):
    port = free_port()
    processes = [start(index, count, port, path, mesh) for index in range(count)]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # those that have not ended
    return [process.returncode for process in processes], outputs


@pytest.mark.slow
def test_two_processes_or_a_mesh_train_as_one_device_does(tmp_path):
    """Two updates of MPO by policy and critic: of groups 0 to 3, two in each process; of two that one process has.

    The second process comes a second late to the first step, and has nothing in the second. The mesh has 4 devices.
    """
    kinds = {"one": (1, ""), "two": (2, ""), "mesh": (1, "fsdp=2,tensor=2")}
    for name, (count, mesh) in kinds.items():
        codes, outputs = run(count, tmp_path / f"{name}.npz", mesh)
        assert codes == [0] * count, outputs
    one, *others = (np.load(tmp_path / f"{name}.npz") for name in kinds)
    assert one["numbers"][:, 2].tolist() == [16, 8], "episodes of all processes"
    for other in others:
        np.testing.assert_allclose(other["numbers"], one["numbers"], rtol=1e-5, atol=1e-6)
        for name in one.files:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-4, atol=1e-5, err_msg=name)
