"""An environment in a process of its own: when it hangs, crashes or floods, an episode is lost, never the worker.

    python -m mpo_jax.environments.isolated package.module:Class '{"argument": 1}'

is the child; both sides speak JSON lines over its standard input and output.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import gymnasium

from mpo_jax.environments.text import AnyText, cut

MAXIMAL_REPLY = 1 << 24  # bytes
STARTUP_SECONDS = 60.0  # for imports, and a virtual machine where there is one, on top of a reset's own


class EnvironmentFailed(RuntimeError):
    """The environment raised, hung, died or said too much; the message says which."""


class IsolatedEnvironment(gymnasium.Env):
    """A gymnasium environment of text in a child process, killed and started anew whenever it fails.

    A failure is raised to the agent loop, which ends that episode with a NaN reward and its reason: the learner counts
    it and leaves it out, as it says nothing of the policy.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own convention

    def __init__(self, target: str, arguments: Mapping[str, Any] | None = None, *, seconds: float = 60.0):
        """Sets what runs there; nothing is started before the first reset.

        Args:
          target: "package.module:Class".
          arguments: of the class, in JSON's types.
          seconds: that a reset or a step may take.

        Raises:
          ValueError: the target names no class, or the time is not positive.
        """
        module, _, name = target.partition(":")
        if not module or not name:
            raise ValueError(f"target is {target!r}, expected package.module:Class")
        if not seconds > 0:
            raise ValueError(f"seconds is {seconds}, expected a positive number")
        self._command = [sys.executable, "-m", __name__, target, json.dumps(dict(arguments or {}))]
        self._seconds = seconds
        self._child: subprocess.Popen | None = None
        self.observation_space, self.action_space = AnyText(), AnyText()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode, and the child if there is none.

        Raises:
          EnvironmentFailed: it could not.
        """
        super().reset(seed=seed)
        seconds = self._seconds
        if self._child is None:
            self._start()
            seconds += STARTUP_SECONDS
        observation, info = self._ask({"seed": seed, "options": options}, seconds)
        return cut(observation), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes one turn.

        Raises:
          EnvironmentFailed: it failed; the episode is over.
        """
        if self._child is None:
            raise EnvironmentFailed("no episode is under way: call reset first")
        observation, reward, terminated, truncated, info = self._ask({"action": action}, self._seconds)
        return cut(observation), float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Ends the child and all that it started."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
            self._child = None

    def _start(self) -> None:
        self._child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, bufsize=0,
        )  # fmt: skip

    def _ask(self, request: Mapping[str, Any], seconds: float) -> list[Any]:
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            reply = json.loads(self._read_line(time.monotonic() + seconds, seconds))
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise EnvironmentFailed(f"the environment's process failed: {error}") from error
        except EnvironmentFailed:
            self.close()
            raise
        if "error" in reply:
            raise EnvironmentFailed(reply["error"])
        return reply["result"]

    def _read_line(self, deadline: float, seconds: float) -> bytes:
        line, pipe = bytearray(), self._child.stdout.fileno()
        while not line.endswith(b"\n"):
            if not select.select([pipe], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                raise EnvironmentFailed(f"the environment did not answer in {seconds} s")
            part = os.read(pipe, 1 << 16)
            if not part:
                raise EnvironmentFailed(f"the environment's process ended with code {self._child.wait()}")
            line += part
            if len(line) > MAXIMAL_REPLY:
                raise EnvironmentFailed(f"the environment said more than {MAXIMAL_REPLY} bytes")
        return bytes(line)


def serve(target: str, arguments: str) -> None:
    """The child: makes the environment, answers each request by a line, ends with its parent."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the environment prints is not an answer
    module, _, name = target.partition(":")
    environment: gymnasium.Env | None = None
    for line in _requests():
        request = json.loads(line)
        try:
            if environment is None:
                environment = getattr(importlib.import_module(module), name)(**json.loads(arguments))
            if "action" in request:
                result = environment.step(request["action"])
            else:
                result = environment.reset(seed=request["seed"], options=request["options"])
            reply = {"result": result}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply, default=_plain) + "\n")
        replies.flush()


def _requests():
    """Lines of standard input as they come; a parent that is gone ends this process even while it is at work."""
    lines: list[str] = []
    ready = threading.Semaphore(0)

    def read() -> None:
        for line in sys.stdin:
            lines.append(line)
            ready.release()
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        ready.acquire()
        yield lines.pop(0)


def _plain(value: Any) -> Any:
    """A numpy scalar's number, another object's text."""
    return value.item() if hasattr(value, "item") else str(value)


if __name__ == "__main__":
    serve(*sys.argv[1:])
