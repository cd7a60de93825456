"""One clear error before any compile: shapes and dtypes always, contents where they are known (not traced)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from mpo_jax.types import Array

Scalar = float | int | Shaped[Array, ""]

_DTYPES = {"mask": (jnp.bool_, "bool"), "ids": (jnp.integer, "an integer dtype"), "": (jnp.floating, "a float dtype")}


def check_aligned(axes: str, **fields: Array | None) -> None:
    """Checks that all fields share one shape, and that each has the dtype that its name promises.

    `*_mask`, `mask`, `valid` are bool, `*_ids`, `ids`, `targets` are integers, the rest are floats. None is skipped.

    Args:
      axes: names of the axes, e.g. "B T"; their number is the rank.
      **fields: the arrays by name; the first one sets the shape.

    Raises:
      ValueError: naming the field, what it is and what was expected.
    """
    fields = {name: x for name, x in fields.items() if x is not None}
    rank, shape = len(axes.split()), None
    for name, x in fields.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise ValueError(f"{name} is a {type(x).__name__}, expected an array of shape [{axes}]")
        if len(x.shape) != rank:
            raise ValueError(f"{name} has shape {x.shape}, expected rank {rank}: [{axes}] (vmap over further axes)")
        first, shape = (name, x.shape) if shape is None else (first, shape)
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, expected {shape} as {first}")
        kind, wanted = _DTYPES[_kind(name)]
        if not jnp.issubdtype(x.dtype, kind):
            raise ValueError(f"{name} has dtype {x.dtype}, expected {wanted}")


def check_turns(action_mask: Array, turn_ids: Array, sequence_ids: Array | None = None) -> None:
    """Checks that turn ids are given on every action token, never decrease, and never span two sequences.

    Raises:
      ValueError: naming the first token at fault. Traced arrays pass.
    """
    check_segments(turn_ids, action_mask, len(turn_ids), name="turn_ids")
    if sequence_ids is not None:
        check_segments(sequence_ids, action_mask, len(sequence_ids), name="sequence_ids")
    if _traced(action_mask, turn_ids, sequence_ids):
        return
    given = np.flatnonzero(np.asarray(turn_ids) >= 0)
    turns = np.asarray(turn_ids)[given]
    _first(np.diff(turns) < 0, given[1:], "turn_ids decrease at token {}: they must grow along the row")
    if sequence_ids is not None:
        moved = (np.diff(turns) == 0) & (np.diff(np.asarray(sequence_ids)[given]) != 0)
        _first(moved, given[1:], "turn_ids at token {} is shared by two sequences of sequence_ids")


def check_segments(ids: Array, mask: Array, num_segments: int, name: str = "ids") -> None:
    """Checks that every token that the mask keeps has an id in 0..num_segments-1.

    Raises:
      ValueError: naming the first token at fault. Traced arrays pass.
    """
    if _traced(ids, mask):
        return
    ids, mask, every = np.asarray(ids), np.asarray(mask), np.arange(len(ids))
    _first(mask & (ids < 0), every, name + " is negative (padding) at token {}, which the mask keeps")
    _first(mask & (ids >= num_segments), every, name + f" at token {{}} is beyond the {num_segments} segments")


def _first(bad: np.ndarray, tokens: np.ndarray, message: str) -> None:
    if bad.any():
        raise ValueError(message.format(tokens[bad.argmax()]))


def _traced(*arrays: Array | None) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def _kind(name: str) -> str:
    if name in ("mask", "valid") or name.endswith("_mask"):
        return "mask"
    return "ids" if name in ("ids", "targets") or name.endswith("_ids") else ""
