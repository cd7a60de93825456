"""A policy with experts: its turns tell which of them have read each token."""

import jax
import numpy as np
import pytest
from flax import nnx
from models import tiny

from mpo_jax.rollout.engine import Sampler

CONFIG = tiny.config(vocab_size=16, num_layers=3, num_experts=4, experts_per_token=2, expert_width=8, dense_layers=(1,))
PARAMS, OTHER = tiny.params(CONFIG), tiny.params(CONFIG, seed=1)


def build(**changes):
    engine = Sampler(
        CONFIG, num_slots=4, context_length=32, max_turn_tokens=5, stop_ids=[3], keep_experts=True, **changes
    )
    engine.load(PARAMS, 0)
    return engine


@jax.jit
def routing(params, tokens):
    model = nnx.merge(tiny.graph(CONFIG), params)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), (1, 32))
    return model.routed(tokens[None], positions, np.zeros((1, 32), np.int32))[2].experts[:, 0]  # [L,T,k]


def uncached(params, tokens):
    """Experts [T,L,k] of a model that reads all at once; causal, so that what fills the row up does not matter."""
    return np.moveaxis(np.asarray(routing(params, np.pad(np.array(tokens), (0, 32 - len(tokens))))), 1, 0)[
        : len(tokens)
    ]


def test_every_token_but_the_last_has_the_experts_of_a_reading_without_a_cache():
    engine = build()
    news = {0: [4, 9, 5], 1: [7], 3: [5, 6, 7, 8, 9, 10]}
    contexts, told = {slot: [] for slot in news}, dict.fromkeys(news, b"")
    for said in (news, {0: [11, 12], 1: [13, 4]}):  # all slots are read at once, then some
        for slot, turn in engine.generate(said, dict.fromkeys(said, 5)).items():
            contexts[slot] += [*said[slot], *turn.tokens]
            told[slot] += turn.experts
    for slot, tokens in contexts.items():
        found = np.frombuffer(told[slot], np.uint8).reshape(-1, 2, 2)
        np.testing.assert_array_equal(found, uncached(PARAMS, tokens)[:-1])


@pytest.mark.parametrize("within", [False, True], ids=["between_turns", "within_a_turn"])
def test_new_weights_do_not_tell_anew_what_older_ones_have_read(within):
    engine = build(steps_per_call=2) if within else build()
    ended = engine.generate({2: [4, 9, 5]}, {2: 1})
    told, tokens = (ended[2].experts, [4, 9, 5, *ended[2].tokens]) if ended else (b"", [4, 9, 5])
    first = len(engine._contexts[2]) - 1
    engine.load(OTHER, 1)
    news = {} if within else {2: [6, 8]}
    while not (turns := engine.generate(news, dict.fromkeys(news, 1))):
        news = {}
    tokens += [*news.get(2, []), *turns[2].tokens]
    found = np.frombuffer(told + turns[2].experts, np.uint8).reshape(-1, 2, 2)
    assert len(found) == len(tokens) - 1 and (not within or not ended)
    np.testing.assert_array_equal(found[:first], uncached(PARAMS, tokens)[:first])
    np.testing.assert_array_equal(found[first:], uncached(OTHER, tokens)[first:-1])


def test_they_are_told_only_where_they_are_kept_and_a_model_without_any_is_refused():
    engine = Sampler(CONFIG, num_slots=1, context_length=32, max_turn_tokens=2, stop_ids=[])
    engine.load(PARAMS, 0)
    assert engine.generate({0: [4]}, {0: 0})[0].experts == b""
    with pytest.raises(ValueError, match="keep_experts: the model has no experts"):
        Sampler(tiny.config(), num_slots=1, context_length=8, max_turn_tokens=2, stop_ids=[], keep_experts=True)
