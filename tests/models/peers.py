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
FAMILIES = {
    "llama_tied": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama_untied": ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
}


@functools.cache
def model(name):
    """A model with noise on every parameter, norms included, float32, ready to evaluate."""
    family, changes = FAMILIES[name]
    config = transformers.AutoConfig.for_model(family, **SHAPE | changes)
    config._attn_implementation = "eager"
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
