"""Decoding beside `transformers.generate`, greedy, the same tokens from the same weights; episodes of several turns."""

import functools
import pathlib
import tempfile
from typing import Any

import numpy as np

from benchmarks.measure import Case

TINY = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}


def tiny() -> tuple[Any, Any, Any]:
    """A random Llama of `transformers`, and config and parameters of ours with its weights."""
    import torch
    import transformers

    from mpo_jax.models import huggingface

    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).float().eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, *huggingface.load(pathlib.Path(folder))


def smollm2() -> tuple[Any, Any, Any]:
    """The same of a real model, dequantised to float32 by both."""
    import torch
    import transformers

    from mpo_jax.models import pretrained

    path, ours = pretrained.find("smollm2"), pretrained.load("smollm2")
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None  # so that both go on to the limit
    return theirs, ours.config, ours.params


def sampler(config, params, num_slots: int, length: int, tokens: int):
    """Slots whose turns all go on to their limit: no id ends one."""
    from mpo_jax.rollout.decoding import GREEDY
    from mpo_jax.rollout.engine import Sampler

    shape = {"num_slots": num_slots, "context_length": length, "max_turn_tokens": tokens}
    engine = Sampler(config, **shape, stop_ids=[], decoding=GREEDY)
    engine.load(params, 0)
    return engine


def our_turn(engine, prompts: np.ndarray) -> np.ndarray:
    """The tokens [B,N] of one turn of every slot."""
    answers = engine.generate(dict(enumerate(prompts.tolist())), dict.fromkeys(range(len(prompts)), 0))
    for slot in answers:
        engine.free(slot)
    return np.array([answers[slot].tokens for slot in range(len(prompts))])


def their_turn(model, prompts: np.ndarray, tokens: int) -> np.ndarray:
    """The same by `transformers`."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor(prompts)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return out[:, prompts.shape[1] :].numpy()


def turn(name: str, models: tuple[Any, Any, Any], prompts: np.ndarray, tokens: int, repeats: int) -> Case:
    """One turn in every slot, after both were seen to say the same."""
    theirs, config, params = models
    engine = sampler(config, params, len(prompts), prompts.shape[1] + tokens, tokens)
    np.testing.assert_array_equal(our_turn(engine, prompts), their_turn(theirs, prompts, tokens))
    ways = {
        "mpo_jax": functools.partial(our_turn, engine, prompts),
        "transformers.generate": functools.partial(their_turn, theirs, prompts, tokens),
    }
    return Case(f"{name}, {len(prompts)} slots, {len(prompts) * tokens:,} tokens", ways, repeats)


def episodes(name: str, models: tuple[Any, Any, Any], news: np.ndarray, tokens: int, repeats: int) -> Case:
    """Episodes that read news[T,B,N], a turn at a time, with the cache kept and with every turn's context read anew."""
    _, config, params = models
    turns, number, length = news.shape
    engine = sampler(config, params, number, turns * (length + tokens), tokens)

    def play(keep_cache: bool) -> None:
        for said in news:
            engine.generate(dict(enumerate(said.tolist())), dict.fromkeys(range(number), 0))
            if not keep_cache:
                engine.load(params, 0)
        for slot in range(number):
            engine.free(slot)

    ways = {"kept over turns": functools.partial(play, True), "read anew": functools.partial(play, False)}
    return Case(f"{name}, {number} episodes of {turns} turns, cache", ways, repeats)
