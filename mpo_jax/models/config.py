"""The one description of a model's shape, for every family."""

import dataclasses
from typing import Literal

import jax

from mpo_jax.models.rope import Scaling

REMAT = {  # what of a block is kept for the backward pass; the rest is computed again
    "all": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "none": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a transformer.

    Attributes:
      vocab_size: V, number of token ids.
      width: D, of the residual stream.
      num_layers: blocks.
      num_heads: query heads.
      num_kv_heads: key and value heads; a divisor of `num_heads`.
      head_dim: H, of one head; even, for the rotation.
      mlp_width: of the gated hidden layer.
      rope_theta: base of the rotary frequencies.
      norm_epsilon: of every RMSNorm.
      qk_norm: normalise queries and keys by head (Qwen3 does, Llama does not).
      tied_embeddings: the output head is the embedding table.
      smeared_keys: mix each key with the one before it. Copying what followed an earlier occurrence of a token then
        takes one head, not two layers that must find each other: tiny models learn to copy in minutes.
      rope_scaling: how the rotary frequencies are stretched.
      qkv_bias: queries, keys and values have one (Qwen2).
      windows: of each layer, how many tokens it sees back, itself included, None for all; empty for all in every layer.
      local_rope_theta: base in layers with a window, never stretched (Gemma 3); None for that of the others.
      num_experts: E, in place of the gated hidden layer; 0 for none.
      experts_per_token: k.
      expert_width: of an expert's gated hidden layer.
      renormalize_experts: the weights of the k experts are divided by their sum (`norm_topk_prob`).
      dense_layers: layers without experts.
      activation: of the gate.
      post_norms: attention and hidden layer are normalised once more before they are added (Gemma 3).
      shifted_norms: norms multiply by 1 + scale (Gemma 3).
      embedding_scale: multiplies the embeddings (Gemma 3 has √D).
      attention_scale: of the scores; None for H^(−1/2).
      scan_layers: the parameters of all blocks are stacked, and one compiled block is run over them.
      remat: what of a block is kept for the backward pass, a key of `REMAT`.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 1e4
    norm_epsilon: float = 1e-6
    qk_norm: bool = True
    tied_embeddings: bool = True
    smeared_keys: bool = False
    rope_scaling: Scaling | None = None
    qkv_bias: bool = False
    windows: tuple[int | None, ...] = ()
    local_rope_theta: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    renormalize_experts: bool = True
    dense_layers: tuple[int, ...] = ()
    activation: Literal["silu", "gelu"] = "silu"
    post_norms: bool = False
    shifted_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    scan_layers: bool = False
    remat: str = "all"

    def __post_init__(self):
        if self.remat not in REMAT:
            raise ValueError(f"remat={self.remat!r}, expected one of: {', '.join(REMAT)}")
        if self.scan_layers and (len(set(self.windows)) > 1 or self.dense_layers):
            raise ValueError("scan_layers needs layers that are alike, in windows and experts")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; the rotation needs pairs")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for num_layers={self.num_layers}")
        if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token}, expected 1 to num_experts={self.num_experts}"
            )
        if self.num_experts and self.experts_per_token == 1 and self.renormalize_experts:
            raise ValueError(
                "one expert a token with renormalize_experts: its weight is always 1, the router untrained"
            )

    def window(self, layer: int) -> int | None:
        """How many tokens a layer sees back, itself included; None for all."""
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of the gated hidden layer."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def expert_layers(self) -> int:
        """L, how many layers have experts."""
        return sum(self.has_experts(layer) for layer in range(self.num_layers))

    @property
    def expert_id_type(self) -> str:
        """The smallest unsigned type, little-endian, that holds the number of any expert."""
        return "<u1" if self.num_experts <= 256 else "<u2"
