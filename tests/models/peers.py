"""Tiny random models of `transformers`, the independent implementation that ours is held against."""

import functools
import tempfile

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch, of requirements-test.txt")
transformers = pytest.importorskip("transformers", reason="needs transformers, of requirements-test.txt")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GEMMA = {"sliding_window": 3, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama_tied": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama_untied": ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "head_dim": 4}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen3_yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3_windows": ("qwen3", WINDOWS),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe_raw": ("qwen3_moe", EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [0]}),
    "gemma3": ("gemma3_text", GEMMA),
}


@functools.cache
def model(name):
    """A model with noise on every parameter, norms included, float32, ready to evaluate."""
    family, changes = FAMILIES[name]
    config = transformers.AutoConfig.for_model(family, **SHAPE | changes)
    config._attn_implementation = config._experts_implementation = "eager"  # the only one in float64
    built = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for key, x in sorted(built.named_parameters()):
            noise = torch.tensor(rng.normal(0, 0.3, x.shape), dtype=x.dtype)
            x.copy_(noise + (1.0 if "norm" in key and "gemma" not in family else 0.0))
    return built


@functools.cache
def folder(name):
    """The model saved by its own library."""
    path = tempfile.mkdtemp(prefix=f"mpo_{name}_")
    model(name).save_pretrained(path)
    return path
