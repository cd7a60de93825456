"""Where each parameter lies in other people's checkpoints, and the way from there into (sharded) arrays and back."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx

from mpo_jax.types import Array

Index = tuple[slice, ...]
Sharding = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]

# Ours: (Hugging Face's, llama.cpp's). Of a block all three follow a prefix with the block's number.
_TRUNK = {
    "embedding.embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm.scale": ("model.norm.weight", "output_norm.weight"),
    "output.kernel": ("lm_head.weight", "output.weight"),
}
_BLOCK = {
    "attention_norm.scale": ("input_layernorm.weight", "attn_norm.weight"),
    "attention.query.kernel": ("self_attn.q_proj.weight", "attn_q.weight"),
    "attention.key.kernel": ("self_attn.k_proj.weight", "attn_k.weight"),
    "attention.value.kernel": ("self_attn.v_proj.weight", "attn_v.weight"),
    "attention.output.kernel": ("self_attn.o_proj.weight", "attn_output.weight"),
    "attention.query_norm.scale": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "attention.key_norm.scale": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "mlp_norm.scale": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "mlp.gate.kernel": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "mlp.up.kernel": ("mlp.up_proj.weight", "ffn_up.weight"),
    "mlp.down.kernel": ("mlp.down_proj.weight", "ffn_down.weight"),
}


@runtime_checkable
class Checkpoint(Protocol):
    """Named tensors that can be read in part.

    Attributes:
      shapes: of every tensor.
    """

    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, index: Index) -> np.ndarray:
        """The part of a tensor at an index of one slice an axis."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """One parameter as a checkpoint has it.

    Attributes:
      name: of its tensor.
      transposed: a matrix [out,in], where ours is [in,out].
    """

    name: str
    transposed: bool

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the stored tensor, from that of the parameter."""
        return shape[::-1] if self.transposed else shape

    def read(self, checkpoint: Checkpoint, index: Index) -> np.ndarray:
        """The part of the parameter at `index`."""
        return self.turned(checkpoint.read(self.name, index[::-1] if self.transposed else index))

    def turned(self, x: np.ndarray) -> np.ndarray:
        """Ours from the stored, or the stored from ours."""
        return x.T if self.transposed else x


def _stored(column: int, block: str, name: str) -> Stored:
    numbered = re.fullmatch(r"blocks\.(\d+)\.(.*)", name)
    try:
        theirs = _BLOCK[numbered[2]] if numbered else _TRUNK[name]
    except KeyError:
        raise ValueError(f"parameter {name!r} has no place in this format") from None
    prefix = block.format(numbered[1]) if numbered else ""
    return Stored(name=prefix + theirs[column], transposed=name.endswith(".kernel"))


huggingface = functools.partial(_stored, 0, "model.layers.{}.")
gguf = functools.partial(_stored, 1, "blk.{}.")


def names(params: nnx.State) -> dict[str, Any]:
    """The leaves of parameters by dotted name."""
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(params)}


def check(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
    """Raises a ValueError that names the first tensor which is missing, foreign, or of another shape."""
    found = checkpoint.shapes
    for kind, odd in (("missing", expected.keys() - found), ("unexpected", found.keys() - expected - set(ignored))):
        if odd:
            raise ValueError(f"{kind} tensor {min(odd)!r} ({len(odd)} {kind} in all)")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"tensor {name!r} has shape {found[name]}, expected {shape}")


def assemble(
    like: nnx.State,
    checkpoint: Checkpoint,
    place: Callable[[str], Stored],
    sharding: Sharding | None = None,
    ignored: Iterable[str] = (),
) -> nnx.State:
    """Parameters of the structure and dtypes of `like` from a checkpoint; every device's part is read on its own.

    Args:
      like: parameters, as shapes.
      checkpoint: to read from.
      place: name of a parameter -> where it is stored.
      sharding: name and shape of a parameter -> its sharding; None puts all on the first device.
      ignored: tensors that may be there and are not read.

    Raises:
      ValueError: a tensor is missing, foreign, or of another shape; the message names it.
    """
    leaves = names(like)
    stored = {name: place(name) for name in leaves}
    check(checkpoint, {stored[name].name: stored[name].shape(x.shape) for name, x in leaves.items()}, ignored)
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def fetch(name: str, dtype: np.dtype, index: Index) -> np.ndarray:
        return np.ascontiguousarray(stored[name].read(checkpoint, index).astype(dtype))

    flat = []
    for path, leaf in nnx.to_flat_state(like):
        name = ".".join(map(str, path))
        shape, dtype = leaves[name].shape, leaves[name].dtype
        where = whole if sharding is None else sharding(name, shape)
        array = jax.make_array_from_callback(shape, where, functools.partial(fetch, name, dtype))
        flat.append((path, leaf.replace(array)))
    return nnx.from_flat_state(flat)


def disassemble(params: nnx.State, place: Callable[[str], Stored]) -> Iterable[tuple[str, Callable[[], Array]]]:
    """Stored name and a function that brings the tensor to the host, parameter by parameter."""
    for name, x in names(params).items():
        stored = place(name)
        yield stored.name, functools.partial(lambda s, x: np.ascontiguousarray(s.turned(np.asarray(x))), stored, x)
