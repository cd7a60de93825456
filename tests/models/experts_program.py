"""A program: one layer of experts on one device and on meshes of eight; prints how far apart they are. For moe_test."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import tiny
from mpo_jax.models.moe import Experts
from mpo_jax.training import sharding

CONFIG = tiny.config(num_experts=8, experts_per_token=2, expert_width=8)
MESHES = {"data": {"data": 8}, "expert": {"fsdp": 2, "expert": 4}, "all": dict(fsdp=2, tensor=2, expert=2)}


@jax.jit
def evaluated(params, x, replay, cotangent):
    """The mixture, the router's probabilities, and the gradients of parameters and inputs."""

    def loss(params, x):
        mixed, routing = nnx.merge(graph, params)(x, replay)
        return jnp.sum(mixed * cotangent) + jnp.sum(routing.probabilities[..., 0]), (mixed, routing)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)


graph, shapes = nnx.split(nnx.eval_shape(lambda: Experts(CONFIG, rngs=nnx.Rngs(0))))


def main():
    jax.config.update("jax_disable_most_optimizations", True)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.4, leaf.shape), leaf.dtype), shapes)
    x, cotangent = (rng.normal(size=(8, 6, 16)).astype(np.float32) for _ in range(2))
    # Chosen by the router, forced, or in a place without an expert; one expert gets nothing.
    replay = np.where(rng.random((8, 6, 1)) < 0.5, -1, rng.integers(-1, 7, (8, 6, 2))).astype(np.int32)
    expected, report = jax.tree.map(np.asarray, evaluated(params, x, replay, cotangent)), {}
    for name, sizes in MESHES.items():
        with jax.set_mesh(sharding.make_mesh(**sizes)):
            placed = sharding.place_state({"mlp": params})["mlp"]
            batch = sharding.place_rows((x, replay, cotangent))
            found = jax.tree.map(np.asarray, evaluated(placed, *batch))
        gaps = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), found, expected)
        report[name] = max(jax.tree.leaves(gaps))
    gradients = expected[1]
    print(json.dumps({"gaps": report, "smallest": min(float(np.abs(g).max()) for g in jax.tree.leaves(gradients))}))


if __name__ == "__main__":
    main()
