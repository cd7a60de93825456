"""The program merges folders; its parts are tested in tests/scoring."""

import subprocess
import sys

import numpy as np
from safetensors.numpy import load_file, save_file


def merge(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "experiments.merge", *arguments], capture_output=True, text=True, check=False
    )


def test_a_sweep_over_two_policies(tmp_path):
    for name, values in {"base": [0, 0, 0], "one": [4, -1, 2], "two": [-3, 2, 1]}.items():
        (tmp_path / name).mkdir()
        save_file({"w": np.array(values, np.float32)}, tmp_path / name / "model.safetensors")
    where = [f"--reference={tmp_path}/base", f"--policy={tmp_path}/one,{tmp_path}/two", f"--output={tmp_path}/out"]
    done = merge(*where, "--method=ties", "--density=1", "--weights=1,3", "--alpha=0,0.5")
    assert done.stdout.split() == [f"{tmp_path}/out/alpha-0", f"{tmp_path}/out/alpha-0.5"], done.stderr
    # Signs + + +; agreeing: 4 | 2 | 2 and 1, of which the mean with weights 1 and 3 is 1.25.
    for alpha in (0, 0.5):
        found = load_file(tmp_path / "out" / f"alpha-{alpha:g}" / "model.safetensors")["w"]
        np.testing.assert_allclose(found, alpha * np.array([4, 2, 1.25]))
    again = merge(*where, "--alpha=0.5")
    assert again.returncode and "out: exists already" in again.stderr
