"""A model in Hugging Face's format: `config.json` and safetensors files, whole or sharded with an index."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from mpo_jax.models import layout, weights
from mpo_jax.models.config import TransformerConfig
from mpo_jax.models.families import read_config, write_config
from mpo_jax.models.transformer import Critic, Transformer

_INDEX = "model.safetensors.index.json"


def safetensors(folder: Path) -> layout.Safetensors:
    """The tensors of a folder, from `model.safetensors` or from the files that its index names."""
    files = ["model.safetensors"]
    if (folder / _INDEX).exists():
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    return layout.Safetensors([folder / file for file in files])


def load(folder: Path, *, critic: bool = False, dtype=jnp.float32, sharding: layout.Sharding | None = None):
    """Reads the folder.

    Args:
      folder: with `config.json` and safetensors.
      critic: it holds a critic, as `save` writes it: a classifier of tokens with one label.
      dtype: of the parameters.
      sharding: name and shape of a parameter -> its sharding; each device's part is read straight from the files.

    Returns:
      `TransformerConfig` and parameters.

    Raises:
      ValueError: an unsupported config, or a tensor that is missing, foreign or of another shape.
    """
    config = read_config(json.loads((folder / "config.json").read_text()))
    tensors = safetensors(folder)
    ignored = {name for name in tensors.shapes if name.endswith("rotary_emb.inv_freq")}  # a buffer of old versions
    if config.tied_embeddings and not critic:
        _check_head(tensors)
        ignored.add("lm_head.weight")
    like = weights.shapes(config, dtype, of=Critic if critic else Transformer)
    place = functools.partial(layout.huggingface, config)
    return config, layout.assemble(like, tensors, place, sharding, ignored)


def _check_head(tensors: layout.Safetensors, rows: int = 4096) -> None:
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
    critic = any(name.startswith("value.") for name in layout.names(params))
    fields = write_config(config, critic=critic) | {"dtype": jnp.dtype(dtype).name}
    shards, room = [[]], shard_bytes
    for name, x in layout.names(params).items():
        size = x.size * jnp.dtype(dtype).itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append((layout.huggingface(config, name), x))
        room -= size
    number = len(shards)
    files = [f"model-{i + 1:05d}-of-{number:05d}.safetensors" for i in range(number)]
    files = files if number > 1 else ["model.safetensors"]
    where, total = {}, 0
    for file, shard in zip(files, shards, strict=True):
        arrays = {}
        for stored, x in shard:
            arrays |= stored.split(np.asarray(x).astype(dtype))
        save_file(arrays, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(arrays, file)
        total += sum(x.nbytes for x in arrays.values())
    if number > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
