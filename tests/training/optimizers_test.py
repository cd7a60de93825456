"""Optimisers and schedules against arithmetic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import tiny

from mpo_jax.models.layout import names
from mpo_jax.models.transformer import Critic, Transformer
from mpo_jax.training.optimizers import make_optimizer, muon_matrices, schedule


def first_update(name, params, grads, **options):
    optimizer = make_optimizer(name, 0.1, max_grad_norm=100.0, b2=0.99, **options)

    @functools.partial(jax.jit, compiler_options=tiny.QUICK)
    def update(grads, params):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    return update(grads, params)


def test_adams_first_update_is_the_rate_against_the_sign():
    """m̂/√v̂ = g/|g| at the first update, whatever b2."""
    updates = first_update("adam", {"w": jnp.zeros(3)}, {"w": jnp.array([2.0, -0.5, 1.0])})
    np.testing.assert_allclose(updates["w"], [-0.1, 0.1, -0.1], rtol=1e-5)


def test_adamw_also_draws_weights_to_zero():
    """−0.1 (1 + 0.5 · 4) = −0.3."""
    updates = first_update("adamw", {"w": jnp.full(1, 4.0)}, {"w": jnp.ones(1)}, weight_decay=0.5)
    np.testing.assert_allclose(updates["w"], [-0.3], rtol=1e-5)


def model_parameters():
    """Of every kind: norms, biases and smeared keys among them."""
    config = tiny.config(num_layers=1, qkv_bias=True, smeared_keys=True)
    policy, critic = (nnx.state(make(config, rngs=nnx.Rngs(0))) for make in (Transformer, Critic))
    return policy, critic


@pytest.mark.parametrize(("name", "drawn_too"), [("adamw", ["embedding.embedding", "value.kernel"]), ("muon", [])])
def test_weight_decay_draws_matrices_to_zero_and_no_norm_or_bias(name, drawn_too):
    """Without a gradient the update is the decay alone: −.1 · .5 of the parameter."""
    for params in model_parameters():
        params = jax.tree.map(lambda x: jnp.ones_like(x), params)
        updates = names(first_update(name, params, jax.tree.map(jnp.zeros_like, params), weight_decay=0.5))
        drawn = {path for path, x in updates.items() if np.any(x)}
        matrices = {path for path in updates if "blocks." in path and path.endswith(".kernel")}
        assert drawn == matrices | {path for path in updates if path.removeprefix("trunk.") in drawn_too}
        assert {path.split(".")[-1] for path in updates.keys() - drawn} >= {"scale", "bias", "smear"}
        for path in drawn:
            np.testing.assert_allclose(updates[path], -0.05, rtol=1e-5)


def tree(seed, layers=()):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "embedding": {"embedding": draw(8, 4)},
        "blocks": {"mlp": {"up": {"kernel": draw(*layers, 4, 6)}, "router": {"kernel": draw(4, 3)}}},
    }


@pytest.mark.parametrize("layers", [(), (2,)])
def test_muon_makes_the_matrices_of_blocks_orthogonal_and_leaves_the_rest_to_adam(layers):
    """Five Newton–Schulz steps bring singular values near 1 (optax's coefficients: .68 to 1.13).

    Its Adam has Nesterov's momentum: at the first update .9 · (.1 g)/(1 − .9²) + g = 1.47368 g, over |g|.
    """
    updates = first_update("muon", tree(0, layers), tree(1, layers))
    matrices = np.asarray(updates["blocks"]["mlp"]["up"]["kernel"]).reshape(-1, 4, 6)
    for matrix in matrices:
        values = np.linalg.svd(matrix, compute_uv=False)
        assert values.max() / values.min() < 1.13 / 0.68 * 1.05
    raw = np.linalg.svd(
        np.asarray(tree(1, layers)["blocks"]["mlp"]["up"]["kernel"]).reshape(-1, 4, 6)[0], compute_uv=False
    )
    assert raw.max() / raw.min() > 2
    for by_adam in (updates["embedding"]["embedding"], updates["blocks"]["mlp"]["router"]["kernel"]):
        np.testing.assert_allclose(np.abs(by_adam), 0.147368, rtol=1e-3)


def test_muon_knows_stacked_layers():
    axes = muon_matrices(tree(0, (2,)))
    assert tuple(axes["blocks"]["mlp"]["up"]["kernel"]) == (1, 2)
    assert axes["embedding"]["embedding"] is None


def test_bug_156_the_rate_goes_by_updates():
    """Warm-up 0, .5, 1 of the rate over 2 updates; then linear to 0 over the other 4."""
    rate = schedule(0.8, decay="linear", warmup=2, updates=6)
    np.testing.assert_allclose([rate(i) for i in range(7)], [0, 0.4, 0.8, 0.6, 0.4, 0.2, 0], atol=1e-6)
    half = schedule(0.8, decay="cosine", warmup=0, updates=4)
    np.testing.assert_allclose([half(0), half(2), half(4)], [0.8, 0.4, 0], atol=1e-6)
    assert schedule(0.8) == 0.8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "sgd"}, "unknown optimizer 'sgd', expected one of: adam, adamw, muon"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm is 0\.0"),
        ({"weight_decay": 0.1}, "adam has none"),
    ],
)
def test_bug_154_bad_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(**{"name": "adam", "rate": 0.1, "max_grad_norm": 1.0, "b2": 0.99} | arguments)


def test_a_warm_up_as_long_as_the_run_is_named():
    with pytest.raises(ValueError, match="warmup=5 leaves nothing of 5 updates"):
        schedule(0.1, decay="cosine", warmup=5, updates=5)
    with pytest.raises(ValueError, match="unknown decay 'step'"):
        schedule(0.1, decay="step")
