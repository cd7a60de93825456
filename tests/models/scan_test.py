"""Scanned, recomputed or one block after the other: the same numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import tiny
from mpo_jax.models import weights
from mpo_jax.models.transformer import Cache, Transformer
from mpo_jax.models.weights import stacked, unstacked

LOOP = tiny.config(num_layers=3)
SCAN = dataclasses.replace(LOOP, scan_layers=True)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 7))
PLACE = np.broadcast_to(np.arange(7), (2, 7))
IDS = np.zeros((2, 7), np.int32)


def gradient(config, params):
    def loss(params):
        return jnp.sum(tiny.forward(config, params, TOKENS, PLACE, IDS) ** 2)

    return jax.jit(jax.value_and_grad(loss), compiler_options=tiny.QUICK)(params)


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("remat", ["dots", "none"])
def test_scanned_and_recomputed_blocks_give_the_loops_gradient(remat):
    params = tiny.params(LOOP)
    value, grads = gradient(LOOP, params)
    close(gradient(dataclasses.replace(SCAN, remat=remat), stacked(params)), (value, stacked(grads)))


def test_recomputing_without_a_scan_too():
    params = tiny.params(LOOP)
    close(gradient(dataclasses.replace(LOOP, remat="none"), params), gradient(LOOP, params))


def test_parameters_go_there_and_back():
    params = tiny.params(LOOP)
    there = stacked(params)
    assert jax.tree.map(jnp.shape, there) == jax.tree.map(
        jnp.shape, nnx.state(nnx.eval_shape(lambda: Transformer(SCAN, rngs=nnx.Rngs(0))))
    )
    back = weights.flatten(unstacked(there))
    assert back.keys() == weights.flatten(params).keys()
    assert all((back[name] == x).all() for name, x in weights.flatten(params).items())


def test_stacked_blocks_read_into_a_cache_too():
    params, found = tiny.params(LOOP), []
    for config, mine in ((LOOP, params), (SCAN, stacked(params))):
        model = nnx.merge(tiny.graph(config), mine)
        found.append(model(TOKENS, PLACE, cache=Cache.empty(config, 2, 8)))
    close(*found)


def test_an_unknown_remat_is_named():
    with pytest.raises(ValueError, match=r"remat='some', expected one of: all, dots, none"):
        tiny.config(remat="some")
