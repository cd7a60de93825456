"""Transposed kernels: the product against float64, the model against itself with kernels as they were."""

import jax
import numpy as np
import pytest
from flax import nnx

from models import tiny
from mpo_jax.models import transposed, weights
from mpo_jax.models.transformer import Transformer

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_width": 8, "dense_layers": (1,)}


@pytest.mark.parametrize("shape", [(3, 1), (transposed.FEW_ROWS,), (5, 40)], ids=["few", "at_the_limit", "many"])
def test_the_product_is_that_of_float64(shape):
    rng = np.random.default_rng(0)
    x, kernel = (rng.normal(size=size).astype(np.float32) for size in ((*shape, 6), (4, 6)))
    found = jax.jit(transposed.dot, static_argnums=2)(x, kernel, (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(found, x.astype(np.float64) @ kernel.astype(np.float64).T, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"qkv_bias": True}, {"tied_embeddings": False}, EXPERTS, {"scan_layers": True}],
    ids=["biases", "untied", "experts", "scan"],
)
def test_the_hidden_states_are_those_of_the_model_with_kernels_as_they_were(changes):
    config = tiny.config(**changes)
    graph, params = nnx.split(Transformer(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 6)).astype(np.int32)
    place, one = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6)), np.zeros((2, 6), np.int32)
    turned = transposed.transpose(params)
    found, expected = (
        nnx.merge(*model)(tokens, place, one)[0] for model in ((transposed.graph_of(config), turned), (graph, params))
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    new, old = weights.flatten(turned), weights.flatten(params)
    names = {name for name in old if new[name].shape != old[name].shape}
    assert any(name.endswith("mlp.up.kernel") for name in names)
    assert all(name.startswith("blocks.") and "router" not in name and "expert_" not in name for name in names)
