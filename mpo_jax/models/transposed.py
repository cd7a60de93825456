"""Linear layers that hold their kernels transposed, as a CPU multiplies few rows by them fastest.

Of the two factors of a product XLA's library for CPUs copies the second into an order of its own, in every call. Of few
rows x and a large kernel W the copy of W costs more than the product itself; of Wᵀ xᵀ only x is copied.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mpo_jax.models.config import TransformerConfig
from mpo_jax.models.transformer import Transformer
from mpo_jax.types import Array

FEW_ROWS = 128  # from there on it is x W that is faster


def graph_of(config: TransformerConfig) -> nnx.GraphDef:
    """The model's graph, for parameters with transposed kernels."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    for path, module in nnx.iter_graph(model):
        if isinstance(module, nnx.Linear) and _is_transposed(path):
            module.dot_general = dot
    return nnx.split(model)[0]


@jax.jit
def transpose(params: nnx.State) -> nnx.State:
    """The parameters with the kernels of all blocks transposed, [in,out] to [out,in]; of experts none are."""
    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state(
        [
            (path, leaf.replace(leaf.get_value().mT) if path[-1] == "kernel" and _is_transposed(path[:-1]) else leaf)
            for path, leaf in flat
        ]
    )


def _is_transposed(path: tuple) -> bool:
    return path[0] == "blocks" and path[-1] != "router"


def dot(x: Array, kernel: Array, dimensions: tuple, *, precision: jax.lax.Precision | None = None, **_) -> Array:
    """x[...,I] times the transpose of kernel[O,I], float[...,O]: what `nnx.Linear` calls for `jax.lax.dot_general`."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) < FEW_ROWS:
        out = jax.lax.optimization_barrier(jnp.matmul(kernel, rows.T, precision=precision)).T  # or XLA turns it round
    else:
        out = jnp.matmul(rows, kernel.T, precision=precision)
    return out.reshape(*x.shape[:-1], -1)
