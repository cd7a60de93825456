"""Kill -9 at random, a full disk and hanging tools for a minute; `benchmarks.soak` does it for as long as wanted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_BUG_138_whatever_is_killed_every_episode_is_trained_on_once(tmp_path):
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes=0.4", "--workers=3"]
    command += [f"--folder={tmp_path}", f"--output={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["worker killed"] > 0 and found["steps"] > 0 and found["episodes trained on"] == 8 * found["steps"]
    # Only a full disk ends anybody by itself.
    assert found.get("worker ended by itself", 0) + found.get("learner ended by itself", 0) <= found.get("disk full", 0)
    assert "| lost | 0 |" in (tmp_path / "soak.md").read_text()
