"""Rows sorted into groups, and one matrix product for each group."""

import jax
import jax.numpy as jnp

from mpo_jax.types import Array

TILE = (512, 1024, 1024)  # rows, width and columns at a time, on a TPU


def sorted_places(groups: Array) -> tuple[Array, Array]:
    """The order in which the rows of int[N] groups stand group by group, and where each row then stands, int32[N]."""
    rows = jnp.arange(len(groups), dtype=jnp.int32)
    # Group and row in one number: TPUs sort single arrays, and compile that, in a fraction of the time.
    order = jax.lax.sort(groups.astype(jnp.int32) * len(rows) + rows, is_stable=False) % len(rows)
    return order, jnp.zeros_like(rows).at[order].set(rows, unique_indices=True)


@jax.custom_vjp
def permuted(x: Array, order: Array, places: Array) -> Array:
    """x[order] of x[N,…], where x[order][places] = x: so that the gradient is gathered too, and not scattered."""
    return x[order]


permuted.defvjp(lambda x, order, places: (x[order], places), lambda places, g: (g[places], None, None))


def grouped_dot(x: Array, weights: Array, sizes: Array) -> Array:
    """x_n @ weights[g] for the rows n of each group g.

    Args:
      x: [N,D], group by group.
      weights: [G,D,F].
      sizes: int[G+1], rows of each group; those of the last one get 0.

    Returns:
      [N,F].
    """
    return jax.lax.platform_dependent(x, weights, sizes.astype(jnp.int32), tpu=_on_tpu, default=_anywhere)


def _anywhere(x: Array, weights: Array, sizes: Array) -> Array:
    return jax.lax.ragged_dot(x, weights, sizes[:-1])


def _on_tpu(x: Array, weights: Array, sizes: Array) -> Array:
    """By a kernel that comes with jax: XLA's own gradient of a ragged product multiplies every row with every group."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # a second to import

    rows, tile = len(x), TILE[0] if len(x) % TILE[0] == 0 else 128
    more = -rows % tile
    sizes = sizes.at[-1].add(more)
    tiling = (tile, *TILE[1:])
    return gmm(jnp.pad(x, ((0, more), (0, 0))), weights, sizes, x.dtype, tiling, jnp.int32(0))[:rows]
