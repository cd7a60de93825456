"""What samples a run's episodes: our sampler in the worker's process, or an OpenAI-compatible server elsewhere."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_collections
from flax import nnx

from mpo_jax.models import huggingface
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.rollout.decoding import EXACT, Decoding
from mpo_jax.rollout.engine import Sampler
from mpo_jax.rollout.openai_engine import OpenAIEngine, Server
from mpo_jax.rollout.protocol import Engine
from mpo_jax.store.weights import PublishedWeights


def on_server(config: ml_collections.ConfigDict) -> bool:
    """Whether the episodes to train on are sampled by a server."""
    return "server" in config and bool(config.server.url)


def make_engine(config: ml_collections.ConfigDict, model: Pretrained, published: PublishedWeights) -> Engine:
    """The configured engine of a training rollout.

    Raises:
      ValueError: a server without a model's name, or one that would have to tell of experts.
    """
    if not on_server(config):
        return make_sampler(config, model)
    section = config.server
    if not section.model:
        raise ValueError("server.url is set, but no server.model: its name of the model")
    if config.get("router_replay"):
        raise ValueError("router_replay: a server does not tell which experts it chose")
    hand_over = to_folder(Path(section.folder), model) if section.folder else lambda _, version: published.path(version)
    server = Server(
        url=section.url,
        model=section.model,
        vocab_size=model.config.vocab_size,
        stop_ids=tuple(model.tokenizer.stop_ids),
        key=os.environ.get(section.key_variable),
        weights_path=lambda params, version: str(hand_over(params, version).resolve()),
        timeout=section.timeout,
    )
    sizes = {name: config[name] for name in ("num_slots", "context_length", "max_turn_tokens")}
    return OpenAIEngine(server, **sizes)


def make_sampler(config: ml_collections.ConfigDict, model: Pretrained, decoding: Decoding = EXACT) -> Sampler:
    """Ours, without weights yet."""
    return Sampler(
        model.config,
        num_slots=config.num_slots,
        context_length=config.context_length,
        max_turn_tokens=config.max_turn_tokens,
        stop_ids=model.tokenizer.stop_ids,
        decoding=decoding,
        keep_experts=bool(config.get("router_replay")),
    )


def to_folder(folder: Path, model: Pretrained) -> Callable[[Any, int], Path]:
    """Writes each version beneath a folder as Hugging Face does, with its tokenizer; only the newest one stays."""

    def write(params: nnx.State, version: int) -> Path:
        path = folder / f"version-{version:08d}"
        huggingface.save(path, model.config, params)
        model.tokenizer.tokenizer.save(str(path / "tokenizer.json"))
        for other in folder.glob("version-*"):
            if other != path:
                shutil.rmtree(other)
        return path

    return write
