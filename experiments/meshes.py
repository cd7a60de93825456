"""A run's mesh from its flag, and its train step over shapes alone."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import Mesh

from experiments import parts
from experiments.configs import search
from mpo_jax.algorithms import Algorithm
from mpo_jax.models.actor_critic import Models
from mpo_jax.models.mesh import MESH_AXES
from mpo_jax.models.transformer import TransformerConfig
from mpo_jax.models.weights import shapes
from mpo_jax.training import plan, sharding
from mpo_jax.training.cluster import Cluster
from mpo_jax.training.state import initial_state
from mpo_jax.training.step import make_train_step


def make_mesh(sizes: str, devices: Sequence[Any]) -> Mesh:
    """The mesh of sizes such as "fsdp=32,tensor=2"; without any, all devices are on fsdp.

    Raises:
      ValueError: an axis that there is not, or sizes that do not multiply to the number of devices.
    """
    given = [part.partition("=")[::2] for part in (sizes or f"fsdp={len(devices)}").split(",")]
    known = dict(given)
    if foreign := sorted(known.keys() - set(MESH_AXES)):
        raise ValueError(f"mesh {sizes!r} names {foreign}, expected axes of: {', '.join(MESH_AXES)}")
    if len(known) < len(given) or not all(size.isdecimal() and int(size) for size in known.values()):
        raise ValueError(f"mesh {sizes!r}, expected each axis once with its size, as in fsdp=32,tensor=2")
    return sharding.make_mesh(**{axis: int(size) for axis, size in known.items()}, devices=devices)


def make_cluster(config: ml_collections.ConfigDict, *, patience: float, timeout: float) -> Cluster:
    """The devices of a run: the configured mesh; without one, all on fsdp where there are several processes.

    Raises:
      ValueError: a mesh that does not fit the devices.
    """
    mesh = make_mesh(config.mesh, jax.devices()) if config.mesh or jax.process_count() > 1 else None
    return Cluster(mesh, patience=patience, timeout=timeout)


def make_program(config: TransformerConfig, algorithm: Algorithm, mesh: Mesh, microbatches: int = 1) -> plan.Program:
    """The train step of a shape on a mesh: parameters and optimisers in float32, computing in bfloat16."""
    models = dataclasses.replace(Models.of(config), compute_dtype=jnp.bfloat16)
    optimizers = parts.make_optimizers(search.get_config())
    state = jax.eval_shape(lambda params: initial_state(config, params, algorithm, optimizers), shapes(config))
    step = make_train_step(algorithm, models, optimizers, microbatches)
    return plan.Program(config=config, mesh=mesh, state=plan.placed(mesh, state), train_step=step)
