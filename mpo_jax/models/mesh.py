"""The axes of a mesh, and how activations lie on it."""

import jax
from jax.sharding import PartitionSpec

from mpo_jax.types import Array

MESH_AXES = ("data", "fsdp", "tensor", "expert")
ROWS = ("data", "fsdp", "expert")  # the axes over which the rows of a batch are divided


def by_rows(x: Array, *more_axes: str) -> Array:
    """x[B,…], its first dimension divided over the mesh in use; x itself where none is set (`jax.set_mesh`)."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec((*ROWS, *more_axes)))
