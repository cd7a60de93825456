"""Parameters as flat names and arrays, for safetensors and back."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpo_jax.models.transformer import Transformer, TransformerConfig
from mpo_jax.types import Array


def shapes(config: TransformerConfig, dtype=jnp.float32, of: type[nnx.Module] = Transformer) -> nnx.State:
    """The parameters of a transformer, or of a critic, as shapes, for `unflatten` and `eval_shape`."""
    like = nnx.state(nnx.eval_shape(lambda: of(config, rngs=nnx.Rngs(0))))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), like)


def flatten(params: nnx.State) -> dict[str, np.ndarray]:
    """Parameters by dotted name, such as `blocks.0.mlp.up.kernel`."""
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(params)}


def unflatten(like: nnx.State, arrays: Mapping[str, Array]) -> nnx.State:
    """Parameters of the structure and dtypes of `like` (shapes suffice) with the values of `arrays`.

    Raises:
      ValueError: a name is missing or foreign, or a shape differs; the message names it.
    """
    expected = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(like)}
    if wrong := sorted(expected.keys() ^ arrays.keys()):
        kind = "missing" if wrong[0] in expected else "unexpected"
        raise ValueError(f"{kind} parameter {wrong[0]!r} ({len(wrong)} names differ in all)")
    flat = []
    for path, leaf in nnx.to_flat_state(like):
        name = ".".join(map(str, path))
        if arrays[name].shape != leaf.get_value().shape:
            raise ValueError(f"parameter {name!r} has shape {arrays[name].shape}, expected {leaf.get_value().shape}")
        flat.append((path, leaf.replace(jnp.asarray(arrays[name], leaf.get_value().dtype))))
    return nnx.from_flat_state(flat)


def stacked(params: nnx.State) -> nnx.State:
    """The parameters of `scan_layers=False` as those of `scan_layers=True`: block i is entry i of a leading axis."""
    layers: dict[tuple, list] = {}
    for path, leaf in nnx.to_flat_state(params):
        whole = tuple(key for key in path if not isinstance(key, int))
        layers.setdefault(whole, []).append(leaf)
    join = [
        (path, leaves[0].replace(jnp.stack([x.get_value() for x in leaves])) if "blocks" in path else leaves[0])
        for path, leaves in layers.items()
    ]
    return nnx.from_flat_state(join)


def unstacked(params: nnx.State) -> nnx.State:
    """Undoes `stacked`."""
    flat = []
    for path, leaf in nnx.to_flat_state(params):
        if "blocks" not in path:
            flat.append((path, leaf))
            continue
        place = path.index("blocks") + 1
        for index, value in enumerate(leaf.get_value()):
            flat.append(((*path[:place], index, *path[place:]), leaf.replace(value)))
    return nnx.from_flat_state(sorted(flat, key=lambda item: [str(key).zfill(6) for key in item[0]]))
