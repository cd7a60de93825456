"""Environments that hang, crash and flood: one clear error each, and the next episode goes on."""

import os
import subprocess
import sys
import textwrap
import time

import gymnasium
import pytest

from mpo_jax.environments import isolated
from mpo_jax.environments.isolated import EnvironmentFailed, IsolatedEnvironment
from mpo_jax.environments.text import CUT, MAXIMAL_TEXT

TARGET = "isolated_test:Troubled"


class Troubled(gymnasium.Env):
    """Does what the action says."""

    def __init__(self, name="x"):
        self.name = name

    def reset(self, *, seed=None, options=None):
        self.turns = 0
        return f"{self.name} {seed} {options}", {"task_id": "t", "pid": os.getpid()}

    def step(self, action):
        self.turns += 1
        print("noise on standard output", flush=True)
        if action == "hang":
            time.sleep(60)
        if action == "crash":
            os._exit(3)
        if action == "raise":
            raise LookupError("no such thing")
        size = {"long": 100_000, "flood": 3_000_000}.get(action, 1)
        return "a" * size, 0.5, False, action == "end", {"success": False, "turns": self.turns, "odd": {1j}}


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.getcwd()]))
    monkeypatch.setattr(isolated, "MAXIMAL_REPLY", 1_000_000)
    environment = IsolatedEnvironment(TARGET, {"name": "y"}, seconds=2.0)
    yield environment
    environment.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_is_the_environment(environment):
    text, info = environment.reset(seed=3, options={"task": 7})
    assert text == "y 3 {'task': 7}" and info["pid"] != os.getpid()
    assert environment.step("go") == ("a", 0.5, False, False, {"success": False, "turns": 1, "odd": "{1j}"})
    assert environment.step("end")[2:4] == (False, True)
    assert environment.reset()[1]["pid"] == info["pid"]  # the same process serves the next episode


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("hang", r"did not answer in 2\.0 s"),
        ("crash", "ended with code 3"),
        ("flood", "said more than 1000000 bytes"),
        ("raise", "LookupError: no such thing"),
    ],
)
def test_a_failure_is_raised_in_time_and_the_next_episode_goes_on(environment, action, message):
    """BUG-145: a tool that never returns costs its deadline, and nothing else."""
    pid = environment.reset()[1]["pid"]
    start = time.monotonic()
    with pytest.raises(EnvironmentFailed, match=message):
        environment.step(action)
    assert time.monotonic() - start < 10
    if action != "raise":
        assert not alive(pid)
        with pytest.raises(EnvironmentFailed, match="reset"):
            environment.step("go")
    assert environment.reset()[0].startswith("y") and environment.step("go")[0] == "a"


def test_long_observations_are_cut(environment):
    environment.reset()
    text = environment.step("long")[0]
    assert len(text) == MAXIMAL_TEXT and text.endswith(CUT)


def test_a_killed_parent_takes_its_child_along(environment):
    script = textwrap.dedent(f"""
        from mpo_jax.environments.isolated import IsolatedEnvironment
        environment = IsolatedEnvironment({TARGET!r}, seconds=60.0)
        print(environment.reset()[1]["pid"], flush=True)
        environment.step("hang")
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_targets_are_checked():
    with pytest.raises(ValueError, match=r"target is 'x', expected package\.module:Class"):
        IsolatedEnvironment("x")
    with pytest.raises(ValueError, match=r"seconds is 0\.0"):
        IsolatedEnvironment("a:B", seconds=0.0)
    with pytest.raises(EnvironmentFailed, match="ModuleNotFoundError"):
        IsolatedEnvironment("no_such_module:B").reset()
