"""Hugging Face's `config.json` of each family, read and written."""

import math
from collections.abc import Mapping
from typing import Any

from mpo_jax.models.config import TransformerConfig
from mpo_jax.models.rope import LinearScaling, Llama3Scaling, Scaling, YarnScaling

_FAMILIES = {  # model_type: class in `transformers`, and what every model of the family has
    "llama": ("LlamaForCausalLM", {"qk_norm": False}),
    "qwen2": ("Qwen2ForCausalLM", {"qk_norm": False, "qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {"activation": "gelu", "post_norms": True, "shifted_norms": True}),
}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh"}
_LOCAL, _FULL = "sliding_attention", "full_attention"
_FIXED = {  # what a config may have with this value only, because nothing here computes another
    "attention_bias": False,
    "mlp_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}


def read_config(fields: Mapping[str, Any]) -> TransformerConfig:
    """The shape that a `config.json` describes, of version 4 or 5 of `transformers`.

    Raises:
      ValueError: a family or a feature that is not supported, or a missing field; the message names it.
    """
    family = fields.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(f"model_type is {family!r}, expected one of {sorted(_FAMILIES)}")
    fixed = _FIXED | {"hidden_act": _ACTIVATIONS[_FAMILIES[family][1].get("activation", "silu")]}
    fixed["hidden_activation"] = fixed["hidden_act"]
    for name, value in fixed.items():
        if fields.get(name, value) != value:
            raise ValueError(f"{name} is {fields[name]!r}, only {value!r} is supported")
    try:
        heads, width = fields["num_attention_heads"], fields["hidden_size"]
        shape = dict(
            vocab_size=fields["vocab_size"],
            width=width,
            num_layers=fields["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or width // heads,
            mlp_width=fields["intermediate_size"],
            norm_epsilon=fields["rms_norm_eps"],
            tied_embeddings=fields.get("tie_word_embeddings", family == "gemma3_text"),
            windows=_windows(fields, family),
        )
        shape |= _FAMILIES[family][1] | _rope(fields, family)
        if family == "qwen3_moe":
            shape |= _experts(fields)
        if family == "gemma3_text":
            shape |= {
                "embedding_scale": math.sqrt(width),
                "attention_scale": fields["query_pre_attn_scalar"] ** -0.5,
            }
    except KeyError as error:
        raise ValueError(f"config.json lacks {error}") from None
    return TransformerConfig(**shape)


def _windows(fields: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    """Of each layer; empty where none has one."""
    number = fields["num_hidden_layers"]
    if not fields.get("use_sliding_window", family == "gemma3_text") or not fields.get("sliding_window"):
        return ()
    kinds = fields.get("layer_types")
    if kinds is None and family == "gemma3_text":
        period = fields.get("sliding_window_pattern", 6)
        kinds = [_FULL if (layer + 1) % period == 0 else _LOCAL for layer in range(number)]
    elif kinds is None:
        kinds = [_LOCAL if layer >= fields["max_window_layers"] else _FULL for layer in range(number)]
    windows = tuple(fields["sliding_window"] if kind == _LOCAL else None for kind in kinds)
    return windows if any(windows) else ()


def _rope(fields: Mapping[str, Any], family: str) -> dict[str, Any]:
    """θ and scaling; version 4 has θ beside a `rope_scaling`, version 5 both in one, Gemma 3 one a kind of layer."""
    rope = fields.get("rope_parameters")
    if rope is None:
        rope = {"rope_theta": fields.get("rope_theta", 1e4)} | (fields.get("rope_scaling") or {})
        local = fields.get("rope_local_base_freq")
    else:
        local = rope[_LOCAL]["rope_theta"] if _LOCAL in rope else None
        rope = rope.get(_FULL, rope)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor is {rope['partial_rotary_factor']}, only 1.0 is supported")
    return {
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": _read_scaling(rope, fields),
        "local_rope_theta": float(local) if family == "gemma3_text" and local else None,
    }


def _read_scaling(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = rope.get("original_max_position_embeddings") or fields.get("max_position_embeddings")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=float(rope["factor"]))
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(rope["factor"]),
            low_frequency_factor=float(rope["low_freq_factor"]),
            high_frequency_factor=float(rope["high_freq_factor"]),
            original_context=original,
        )
    if kind == "yarn" and not rope.get("mscale"):
        return YarnScaling(
            factor=float(rope["factor"]),
            original_context=original,
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            attention_factor=rope.get("attention_factor"),
            truncate=rope.get("truncate", True),
        )
    raise ValueError(f"rope_type is {kind!r}, expected default, linear, llama3 or yarn (without mscale)")


def _experts(fields: Mapping[str, Any]) -> dict[str, Any]:
    step, dense = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    return {
        "num_experts": fields["num_experts"] if "num_experts" in fields else fields["num_local_experts"],
        "experts_per_token": fields["num_experts_per_tok"],
        "expert_width": fields["moe_intermediate_size"],
        "renormalize_experts": fields.get("norm_topk_prob", False),
        "dense_layers": tuple(i for i in range(fields["num_hidden_layers"]) if i in dense or (i + 1) % step),
    }


def family_of(config: TransformerConfig) -> str:
    """The `model_type` that computes what the config says.

    Raises:
      ValueError: none does.
    """
    if config.smeared_keys:
        raise ValueError("smeared_keys: no Hugging Face family has them")
    shape = {"qk_norm": True, "qkv_bias": False, "activation": "silu", "post_norms": False, "shifted_norms": False}
    own = {name: getattr(config, name) for name in shape}
    for family, (_, changes) in _FAMILIES.items():
        if own == shape | changes and (config.num_experts > 0) == (family == "qwen3_moe"):
            return family
    raise ValueError(f"no Hugging Face family has {own} with {config.num_experts} experts")


def write_config(config: TransformerConfig, *, critic: bool = False) -> dict[str, Any]:
    """The `config.json` of a shape, as version 5 of `transformers` has it; a critic classifies tokens with one label.

    Raises:
      ValueError: Hugging Face has no family of that shape.
    """
    family = family_of(config)
    rope = {"rope_theta": config.rope_theta} | _write_scaling(config.rope_scaling)
    fields = {
        "model_type": family,
        "architectures": [_FAMILIES[family][0]],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "hidden_act": _ACTIVATIONS[config.activation],
        "attention_bias": False,
        "rope_parameters": rope,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
    }
    if critic:
        labels = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        fields |= labels | {"architectures": [_FAMILIES[family][0].replace("CausalLM", "TokenClassification")]}
    if config.windows:
        fields |= {
            "use_sliding_window": True,
            "sliding_window": next(window for window in config.windows if window),
            "layer_types": [_LOCAL if window else _FULL for window in config.windows],
        }
    if config.num_experts:
        fields |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_width,
            "norm_topk_prob": config.renormalize_experts,
            "mlp_only_layers": list(config.dense_layers),
        }
    if family == "gemma3_text":
        fields["hidden_activation"] = fields.pop("hidden_act")
        fields["query_pre_attn_scalar"] = round(config.attention_scale**-2)
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
        fields["rope_parameters"] = {_FULL: rope, _LOCAL: local}
    return fields


def _write_scaling(scaling: Scaling | None) -> dict[str, Any]:
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_context,
            }
        case YarnScaling():
            own = {"attention_factor": scaling.attention_factor} if scaling.attention_factor is not None else {}
            return own | {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
                "original_max_position_embeddings": scaling.original_context,
            }
