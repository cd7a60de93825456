"""One mesh, one table: whatever the layout, three steps give what one device gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mpo_jax.training import sharding


def mesh_of_shapes(**sizes):
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))


MESH = mesh_of_shapes(data=2, fsdp=2, tensor=2, expert=1)


@pytest.mark.parametrize(
    ("name", "shape", "spec"),
    [
        ("policy.blocks.3.attention.query.kernel", (16, 32), P("fsdp", "tensor")),
        ("policy.blocks.attention.query.kernel", (3, 16, 32), P(None, "fsdp", "tensor")),  # stacked layers
        ("critic_optimizer.1.0.mu.trunk.blocks.0.mlp.down.kernel", (32, 16), P("tensor", "fsdp")),
        ("policy.embedding.embedding", (64, 16), P(None, ("fsdp", "tensor"))),
        ("policy.output.kernel", (16, 64), P(("fsdp", "tensor"), None)),
        ("policy.blocks.0.attention.output.kernel", (32, 16), P("tensor", "fsdp")),
        ("critic.value.kernel", (16, 1), P(None, None)),  # the value head is no attention's value
        ("policy.blocks.0.mlp_norm.scale", (16,), P(None)),
        ("policy_optimizer.1.0.count", (), P()),
        ("policy.blocks.0.attention.key.kernel", (15, 32), P(None, "tensor")),  # 2 does not divide 15
    ],
)
def test_the_table_by_name_and_shape(name, shape, spec):
    assert sharding.of_parameter(MESH, name, shape).spec == spec


def test_rows_are_divided_over_all_axes_but_tensor():
    assert sharding.rows(MESH).spec == P(("data", "fsdp", "expert"))
    assert sharding.row_shards(MESH) == 4


def test_sizes_must_multiply_to_the_devices():
    with pytest.raises(ValueError, match=r"mesh data=1 · fsdp=3 · tensor=1 · expert=1 has 3 places for 1 devices"):
        sharding.make_mesh(fsdp=3, devices=jax.devices()[:1])


def test_without_a_mesh_nothing_is_laid_out():
    state = {"x": np.ones(3)}
    assert sharding.place_state(state) is state and sharding.place_rows(state) is state
    assert sharding.constrained(state) is state


@pytest.mark.slow
def test_every_mesh_gives_what_one_device_gives():
    """Loss, gradient norm, parameters and moments after 3 steps on 8 CPU devices, packed rows, ≤ 1e-5 relative."""
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": f"{root}:{root / 'tests'}",
    }
    program = [sys.executable, "-m", "training.meshes_program"]
    done = subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert len(report) == 5
    for case in report:
        assert case["parameters"] <= 1e-5 and case["losses"] <= 1e-5 and case["moved"] > 1e-2, case
