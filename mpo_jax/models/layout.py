"""Where each parameter lies in other people's checkpoints, and the way from there into (sharded) arrays and back."""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx
from safetensors import safe_open

from mpo_jax.models.config import TransformerConfig

Index = tuple[slice, ...]
Sharding = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]

# Ours: (Hugging Face's, llama.cpp's). Of a block all three follow a prefix with the block's number.
_TRUNK = {
    "embedding.embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm.scale": ("model.norm.weight", "output_norm.weight"),
    "output.kernel": ("lm_head.weight", "output.weight"),
    "value.kernel": ("score.weight",),  # of a critic, as Hugging Face classifies tokens
    "value.bias": ("score.bias",),
}
_BLOCK = {
    "attention_norm.scale": ("input_layernorm.weight", "attn_norm.weight"),
    "attention.query.kernel": ("self_attn.q_proj.weight", "attn_q.weight"),
    "attention.key.kernel": ("self_attn.k_proj.weight", "attn_k.weight"),
    "attention.value.kernel": ("self_attn.v_proj.weight", "attn_v.weight"),
    "attention.output.kernel": ("self_attn.o_proj.weight", "attn_output.weight"),
    "attention.query.bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "attention.key.bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "attention.value.bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "attention.query_norm.scale": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "attention.key_norm.scale": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "mlp_norm.scale": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "mlp.gate.kernel": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "mlp.up.kernel": ("mlp.up_proj.weight", "ffn_up.weight"),
    "mlp.down.kernel": ("mlp.down_proj.weight", "ffn_down.weight"),
    "mlp.router.kernel": ("mlp.gate.weight", "ffn_gate_inp.weight"),
    "mlp.expert_gate": ("mlp.experts.{expert}.gate_proj.weight", "ffn_gate_exps.weight"),
    "mlp.expert_up": ("mlp.experts.{expert}.up_proj.weight", "ffn_up_exps.weight"),
    "mlp.expert_down": ("mlp.experts.{expert}.down_proj.weight", "ffn_down_exps.weight"),
}
_POST_NORMS = {  # a block with four norms has the names of two at other places
    "attention_post_norm.scale": ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    "mlp_norm.scale": ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    "mlp_post_norm.scale": ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
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


class Safetensors:
    """The tensors of some files, read in part from the disk."""

    def __init__(self, paths: Iterable[Path]):
        self._files = {}
        for path in paths:
            opened = safe_open(path, framework="np")
            self._files |= dict.fromkeys(opened.keys(), opened)
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        """The part of a tensor at an index of one slice an axis."""
        return self._files[name].get_slice(name)[index]


@dataclasses.dataclass(frozen=True)
class Stored:
    """One parameter as a checkpoint has it.

    Attributes:
      names: of its tensor; or of one an expert, stacked along the first axis.
      transposed: matrices [out,in], where ours are [in,out].
      by_expert: a tensor an expert.
    """

    names: tuple[str, ...]
    transposed: bool
    by_expert: bool

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Of the stored tensors, from that of the parameter."""
        one = shape[1:] if self.by_expert else shape
        return dict.fromkeys(self.names, (*one[:-2], one[-1], one[-2]) if self.transposed else one)

    def read(self, checkpoint: Checkpoint, index: Index) -> np.ndarray:
        """The part of the parameter at `index`."""
        one = index[1:] if self.by_expert else index
        one = (*one[:-2], one[-1], one[-2]) if self.transposed else one
        if self.by_expert:
            x = np.stack([checkpoint.read(name, one) for name in self.names[index[0]]])
        else:
            x = checkpoint.read(self.names[0], one)
        return x.swapaxes(-1, -2) if self.transposed else x

    def split(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The stored tensors of a parameter."""
        x = x.swapaxes(-1, -2) if self.transposed else x
        parts = zip(self.names, x, strict=True) if self.by_expert else [(self.names[0], x)]
        return {name: np.ascontiguousarray(part) for name, part in parts}


def _stored(column: int, block: str, config: TransformerConfig, name: str) -> Stored:
    name = name.removeprefix("trunk.")
    numbered = re.fullmatch(r"blocks\.(\d+)\.(.*)", name)
    of_block = _BLOCK | _POST_NORMS if config.post_norms else _BLOCK
    try:
        theirs = (of_block[numbered[2]] if numbered else _TRUNK[name])[column]
    except (KeyError, IndexError):
        raise ValueError(f"parameter {name!r} has no place in this format") from None
    theirs = (block.format(numbered[1]) if numbered else "") + theirs
    by_expert = "{expert}" in theirs
    return Stored(
        names=tuple(theirs.format(expert=expert) for expert in range(config.num_experts)) if by_expert else (theirs,),
        transposed=name.endswith(".kernel") or ".expert_" in name,
        by_expert=by_expert,
    )


huggingface = functools.partial(_stored, 0, "model.layers.{}.")  # of a config and the name of a parameter
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
    expected = [stored[name].shapes(x.shape) for name, x in leaves.items()]
    check(checkpoint, dict(collections.ChainMap(*expected)), ignored)
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
