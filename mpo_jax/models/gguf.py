"""A model in one GGUF file of llama.cpp: shape, and parameters, dequantised by the `gguf` library."""

import functools
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpo_jax.models import gguf_tokenizer, layout, weights
from mpo_jax.models.chat import TemplateTokenizer
from mpo_jax.models.config import TransformerConfig

_ARCHITECTURES = {  # what every model of one has
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "qwen3": {},
    "qwen3moe": {"renormalize_experts": True},
}


class GgufFile:
    """The tensors of a file as numbers in Hugging Face's order of rows.

    llama.cpp turns neighbours (2i, 2i+1) where the file's architecture is `llama`, so the rows of its q and k are
    interleaved; here they are halves (i, i+H/2) again.
    """

    def __init__(self, path: Path):
        reader = gguf.GGUFReader(path)
        self.fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in self._tensors.items()}
        self.architecture = self.value("general.architecture")

    def value(self, key: str, *default):
        """A field of the header; without a default it must be there."""
        field = self.fields.get(key)
        if field is None and not default:
            raise ValueError(f"lacks the field {key!r}")
        return default[0] if field is None else field.contents()

    def shape_value(self, key: str, *default):
        """A field of the architecture."""
        return self.value(f"{self.architecture}.{key}", *default)

    def read(self, name: str, index: layout.Index) -> np.ndarray:
        """The part of a tensor at an index of one slice an axis."""
        tensor = self._tensors[name]
        x = gguf.dequantize(tensor.data, tensor.tensor_type)
        heads = {"attn_q.weight": "attention.head_count", "attn_k.weight": "attention.head_count_kv"}
        key = heads.get(name.split(".", 2)[-1])
        if key and self.architecture == "llama":
            x = x.reshape(self.shape_value(key), -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        return x[index]


def read_config(file: GgufFile) -> TransformerConfig:
    """The shape that the header describes.

    Raises:
      ValueError: an architecture or a feature that is not supported, or a missing field; the message names it.
    """
    if file.architecture not in _ARCHITECTURES:
        raise ValueError(f"general.architecture is {file.architecture!r}, expected one of {sorted(_ARCHITECTURES)}")
    if (kind := file.shape_value("rope.scaling.type", "none")) != "none":
        raise ValueError(f"rope.scaling.type is {kind!r}, only 'none' is supported")
    heads, width = file.shape_value("attention.head_count"), file.shape_value("embedding_length")
    return TransformerConfig(
        vocab_size=file.shapes.get("token_embd.weight", (0,))[0],  # its absence is reported with the others
        width=width,
        num_layers=file.shape_value("block_count"),
        num_heads=heads,
        num_kv_heads=file.shape_value("attention.head_count_kv", heads),
        head_dim=file.shape_value("attention.key_length", width // heads),
        mlp_width=file.shape_value("feed_forward_length"),
        rope_theta=file.shape_value("rope.freq_base", 1e4),
        # The header has the float32 nearest to the decimal that was meant.
        norm_epsilon=float(
            np.format_float_positional(np.float32(file.shape_value("attention.layer_norm_rms_epsilon")))
        ),
        num_experts=file.shape_value("expert_count", 0),
        experts_per_token=file.shape_value("expert_used_count", 0),
        expert_width=file.shape_value("expert_feed_forward_length", 0),
        tied_embeddings="output.weight" not in file.shapes,
        **_ARCHITECTURES[file.architecture],
    )


def load(
    path: Path, *, dtype=jnp.float32, sharding: layout.Sharding | None = None
) -> tuple[TransformerConfig, nnx.State, TemplateTokenizer]:
    """Reads the file: shape, parameters and tokenizer.

    Raises:
      ValueError: an unsupported header, or a tensor that is missing, foreign or of another shape.
    """
    file = GgufFile(path)
    config = read_config(file)
    params = layout.assemble(weights.shapes(config, dtype), file, functools.partial(layout.gguf, config), sharding)
    return config, params, gguf_tokenizer.read(file.fields)
