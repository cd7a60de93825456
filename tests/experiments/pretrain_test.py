"""The command that makes the warm start."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mpo_jax.models import pretrained, weights

ROOT = pathlib.Path(__file__).parents[2]
TINY = ("--steps=3", "--width=16", "--layers=1", "--heads=2", "--head_dim=8", "--rows=2", "--vocab_size=400")


@pytest.mark.slow
def test_the_command_writes_a_folder_that_loads(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "experiments.pretrain", f"--output={tmp_path / 'model'}", *TINY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert f"wrote {tmp_path / 'model'}" in result.stdout
    model = pretrained.load(tmp_path / "model")
    assert (model.config.width, model.config.num_layers, model.config.vocab_size) == (16, 1, 400)
    assert model.config.smeared_keys and model.tokenizer.vocab_size == 400
    arrays = weights.flatten(model.params)
    assert all(np.isfinite(x).all() for x in arrays.values())
    # A checkpoint of bfloat16 that was trained at least a little: its norms have left 1.
    assert (arrays["blocks.0.mlp_norm.scale"] != 1).any()
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_kv_heads"] == 1


def test_without_an_output_it_says_so(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "experiments.pretrain"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode != 0 and "--output" in result.stderr
