"""Shapes of the Qwen3 models, as plain config dicts: the arguments of `TransformerConfig`.

Source: *Qwen3 Technical Report* (arXiv:2505.09388), Tables 1 and 2, and the models' published config.json.
"""

from mpo_jax.models.transformer import TransformerConfig


def _dense(width: int, num_layers: int, num_heads: int, mlp_width: int, *, tied: bool) -> dict:
    return {
        "vocab_size": 151_936,
        "width": width,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": 8,
        "head_dim": 128,
        "mlp_width": mlp_width,
        "rope_theta": 1e6,
        "tied_embeddings": tied,
    }


def _sparse(
    width: int, num_layers: int, num_heads: int, mlp_width: int, *, expert_width: int, rope_theta: float
) -> dict:
    experts = {"num_experts": 128, "experts_per_token": 8, "expert_width": expert_width}
    dense = _dense(width, num_layers, num_heads, mlp_width, tied=False)
    return dense | experts | {"num_kv_heads": 4, "rope_theta": rope_theta}


MODELS: dict[str, dict] = {
    "qwen3_0_6b": _dense(1024, 28, 16, 3072, tied=True),
    "qwen3_1_7b": _dense(2048, 28, 16, 6144, tied=True),
    "qwen3_4b": _dense(2560, 36, 32, 9728, tied=True),
    "qwen3_8b": _dense(4096, 36, 32, 12_288, tied=False),
    "qwen3_14b": _dense(5120, 40, 40, 17_408, tied=False),
    "qwen3_32b": _dense(5120, 64, 64, 25_600, tied=False),
    "qwen3_30b_a3b": _sparse(2048, 48, 32, 6144, expert_width=768, rope_theta=1e6),
    "qwen3_30b_a3b_2507": _sparse(2048, 48, 32, 6144, expert_width=768, rope_theta=1e7),
    "qwen3_235b_a22b": _sparse(4096, 94, 64, 12_288, expert_width=1536, rope_theta=1e6),
}


def config(name: str, *, remat: str = "none") -> TransformerConfig:
    """The shape of a model, its blocks scanned, as one trains it on many devices."""
    return TransformerConfig(**MODELS[name], scan_layers=True, remat=remat)
