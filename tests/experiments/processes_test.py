"""Learner and worker as real processes, killed in every way: nothing is lost, nothing is trained on twice."""

import collections
import contextlib
import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from training import runs

from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.training.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE = 600  # seconds until a step that should take a few is given up, on a machine that may be busy


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Programs compiled once for all processes of this file, and without polish."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("xla")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


class Run:
    """A workdir, and the command that trains in it."""

    def __init__(self, workdir, environment):
        self.workdir, self.environment, self.started = workdir, environment, []
        workdir.mkdir()

    def start(self, num_steps):
        flags = runs.SMALL | {"num_steps": num_steps, "model": runs.model_folder(), "value_pretraining_steps": 0}
        # A file for the output: a worker that outlived the learner would hold a pipe open.
        with (self.workdir / "train.log").open("a") as log:
            learner = subprocess.Popen(
                [sys.executable, "-m", "experiments.train", f"--workdir={self.workdir}"]
                + [f"--config.{name}={value}" for name, value in flags.items()],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        self.started.append(learner)
        return learner

    def log(self):
        return (self.workdir / "train.log").read_text()

    def steps(self):
        return [row["step"] for row in read_metrics(self.workdir / "metrics.jsonl") if "episodes" in row]

    def wait_for_steps(self, learner, more):
        """Waits until this process has trained on some steps."""
        first = len(self.steps())
        wait_until(lambda: len(self.steps()) >= first + more or learner.poll() is not None)
        assert learner.poll() is None, self.log()

    def close(self):
        for learner in self.started:
            for pid in [*children(learner.pid), learner.pid]:
                if learner.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            learner.wait()


def wait_until(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def children(pid):
    try:
        return [int(c) for c in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def worker_of(learner):
    commands = {pid: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(learner.pid)}
    (worker,) = [pid for pid, command in commands.items() if b"experiments.rollout" in command]
    return worker


def check_store(workdir, num_steps):
    """Every step took its groups, all different and whole, in order; no episode is there twice."""
    with contextlib.closing(sqlite3.connect(workdir / "episodes.sqlite")) as db:
        rows = db.execute("SELECT group_id, step, dropped FROM groups ORDER BY group_id").fetchall()
        members = dict(db.execute("SELECT group_id, COUNT(*) FROM episodes GROUP BY group_id").fetchall())
        quarantined = db.execute("SELECT COUNT(*) FROM quarantined").fetchone()[0]
    taken = [(step, group) for group, step, dropped in rows if step is not None]
    assert collections.Counter(step for step, _ in taken) == dict.fromkeys(range(num_steps), 2)
    assert [group for _, group in sorted(taken)] == list(range(2 * num_steps))  # in index order, no hole
    assert not any(dropped for _, _, dropped in rows) and quarantined == 0
    assert members == {group: 2 for group, _, _ in rows}
    store = EpisodeStore(workdir / "episodes.sqlite", read_only=True)
    episodes = list(store.episodes())
    store.close()
    ids = [e.episode_id for e in episodes]
    assert len(set(ids)) == len(ids) == 2 * len(rows)
    assert len({tuple(e.tokens) for e in episodes}) == len(ids)
    return episodes


@pytest.mark.slow
def test_any_process_may_be_killed_and_the_same_command_goes_on(tmp_path, environment):
    """BUG-138, BUG-139, BUG-151."""
    run = Run(tmp_path / "run", environment)
    try:
        # kill -9 of the worker: one error, within seconds, that names its log.
        learner = run.start(10_000)
        run.wait_for_steps(learner, 3)
        os.kill(worker_of(learner), signal.SIGKILL)
        killed = time.monotonic()
        assert learner.wait(60) not in (0, -signal.SIGKILL)
        assert time.monotonic() - killed < 30
        (error,) = [line for line in run.log().splitlines() if "error: " in line]
        assert f"the rollout worker ended with code -9; see {run.workdir / 'rollout.log'}" in error
        seen = run.steps()
        assert seen == list(range(len(seen)))

        # kill -9 of the learner: its worker ends by itself.
        learner = run.start(10_000)
        run.wait_for_steps(learner, 3)
        worker = worker_of(learner)
        learner.kill()
        learner.wait()
        wait_until(lambda: not alive(worker), 60)

        # Ctrl-C: a clean end with a checkpoint of the last step.
        learner = run.start(10_000)
        run.wait_for_steps(learner, 3)
        worker = worker_of(learner)
        learner.send_signal(signal.SIGINT)
        assert learner.wait(90) == 0, run.log()
        assert not alive(worker)
        stopped = len(run.steps())
        assert run.steps() == list(range(stopped))
        assert (run.workdir / "checkpoints" / str(stopped)).is_dir()
        assert "the same command goes on" in run.log()
        assert json.loads((run.workdir / "summary.json").read_text())["finished"] is False
        check_store(run.workdir, stopped)

        # And the end of it.
        learner = run.start(stopped + 3)
        assert learner.wait(PATIENCE) == 0, run.log()
        assert run.steps() == list(range(stopped + 3))
        summary = json.loads((run.workdir / "summary.json").read_text())
        assert summary["finished"] and summary["steps"] == stopped + 3
        episodes = check_store(run.workdir, stopped + 3)
        versions = [v for e in episodes for v in e.versions]
        assert max(versions) >= 3  # the worker has seen what was published
        lags = [row["version_lag_max"] for row in read_metrics(run.workdir / "metrics.jsonl") if "episodes" in row]
        assert max(lags) <= 3  # 4 groups wait at most, 2 a step, and a round in the making (BUG-143)
    finally:
        run.close()
