"""A batch a part at a time: rows split so that every device keeps its own, losses and gradients added up."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpo_jax.models.mesh import by_rows
from mpo_jax.types import Array

Metrics = dict[str, Array]


def split_rows(tree, num_microbatches: int):
    """[B, …] leaves to [M, B/M, …]; microbatch m has rows m, m+M, …, so that every device keeps its own rows."""
    return jax.tree.map(lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), tree)


def join_rows(tree):
    """Undoes `split_rows`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)


def select_rows(tree, rows: Array):
    """Some rows of [B, …] leaves, divided over the devices again."""
    return jax.tree.map(lambda x: by_rows(x[rows]), tree)


def accumulate(loss: Callable, params: Any, data: tuple, num_microbatches: int) -> tuple[Array, Metrics, Any]:
    """A loss that is a weighted sum over rows, its metrics and its gradient, summed over microbatches: exactly."""
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def one(_, rows):
        (value, metrics), grads = value_and_grad(params, *rows)
        return None, (value, metrics, grads)

    if num_microbatches == 1:
        (value, metrics), grads = value_and_grad(params, *data)
        return value, metrics, grads
    # Summed in the carry, so that one gradient is alive at a time.
    first = jax.eval_shape(lambda: one(None, jax.tree.map(lambda x: x[0], split_rows(data, num_microbatches)))[1])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)

    def add(total, rows):
        return jax.tree.map(jnp.add, total, one(None, rows)[1]), None

    (value, metrics, grads), _ = jax.lax.scan(add, zeros, split_rows(data, num_microbatches))
    return value, metrics, grads
