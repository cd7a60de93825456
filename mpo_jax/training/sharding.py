"""Where everything lies: one mesh of four axes, and one table from a parameter's name to the axes of its dimensions."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mpo_jax.models.mesh import MESH_AXES, ROWS

AnyMesh = Mesh | AbstractMesh

PARAMETERS: dict[str, P] = {  # the end of a parameter's name; one that no line names is on every device
    "embedding.embedding": P(None, ("fsdp", "tensor")),
    "attention.query.kernel": P("fsdp", "tensor"),
    "attention.key.kernel": P("fsdp", "tensor"),
    "attention.value.kernel": P("fsdp", "tensor"),
    "attention.output.kernel": P("tensor", "fsdp"),
    "mlp.gate.kernel": P("fsdp", "tensor"),
    "mlp.up.kernel": P("fsdp", "tensor"),
    "mlp.down.kernel": P("tensor", "fsdp"),
    "mlp.expert_gate": P("expert", "fsdp", "tensor"),
    "mlp.expert_up": P("expert", "fsdp", "tensor"),
    "mlp.expert_down": P("expert", "tensor", "fsdp"),
    "output.kernel": P(("fsdp", "tensor"), None),
}


def make_mesh(
    *, data: int = 1, fsdp: int = 1, tensor: int = 1, expert: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """The mesh of a run.

    Args:
      data: copies of everything; each takes its own rows.
      fsdp: parts of every parameter along its width; each takes its own rows too.
      tensor: parts of the heads and of the hidden layers.
      expert: parts of the experts; each takes its own rows too.
      devices: those to lay out, by default all of all processes.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dict(zip(MESH_AXES, (data, fsdp, tensor, expert), strict=True))
    if math.prod(sizes.values()) != len(devices):
        shape = " · ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(f"mesh {shape} has {math.prod(sizes.values())} places for {len(devices)} devices")
    # Neighbours on an axis are neighbours in the machine.
    places = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    return Mesh(places, MESH_AXES)


def row_shards(mesh: AnyMesh) -> int:
    """Among how many devices the rows of a batch are divided."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def rows(mesh: AnyMesh) -> NamedSharding:
    """Of every array whose first dimension is the rows of a batch."""
    return NamedSharding(mesh, P(ROWS))


def of_parameter(mesh: AnyMesh, name: str, shape: Sequence[int]) -> NamedSharding:
    """Of the parameter of a dotted name, and of whatever an optimiser keeps of it under the same ending.

    The layers of stacked blocks, a dimension before the table's, are whole on every device; so is a dimension that its
    axes do not divide.
    """
    spec = next((spec for end, spec in PARAMETERS.items() if name.endswith(end)), P())
    axes = zip((None,) * (len(shape) - len(spec)) + tuple(spec), shape, strict=True)
    return NamedSharding(mesh, P(*(axis if _divides(mesh, axis, size) else None for axis, size in axes)))


def of_state(mesh: AnyMesh, state: Any) -> Any:
    """Of a train state, or of a part of one: a tree of shardings, for arrays or for shapes."""
    return jax.tree_util.tree_map_with_path(lambda path, x: of_parameter(mesh, _name(path), x.shape), state)


def constrained(state: Any) -> Any:
    """Within a jitted function: the state laid out by the table on the mesh in use; itself where none is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return state if mesh.empty else jax.lax.with_sharding_constraint(state, of_state(mesh, state))


def place_state(state: Any) -> Any:
    """Lays a state that every process holds whole out on the mesh in use (`jax.set_mesh`); itself where none is set."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return state

    def place(x, sharding):
        return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])

    return jax.tree.map(place, state, of_state(mesh, state))


def place_rows(batch: Any) -> Any:
    """Lays out a batch on the mesh in use, each process giving as many rows of its own; itself where none is set.

    Raises:
      ValueError: the devices do not divide its rows.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return batch
    number, shards = len(jax.tree.leaves(batch)[0]) * jax.process_count(), row_shards(mesh)
    if number % shards:
        raise ValueError(f"a batch of {number} rows cannot be divided among {shards} devices: choose row_multiple so")
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows(mesh), np.asarray(x)), batch)


def gathered(tree: Any) -> Any:
    """Arrays that this process can read whole, whatever they were spread over; all processes must call it."""
    if all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
        return tree
    return multihost_utils.process_allgather(tree, tiled=True)


def _divides(mesh: AnyMesh, axis: str | tuple[str, ...] | None, size: int) -> bool:
    axes = (axis,) if isinstance(axis, str) else axis or ()
    return size % math.prod(mesh.shape[a] for a in axes) == 0


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
