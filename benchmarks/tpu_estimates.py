"""Compiles advantages for a TPU that need not be there, and prints what XLA expects them to take. Nothing is measured.

.venv/bin/python -m benchmarks.tpu_estimates
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import SingleDeviceSharding

from benchmarks import peers
from mpo_jax import kernels
from mpo_jax.training import hlo, plan

_TOPOLOGY = flags.DEFINE_string("topology", "v5:2x2x1", "TPU of one of whose chips a core is taken.")
_SHAPES = flags.DEFINE_list("shapes", ["64x4096", "256x8192"], "Rows × tokens.")
_CLOCK = flags.DEFINE_float("clock", 1.75e9, "Cycles a second; 1.75 GHz is v5p's.")


def multiscale(rewards: jax.Array, values: jax.Array, action_mask: jax.Array, turn_ids: jax.Array) -> jax.Array:
    """Multi-scale advantages, whitened."""
    return kernels.whiten(jax.vmap(kernels.multiscale_advantages)(rewards, values, action_mask, turn_ids), action_mask)


def tunix(rewards: jax.Array, values: jax.Array, action_mask: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Token GAE of tunix, whitened."""
    return peers.tunix().compute_gae_advantages(rewards, values, action_mask.astype(jnp.float32), 1.0, 0.95)


def cycles(function: Callable, shape: tuple[int, int], device: jax.Device) -> int:
    """What XLA expects of a function of rewards, values, mask and turn ids."""
    array = functools.partial(jax.ShapeDtypeStruct, shape, sharding=SingleDeviceSharding(device))
    lowered = jax.jit(function).lower(*(array(dtype) for dtype in (jnp.float32, jnp.float32, jnp.bool, jnp.int32)))
    return hlo.estimated_cycles(lowered.compile().as_text())


def main(_) -> None:
    device = plan.devices_of(_TOPOLOGY.value)[0]
    for text in _SHAPES.value:
        shape = tuple(map(int, text.split("x")))
        for name, function in (("mpo_jax, multi-scale", multiscale), ("tunix, GAE", tunix)):
            milliseconds = cycles(function, shape, device) / _CLOCK.value * 1e3
            print(f"| advantages [{shape[0]},{shape[1]}] | {name} | {milliseconds:.3f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
