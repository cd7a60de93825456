"""An environment that kills the worker that plays it, once; small, as its process imports this file."""

import os
import pathlib
import signal
import time

import gymnasium


class KillsItsWorker(gymnasium.Env):
    """One turn, reward 1. The first that a worker on Ray resets kills that worker; the learner may play it."""

    def __init__(self, marker):
        self.marker = pathlib.Path(marker)

    def reset(self, *, seed=None, options=None):
        asked_by = pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        if asked_by.startswith(b"ray::") and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return "go", {"task_id": str(options["task"])}

    def step(self, action):
        return "end", 1.0, True, False, {}
