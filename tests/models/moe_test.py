"""Routing by literals, replay of the rollout's experts, and how even the load is, against `transformers`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import peers, tiny
from mpo_jax.models.mesh import MESH_AXES
from mpo_jax.models.moe import Experts, Routing, expert_load, load_balancing_loss, route, router_metrics, router_terms

LOGITS = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
CONFIG = tiny.config(num_layers=3, num_experts=4, experts_per_token=2, expert_width=8, dense_layers=(1,))
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 6)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6))


@pytest.mark.parametrize(("renormalize", "expected"), [(True, [0.731059, 0.268941]), (False, [0.643914, 0.236883])])
def test_bug_130_softmax_comes_before_the_largest_are_taken(renormalize, expected):
    # Softmax of (2, 1, 0, -1) is (.643914, .236883, .087144, .032059); .643914 / (.643914 + .236883) = .731059.
    weights, routing = route(LOGITS, 2, renormalize)
    np.testing.assert_allclose(weights, [expected], atol=1e-6)
    np.testing.assert_array_equal(routing.experts, [[0, 1]])
    np.testing.assert_allclose(routing.probabilities, [[0.643914, 0.236883, 0.087144, 0.032059]], atol=1e-6)


def test_bug_132_a_single_expert_of_weight_one_is_refused_and_two_train_the_router():
    with pytest.raises(ValueError, match="one expert a token with renormalize_experts"):
        tiny.config(num_experts=4, experts_per_token=1)
    gradient = jax.grad(lambda logits: route(logits, 2, True)[0][0, 0])(LOGITS)
    # w = p0 / (p0 + p1): its derivative is ± w (1 - w) = .731059 · .268941 = .196612 on the two, 0 elsewhere.
    np.testing.assert_allclose(gradient, [[0.196612, -0.196612, 0, 0]], atol=1e-6)


def test_bug_133_a_place_without_an_expert_overwrites_no_other():
    logits = np.log([[0.7, 0.1, 0.1, 0.1]]).astype(np.float32)
    weights, routing = route(logits, 2, False, replay=np.array([[0, -1]]))
    np.testing.assert_allclose(weights, [[0.7, 0.0]], atol=1e-6)
    dense = jnp.zeros(4).at[jnp.maximum(routing.experts[0], 0)].add(weights[0])
    np.testing.assert_allclose(dense, [0.7, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(route(logits, 2, True, replay=np.array([[0, -1]]))[0], [[1.0, 0.0]], atol=1e-6)


def test_bug_135_rows_of_minus_one_are_left_to_the_router_and_weights_are_its_own():
    logits = np.concatenate([LOGITS] * 3)
    weights, routing = route(logits, 2, False, replay=np.array([[3, 2], [-1, -1], [1, 0]]))
    np.testing.assert_array_equal(routing.experts, [[3, 2], [0, 1], [1, 0]])
    np.testing.assert_allclose(weights[0], [0.032059, 0.087144], atol=1e-6)
    np.testing.assert_allclose(weights[2], [0.236883, 0.643914], atol=1e-6)


def test_the_grouped_products_are_the_sum_over_experts():
    experts = Experts(CONFIG, rngs=nnx.Rngs(0))
    x = np.random.default_rng(1).normal(size=(2, 5, 16)).astype(np.float32)
    forced = np.random.default_rng(2).integers(-1, 4, (2, 5, 2))
    for replay in (None, forced):
        found, routing = experts(x, replay)
        gate, up, down = (
            np.asarray(p.get_value(), np.float64) for p in (experts.expert_gate, experts.expert_up, experts.expert_down)
        )
        expected = np.zeros(x.shape)
        for place in np.ndindex(2, 5):
            p = np.exp(x[place] @ np.asarray(experts.router.kernel.get_value(), np.float64))
            p = p / p.sum()
            used = routing.experts[place]
            total = sum(p[e] for e in used if e >= 0)
            for e in used:
                h = x[place] @ gate[e]
                if e >= 0:
                    expected[place] += p[e] / total * ((h / (1 + np.exp(-h)) * (x[place] @ up[e])) @ down[e])
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_on_every_mesh_the_experts_give_what_they_give_on_one_device():
    """Mixture, routing and all gradients on 8 devices over data, fsdp and expert, and fsdp, tensor and expert."""
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": f"{root}:{root / 'tests'}",
    }
    program = [sys.executable, "-m", "models.experts_program"]
    done = subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["gaps"].keys() == {"data", "expert", "all"} and report["smallest"] > 1.0
    assert max(report["gaps"].values()) < 1e-4, report  # of values that reach some tens: 1e-5 relative


def test_experts_that_an_axis_does_not_divide_are_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 3), MESH_AXES)
    experts = Experts(CONFIG, rngs=nnx.Rngs(0))
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(ValueError, match="num_experts=4 cannot be divided over expert=3"),
    ):
        jax.eval_shape(lambda x: experts(x)[0], jax.ShapeDtypeStruct((3, 2, 16), jnp.float32))


@jax.jit
def routed(params, replay):
    model = nnx.merge(tiny.graph(CONFIG), params)
    hidden, _, routing = model.routed(TOKENS, POSITIONS, np.zeros_like(TOKENS), replay=replay)
    return hidden, routing


def test_replaying_the_rollouts_experts_changes_nothing_and_others_do():
    params = tiny.params(CONFIG)
    live = -np.ones((2, 2, 6, 2), np.int32)  # layers 0 and 2 have experts
    hidden, routing = routed(params, live)
    assert routing.experts.shape == (2, 2, 6, 2) and routing.probabilities.shape == (2, 2, 6, 4)
    again, _ = routed(params, np.asarray(routing.experts))
    np.testing.assert_array_equal(again, hidden)
    swapped = live.copy()
    swapped[1, 0, 3] = (np.asarray(routing.experts)[1, 0, 3] + 1) % 4
    other, forced = routed(params, swapped)
    changed = np.any(np.asarray(other) != np.asarray(hidden), axis=-1)
    assert np.argwhere(changed).tolist() == [[0, 3]], "the last layer's choice concerns its own token alone"
    np.testing.assert_array_equal(np.asarray(forced.experts)[1, 0, 3], swapped[1, 0, 3])


def test_bug_135_replay_of_another_length_is_refused():
    model = nnx.merge(tiny.graph(CONFIG), tiny.params(CONFIG))
    with pytest.raises(ValueError, match=r"replay has shape \(2, 2, 5, 2\), expected \(2, 2, 6, 2\)"):
        model.routed(TOKENS, POSITIONS, np.zeros_like(TOKENS), replay=np.zeros((2, 2, 5, 2), np.int32))


def test_load_balancing_loss_is_that_of_transformers():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 2, 5, 4)).astype(np.float32)  # L, B, T, E
    mask = rng.random((2, 5)) < 0.7
    probabilities = jax.nn.softmax(logits)
    routing = Routing(probabilities=probabilities, experts=jax.lax.top_k(probabilities, 2)[1].astype(jnp.int32))
    theirs = load_balancing_loss_func(
        tuple(peers.torch.tensor(x.reshape(10, 4)) for x in logits), 4, 2, peers.torch.tensor(mask)
    )
    np.testing.assert_allclose(load_balancing_loss(routing, mask), theirs.numpy(), rtol=1e-6)


def test_load_and_metrics_of_an_even_and_of_a_collapsed_router():
    mask = np.array([[True, True, False]])
    even = Routing(probabilities=np.full((1, 3, 4), 0.25, np.float32), experts=np.array([[[0, 1], [2, 3], [0, 0]]]))
    np.testing.assert_allclose(expert_load(even, mask), [0.5] * 4)
    np.testing.assert_allclose(load_balancing_loss(even, mask), 2.0, rtol=1e-6)  # 4 · Σ ½ · ¼ = k
    found = router_metrics(even, mask)
    np.testing.assert_allclose([found["max_load"], found["idle_experts"]], [1.0, 0.0])
    np.testing.assert_allclose(found["router_entropy"], np.log(4), rtol=1e-6)
    one_sided = np.tile(np.array([0.5, 0.5, 0, 0], np.float32), (1, 3, 1))
    collapsed = Routing(probabilities=one_sided, experts=np.array([[[0, 1], [1, 0], [2, 3]]]))
    found = router_metrics(collapsed, mask)
    np.testing.assert_allclose([found["max_load"], found["idle_experts"]], [2.0, 0.5])  # load 1, 1, 0, 0; mean ½
    np.testing.assert_allclose(load_balancing_loss(collapsed, mask), 4.0, rtol=1e-6)  # 4 · (1 · ½ + 1 · ½)


def test_terms_of_microbatches_add_up_where_the_load_is_the_same():
    mask = np.array([[True, True, True, False], [True, False, False, False]])  # 3 and 1 of 4 tokens
    probabilities = jax.nn.softmax(np.random.default_rng(0).normal(size=(1, 2, 4, 4)).astype(np.float32))
    experts = np.broadcast_to(np.array([0, 1]), (1, 2, 4, 2))
    whole = router_terms(Routing(probabilities=probabilities, experts=experts), mask, np.asarray(4))
    halves = [Routing(probabilities=probabilities[:, [b]], experts=experts[:, [b]]) for b in (0, 1)]
    parts = [router_terms(half, mask[[b]], np.asarray(4)) for b, half in enumerate(halves)]
    for name, x in whole.items():
        np.testing.assert_allclose(parts[0][name] + parts[1][name], x, rtol=1e-6, err_msg=name)
