"""Multi-scale advantages with whitening beside token GAE with whitening of tunix and verl."""

import jax
import jax.numpy as jnp
import torch

from benchmarks import measure, peers, rows
from mpo_jax import kernels


@jax.jit
def multiscale(rewards: jax.Array, values: jax.Array, action_mask: jax.Array, turn_ids: jax.Array) -> jax.Array:
    """Credit of a batch, from arrays as a rollout leaves them: everything about turns is found in here.

    Rows in groups, whose arrays fit into the cache.
    """
    data = rewards, values, action_mask, turn_ids
    advantages = jax.lax.map(lambda row: kernels.multiscale_advantages(*row), data, batch_size=64)
    return kernels.whiten(advantages, action_mask)


def case(num_rows: int, length: int, repeats: int) -> measure.Case:
    batch = rows.draw(num_rows, length)
    data = [jnp.asarray(batch[name]) for name in ("rewards", "values", "action_mask", "turn_ids")]
    mask = data[2].astype(jnp.float32)
    gae = jax.jit(peers.tunix().compute_gae_advantages)
    tensors = [torch.tensor(batch[name]) for name in ("rewards", "values", "action_mask")]
    return measure.Case(
        f"advantages [{num_rows},{length}]",
        {
            "mpo_jax, multi-scale": lambda: multiscale(*data),
            "tunix, GAE": lambda: gae(data[0], data[1], mask, 1.0, 0.95),
            "verl, GAE": lambda: peers.verl().compute_gae_advantage_return(*tensors[:2], tensors[2].float(), 1.0, 0.95),
        },
        repeats,
    )
