"""Plans: figures by hand, and (where libtpu is installed) the compiler's against the estimate."""

import importlib.util

import jax
import numpy as np
import pytest
from models import tiny

from experiments import meshes
from experiments.configs import qwen3
from mpo_jax import algorithms
from mpo_jax.models import weights
from mpo_jax.training import plan

needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="the compiler for TPUs is not installed"
)


def program(config, topology="v5:2x2x1", mesh="", algorithm="mpo", microbatches=1):
    found = meshes.make_mesh(mesh, plan.devices_of(topology))
    return meshes.make_program(config, algorithms.from_config(algorithm), found, microbatches)


def test_active_parameters_of_qwen3_4b():
    """36 · (2560·128·(2·32+2·8) + 3·2560·9728) + 151936·2560 ; published: 4.0 B, 3.6 B without embedding."""
    count = plan.active_parameters(qwen3.config("qwen3_4b"))
    assert count == 36 * (2560 * 128 * 80 + 3 * 2560 * 9728) + 151_936 * 2560 == 4_022_272_000
    assert count - 151_936 * 2560 == pytest.approx(3.6e9, rel=0.02)


def test_active_parameters_of_qwen3_30b_a3b():
    """48 · (2048·128·(2·32+2·4) + 2048·128 + 8·3·2048·768) + 151936·2048; published: 3.3 B with the embedding too.

    In all, with 128 experts, the embedding and 2·48 + 1 norms of 2048 and 2·48 of 128: 30.5 B, as published.
    """
    config = qwen3.config("qwen3_30b_a3b")
    count = plan.active_parameters(config)
    assert count == 48 * (2048 * 128 * 72 + 2048 * 128 + 24 * 2048 * 768) + 151_936 * 2048 == 3_041_656_832
    assert count + 151_936 * 2048 == pytest.approx(3.3e9, rel=0.02)
    whole = sum(np.prod(x.shape, dtype=int) for x in jax.tree.leaves(weights.shapes(config)))
    more = 48 * 120 * 3 * 2048 * 768 + 151_936 * 2048 + 97 * 2048 + 96 * 128
    assert whole == count + more == pytest.approx(30.5e9, rel=0.01)


def test_a_cpu_is_no_plan():
    with pytest.raises(ValueError, match="no memory and peak known of 'cpu'"):
        plan.devices_of("local")


def test_an_unknown_axis_is_named():
    with pytest.raises(ValueError, match=r"names \['model'\], expected axes of: data, fsdp, tensor, expert"):
        meshes.make_mesh("model=1", jax.devices()[:1])
    for sizes in ("fsdp=a", "fsdp", "fsdp=0", "fsdp=2,fsdp=1"):
        with pytest.raises(ValueError, match=f"mesh '{sizes}', expected each axis once with its size"):
            meshes.make_mesh(sizes, jax.devices()[:1])


@needs_libtpu
def test_an_unknown_topology_is_named():
    with pytest.raises(ValueError, match="topology 'v5:banana'"):
        plan.devices_of("v5:banana")


@needs_libtpu
def test_the_estimate_of_qwen3_4b_on_four_chips():
    """State: policy and critic of 4.02e9 float32 and two moments each, 12 bytes · 2 · 4.02e9 / 4 devices = 24.1e9."""
    found = program(qwen3.config("qwen3_4b"))
    report = plan.estimate(found, rows=4, tokens=1024)
    assert report["arguments"] == pytest.approx(24.1e9, rel=0.01)
    assert report["hbm"] == 95e9 and report["fits"]
    assert report["hbm_spare"] == pytest.approx(1 - report["peak"] / 95e9)
    assert report["peak"] - report["arguments"] == pytest.approx(1.2 * report["temporaries"])
    assert "1.2 times the temporaries" in plan.table(report)
    # 6 · (policy with head + critic without) + 2 · 6 · 36 · 32 · 128 · 1024
    assert report["flops_per_token"] == 6 * (2 * 4_022_272_000 - 151_936 * 2560) + 2 * 6 * 36 * 4096 * 1024
    # 4 devices at 459e12 FLOP/s and 10,000 tokens/s
    assert plan.utilisation(found, 1024, 1e4) == pytest.approx(report["flops_per_token"] * 1e4 / (4 * 459e12))
    with pytest.raises(ValueError, match="rows=3 cannot be divided among the 4 places for rows"):
        plan.estimate(found, rows=3, tokens=1024)


@needs_libtpu
def test_a_sweep_doubles_while_a_tenth_is_free():
    found = program(qwen3.config("qwen3_4b"))
    best = plan.sweep(found, "rows", 4, 1024, plan.estimate)
    assert best["hbm_spare"] >= 0.1 > plan.estimate(found, 2 * best["rows"], 1024)["hbm_spare"]


@needs_libtpu
@pytest.mark.slow
def test_the_compilers_figures_bear_out_the_estimate():
    """The real train step of a small model, compiled for 4 TPU chips: arguments to the byte but for the TPU's tiles."""
    config = tiny.config(
        vocab_size=2048,
        width=256,
        num_heads=2,
        num_kv_heads=1,
        head_dim=128,
        mlp_width=512,
        scan_layers=True,
        remat="none",
    )
    found = program(config)
    compiled, estimate = (f(found, rows=4, tokens=128) for f in (plan.compiled, plan.estimate))
    assert compiled["arguments"] == pytest.approx(estimate["arguments"], rel=0.05)
    assert compiled["donated_share"] > 0.9  # all but the batch
    assert compiled["collectives"] and all(x["bytes"] > 0 for x in compiled["collectives"].values())
    assert compiled["hbm_spare"] == 1 - compiled["peak"] / 95e9


def test_parameters_are_those_of_the_model():
    config = tiny.config()
    shapes = jax.tree.leaves(tiny.params(config))
    # The norms, and the embedding as a head: it is counted once where it is tied.
    norms = sum(np.prod(x.shape) for x in shapes if x.ndim == 1)
    assert plan.active_parameters(config) == sum(np.prod(x.shape) for x in shapes) - norms


def test_copies_in_another_layout():
    """On 2 devices: queries [3,8,256] and both moments, 3 · 24,576 bytes; 2 of [64,32] filled up to 128, 2 · 32,768."""
    mesh = jax.sharding.AbstractMesh((1, 2, 1, 1), ("data", "fsdp", "tensor", "expert"))
    shapes = {
        "blocks": {"attention": {"query": {"kernel": (3, 16, 256)}, "output": {"kernel": (3, 256, 256)}}},
        "embedding": {"embedding": (64, 64)},
        "final_norm": {"scale": (64,)},
    }
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))
    assert plan.layout_copies(plan.placed(mesh, state)) == 3 * 24_576 + 2 * 32_768
