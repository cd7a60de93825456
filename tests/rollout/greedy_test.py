"""Greedy decoding token by token as `transformers.generate` does it, ragged prompts at once, over two turns."""

import pathlib

import jax
import numpy as np
import pytest
from models import peers

from mpo_jax.models import huggingface
from mpo_jax.rollout.decoding import GREEDY
from mpo_jax.rollout.engine import Sampler

torch = peers.torch
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 61, length).tolist() for length in (5, 9)]
OBSERVATION, TOKENS = [7, 11, 13], 8


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def continued(model, ids):
    """The ids that `transformers` adds, its own cache and all."""
    ids = torch.tensor([ids])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
        )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["qwen3", "llama_tied", "qwen3_moe", "gemma3"])
def test_greedy_is_generate_of_transformers(name):
    config, params = huggingface.load(pathlib.Path(peers.folder(name)))
    engine = Sampler(config, num_slots=2, context_length=32, max_turn_tokens=TOKENS, stop_ids=[], decoding=GREEDY)
    engine.load(params, 0)
    contexts, seeds, said = [list(prompt) for prompt in PROMPTS], {0: 0, 1: 1}, PROMPTS
    for _ in range(2):
        answers = engine.generate(dict(enumerate(said)), seeds)
        for slot, context in enumerate(contexts):
            expected = continued(peers.model(name), context)
            assert answers[slot].tokens == expected
            context += expected + OBSERVATION
        said = [OBSERVATION, OBSERVATION]
