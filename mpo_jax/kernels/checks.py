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
    rank = len(axes.split())
    for name, x in fields.items():
        if not _is_array(x):
            raise ValueError(f"{name} is a {type(x).__name__}, expected an array of shape [{axes}]")
        if len(x.shape) != rank:
            raise ValueError(f"{name} has shape {x.shape}, expected rank {rank}: [{axes}] (vmap over further axes)")
    check_same_shape(**fields)
    for name, x in fields.items():
        kind, wanted = _DTYPES[_kind(name)]
        if not jnp.issubdtype(x.dtype, kind):
            raise ValueError(f"{name} has dtype {x.dtype}, expected {wanted}")


def check_same_shape(**fields: Array) -> None:
    """Checks that all fields have the shape of the first, so that none is broadcast in silence.

    Raises:
      ValueError: naming the field, its shape and the first one's.
    """
    for name, x in fields.items():
        if not _is_array(x):
            raise ValueError(f"{name} is a {type(x).__name__}, expected an array")
    first, shape = next(((name, x.shape) for name, x in fields.items()), ("", ()))
    for name, x in fields.items():
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, expected {shape} as {first}")


def check_positive(**numbers: Scalar) -> None:
    """Checks that numbers are above 0.

    Raises:
      ValueError: naming the number and its value. Traced ones pass.
    """
    for name, x in numbers.items():
        if not isinstance(x, jax.core.Tracer) and not x > 0:
            raise ValueError(f"{name} is {x}, expected a positive number")


def check_turns(action_mask: Array, turn_ids: Array, sequence_ids: Array | None = None) -> None:
    """Checks the ids of action tokens: turns never decrease, nor span two sequences, and no sequence comes back.

    Raises:
      ValueError: naming the first token at fault. Traced arrays pass.
    """
    check_segments(turn_ids, action_mask, len(turn_ids), name="turn_ids")
    if sequence_ids is not None:
        check_together(sequence_ids, action_mask, name="sequence_ids")
    if _traced(action_mask, turn_ids, sequence_ids):
        return
    places, turns = _kept(turn_ids, action_mask)
    _first(places[1:][np.diff(turns) < 0], "turn_ids decrease at {}: they must grow along the row")
    if sequence_ids is not None:
        moved = (np.diff(turns) == 0) & (np.diff(_kept(sequence_ids, action_mask)[1]) != 0)
        _first(places[1:][moved], "turn_ids at {} is shared by two sequences of sequence_ids")


def check_together(ids: Array, mask: Array, name: str) -> None:
    """Checks that the tokens that the mask keeps have ids in 0..T-1 and lie together, segment by segment.

    Raises:
      ValueError: naming the first token at fault. Traced arrays pass.
    """
    check_segments(ids, mask, len(ids), name=name)
    if _traced(ids, mask):
        return
    places, ids = _kept(ids, mask)
    begins = np.append(True, np.diff(ids) != 0)[: len(ids)]
    begins[np.unique(ids, return_index=True)[1]] = False
    _first(places[begins], name + " comes back to an earlier segment at {}: its tokens must lie together")


def check_segments(ids: Array, mask: Array, num_segments: int, name: str = "ids") -> None:
    """Checks that every token that the mask keeps has an id in 0..num_segments-1, of one row or of several.

    Raises:
      ValueError: naming the first token at fault. Traced arrays pass.
    """
    if _traced(ids, mask):
        return
    ids, mask = np.asarray(ids), np.asarray(mask)
    _first(np.argwhere(mask & (ids < 0)), name + " is negative (padding) at {}, which the mask keeps")
    _first(np.argwhere(mask & (ids >= num_segments)), name + f" at {{}} is beyond the {num_segments} segments")


def _kept(ids: Array, mask: Array) -> tuple[np.ndarray, np.ndarray]:
    """Places [n,1] of the tokens of a row that the mask keeps, and their ids [n]."""
    places = np.argwhere(np.asarray(mask))
    return places, np.asarray(ids)[places[:, 0]]


def _first(places: np.ndarray, message: str) -> None:
    """Raises where there are places [n, row and token, or token alone], naming the first."""
    if len(places):
        *row, token = places[0]
        raise ValueError(message.format(f"token {token}" + "".join(f" of row {r}" for r in row)))


def _is_array(x: Array) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _traced(*arrays: Array | None) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def _kind(name: str) -> str:
    if name in ("mask", "valid") or name.endswith("_mask"):
        return "mask"
    return "ids" if name in ("ids", "targets") or name.endswith("_ids") else ""
