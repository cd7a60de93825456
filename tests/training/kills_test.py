"""A run killed 20 times at random moments ends bit for bit as one that is not: nothing is lost, nothing repeated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_bug_146_148_twenty_kills_lose_and_repeat_nothing(tmp_path):
    """Also BUG-151: some kills come while a checkpoint is being written."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "training.kills_program", str(tmp_path), "20"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["told"]["whole"] == 60
    assert found["told"]["killed"] > 60  # what a killed life did after its last checkpoint was done again …
    assert found["ends"]["killed"] == found["ends"]["whole"]  # … from the same state and the same groups
    seen = np.frombuffer(bytes.fromhex(found["ends"]["killed"]["seen"]), np.int32)
    assert (seen == 1).all() and found["ends"]["killed"]["saved"] == 60
