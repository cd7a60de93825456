"""A model in Hugging Face's format: `config.json` and safetensors files, whole or sharded with an index."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from mpo_jax.models import layout, weights
from mpo_jax.models.transformer import TransformerConfig

_INDEX = "model.safetensors.index.json"
_FAMILIES = {  # model_type: (class in `transformers`, does it normalise queries and keys)
    "llama": ("LlamaForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", True),
}
# What a config may only have with this value, because nothing here computes another.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}


def read_config(fields: Mapping) -> TransformerConfig:
    """The shape that a `config.json` describes.

    Raises:
      ValueError: a family or a feature that is not supported, or a missing field; the message names it.
    """
    family = fields.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(f"model_type is {family!r}, expected one of {sorted(_FAMILIES)}")
    for name, value in _FIXED.items():
        if fields.get(name, value) != value:
            raise ValueError(f"{name} is {fields[name]!r}, only {value!r} is supported")
    rope = fields.get("rope_parameters") or {"rope_theta": fields.get("rope_theta", 1e4)}
    rope = rope | (fields.get("rope_scaling") or {})
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ValueError(f"rope_type is {kind!r}, only 'default' is supported")
    try:
        heads = fields["num_attention_heads"]
        return TransformerConfig(
            vocab_size=fields["vocab_size"],
            width=fields["hidden_size"],
            num_layers=fields["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            mlp_width=fields["intermediate_size"],
            rope_theta=float(rope["rope_theta"]),
            norm_epsilon=fields["rms_norm_eps"],
            qk_norm=_FAMILIES[family][1],
            tied_embeddings=fields.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ValueError(f"config.json lacks {error}") from None


def write_config(config: TransformerConfig) -> dict:
    """The `config.json` of a shape.

    Raises:
      ValueError: Hugging Face has no family of that shape.
    """
    if config.smeared_keys:
        raise ValueError("smeared_keys: no Hugging Face family has them")
    family = "qwen3" if config.qk_norm else "llama"
    return {
        "model_type": family,
        "architectures": [_FAMILIES[family][0]],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
    }


class Safetensors:
    """The tensors of a folder, from `model.safetensors` or from the files that its index names."""

    def __init__(self, folder: Path):
        if (folder / _INDEX).exists():
            files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        self._files = {}
        for file in files:
            opened = safe_open(folder / file, framework="np")
            self._files |= dict.fromkeys(opened.keys(), opened)
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self, name: str, index: layout.Index) -> np.ndarray:
        """The part of a tensor at an index of one slice an axis."""
        return self._files[name].get_slice(name)[index]


def load(folder: Path, *, dtype=jnp.float32, sharding: layout.Sharding | None = None):
    """Reads the folder.

    Args:
      folder: with `config.json` and safetensors.
      dtype: of the parameters.
      sharding: name and shape of a parameter -> its sharding; each device's part is read straight from the files.

    Returns:
      `TransformerConfig` and parameters.

    Raises:
      ValueError: an unsupported config, or a tensor that is missing, foreign or of another shape.
    """
    config = read_config(json.loads((folder / "config.json").read_text()))
    tensors = Safetensors(folder)
    ignored = {name for name in tensors.shapes if name.endswith("rotary_emb.inv_freq")}  # a buffer of old versions
    if config.tied_embeddings:
        _check_head(tensors)
        ignored.add("lm_head.weight")
    like = weights.shapes(config, dtype)
    return config, layout.assemble(like, tensors, layout.huggingface, sharding, ignored)


def _check_head(tensors: Safetensors, rows: int = 4096) -> None:
    """A tied model may be stored with its head all the same, if it is the embedding table's copy."""
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    if head not in tensors.shapes or table not in tensors.shapes:
        return
    equal = tensors.shapes[head] == tensors.shapes[table]
    number = tensors.shapes[head][0] if equal else 0
    for start in range(0, number, rows):
        part = slice(start, min(start + rows, number)), slice(None)
        equal = equal and np.array_equal(tensors.read(head, part), tensors.read(table, part))
    if not equal:
        raise ValueError(f"tensor {head!r} differs from {table!r}, but tie_word_embeddings is true")


def save(folder: Path, config: TransformerConfig, params: nnx.State, *, dtype=jnp.bfloat16, shard_bytes=4 << 30):
    """Writes `config.json` and safetensors files of at most `shard_bytes` (or one tensor), one on the host at a time.

    Parameters that were read from files of `dtype` come out as they were, bit for bit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = write_config(config) | {"dtype": jnp.dtype(dtype).name}
    tensors = list(layout.disassemble(params, layout.huggingface))
    sizes = [x.size * jnp.dtype(dtype).itemsize for x in layout.names(params).values()]
    shards, room = [[]], shard_bytes
    for tensor, size in zip(tensors, sizes, strict=True):
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= size
    number = len(shards)
    files = [f"model-{i + 1:05d}-of-{number:05d}.safetensors" for i in range(number)]
    files = files if number > 1 else ["model.safetensors"]
    for file, shard in zip(files, shards, strict=True):
        arrays = {name: fetch().astype(dtype) for name, fetch in shard}
        save_file(arrays, folder / file, metadata={"format": "pt"})
    if number > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name, _ in shard}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
