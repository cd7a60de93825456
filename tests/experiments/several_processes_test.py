"""Two processes train together; one is killed, the other says so and ends, and the same command goes on."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training import runs

from mpo_jax.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
TIMEOUT = 30  # seconds after which a process that gives no sign of life counts as lost
APART = ("seconds", "tokens_per_second", "overlap", "pending_groups")  # of one life, or of one process


class Pair:
    """A workdir, and the command of two processes that train in it."""

    def __init__(self, folder):
        self.workdir, self.logs, self.processes = folder / "run", [folder / f"log_{i}" for i in range(2)], []
        quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": str(folder / "xla")}
        quick |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu"}
        self.environment = os.environ | quick

    def start(self, num_steps):
        changes = {"num_steps": num_steps, "model": runs.model_folder(), "checkpoint_every": 3, "minibatches": 1}
        changes |= {"algorithm": "dr_grpo"}  # the least to compile
        changes |= {"row_tokens": 64, "context_length": 64, "evaluation_questions": 1, "value_pretraining_steps": 0}
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        flags = [f"--workdir={self.workdir}", "--rollout=inline", f"--timeout={TIMEOUT}", "--num_processes=2"]
        flags += [f"--coordinator=127.0.0.1:{port}", *(f"--config.{k}={v}" for k, v in (runs.SMALL | changes).items())]
        self.processes = []
        for index, path in enumerate(self.logs):
            command = [sys.executable, "-m", "experiments.train", *flags, f"--process_id={index}"]
            with path.open("w") as log:
                started = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=log, stderr=log)
            self.processes.append(started)

    def rows(self, index=0):
        home = self.workdir if index == 0 else self.workdir / f"process_{index}"
        rows = [row for row in read_metrics(home / "metrics.jsonl") if "episodes" in row]
        return {row["step"]: {k: v for k, v in row.items() if not k.startswith(APART)} for row in rows}

    def log(self):
        return "\n".join(path.read_text()[-4000:] for path in self.logs)

    def wait_for(self, steps):
        deadline = time.monotonic() + 600
        while len(self.rows()) < steps:
            assert time.monotonic() < deadline and not any(process.poll() for process in self.processes), self.log()
            time.sleep(0.05)

    def close(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def pair(tmp_path):
    found = Pair(tmp_path)
    yield found
    found.close()


@pytest.mark.slow
def test_when_either_process_is_killed_the_other_ends_and_the_same_command_goes_on(pair):
    """After 5 steps or more the checkpoint of 3 is there; what was trained after it is done again, bit for bit."""
    pair.start(num_steps=10_000)
    pair.wait_for(5)
    pair.processes[1].kill()
    since = time.monotonic()
    assert pair.processes[0].wait(10 * TIMEOUT) == 1, pair.log()
    assert time.monotonic() - since < 2 * TIMEOUT
    said = pair.logs[0].read_text()
    assert "process 0 of 2: another is gone: " in said and "The same command goes on from the last checkpoint." in said
    before, saved = pair.rows(), max(int(path.name) for path in (pair.workdir / "checkpoints").glob("[0-9]*"))
    last = max(before)
    assert 3 <= saved <= last + 1

    pair.start(num_steps=10_000)
    pair.wait_for(last + 2)
    pair.processes[0].kill()  # and with it the service of jax.distributed, whose loss may be jax's own to tell
    since = time.monotonic()
    assert pair.processes[1].wait(10 * TIMEOUT) in (1, -signal.SIGABRT), pair.log()
    assert time.monotonic() - since < 2 * TIMEOUT
    said = pair.logs[1].read_text()
    assert "process 1 of 2: another is gone: " in said or "another task died" in said
    before |= pair.rows()
    last = max(before)

    pair.start(num_steps=last + 2)
    assert [process.wait(600) for process in pair.processes] == [0, 0], pair.log()
    after = pair.rows()
    assert sorted(after) == list(range(last + 2))
    assert after == pair.rows(1), "numbers are of all processes"
    assert {step: after[step] for step in before} == before
