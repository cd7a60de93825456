"""Turns that end one by one, in slots of their own decoding, with new weights between two tokens."""

import jax
import numpy as np
import pytest
from engine_test import (
    CONFIG,
    CONTEXT,
    END,
    OTHER,
    PARAMS,
    SLOTS,
    TURN,
    Conversation,
    compiled,
    play,
    recomputed,
)
from models import tiny

from mpo_jax.rollout.decoding import GREEDY, Decoding
from mpo_jax.rollout.engine import Sampler


def build(**options):
    """Shares what is compiled with the engine of `engine_test`."""
    sizes = {"num_slots": SLOTS, "context_length": CONTEXT, "max_turn_tokens": TURN, "stop_ids": [END]}
    engine = Sampler(CONFIG, **sizes | options)
    engine.load(PARAMS, 1)
    return engine


def converse(engine, conversations):
    """Runs conversations in slots, each refilled as soon as its own is over; how many turns ended in each call."""
    waiting, running, asked, ended = list(conversations), {}, set(), []
    while waiting or running:
        for slot in range(SLOTS):
            while slot not in running and waiting:
                running[slot] = waiting.pop(0)
        news = {slot: c.next() for slot, c in running.items() if slot not in asked}
        for slot in [slot for slot, said in news.items() if said is None]:
            engine.free(slot)
            del running[slot], news[slot]
        asked |= news.keys()
        answers = engine.generate(news, {slot: running[slot].seed for slot in news})
        for slot, generation in answers.items():
            asked.remove(slot)
            running[slot].take(running[slot].next(), generation)
        ended += [len(answers)] if running else []
    return ended


def conversations(number, turns=(2, 5)):
    rng = np.random.default_rng(0)
    return [Conversation(rng, turns=int(rng.integers(*turns)), seed=100 + i) for i in range(number)]


@pytest.mark.parametrize("options", [{"turns_per_call": 1}, {"turns_per_call": 2, "steps_per_call": 2}])
def test_bug_020_098_200_episodes_have_the_logprobs_that_training_recomputes(options):
    listed = conversations(200 if "steps_per_call" in options else 30)
    ended = converse(build(**options), listed)
    assert all(len(c.turns) > 1 for c in listed if len(c.tokens) < CONTEXT - 8)
    assert (0 in ended) == ("steps_per_call" in options) and ended.count(1) > 20
    for first in range(0, len(listed), 30):
        part = listed[first : first + 30]
        for c, found in zip(part, recomputed(PARAMS, part), strict=True):
            np.testing.assert_allclose(np.array(c.logprobs)[c.mask], found[c.mask], atol=1e-4, rtol=0)


def test_an_episode_is_the_same_whenever_its_company_ends():
    together = conversations(12)
    play(build(), together, range(SLOTS))
    for options in ({"turns_per_call": 1}, {"steps_per_call": 1}, {"turns_per_call": 3, "steps_per_call": 4}):
        alone = conversations(12)
        converse(build(**options), alone)
        for one, other in zip(alone, together, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_bug_136_144_new_weights_within_a_turn_sample_its_rest_as_a_fresh_engine_would():
    engine = build(steps_per_call=2)
    said = {0: [4, 9, 5], 3: [7, 8], 4: [6]}
    seeds = dict.fromkeys(said, 11) | {3: 12}
    answers = dict(engine.generate(said, seeds))
    engine.load(OTHER, 2)
    while len(answers) < len(said):
        answers |= engine.generate({}, {})
    changed = [slot for slot in said if len(answers[slot].tokens) > 2]
    assert changed
    for slot in changed:
        conversation = Conversation(np.random.default_rng(0), 0, 0)
        conversation.take(said[slot], answers[slot])
        start, logprobs = len(said[slot]), answers[slot].logprobs
        ((old,), (new,)) = (recomputed(params, [conversation]) for params in (PARAMS, OTHER))
        np.testing.assert_allclose(logprobs[:2], old[start : start + 2], atol=1e-4)
        np.testing.assert_allclose(logprobs[2:], new[start + 2 :], atol=1e-4)
        fresh = build()
        fresh.load(OTHER, 2)
        rest = fresh.generate({slot: said[slot] + answers[slot].tokens[:2]}, {slot: seeds[slot]})[slot]
        number = len(answers[slot].tokens) - 2
        assert rest.tokens[:number] == answers[slot].tokens[2:]


def test_slots_have_their_own_stops_limits_and_temperatures():
    engine, prompt = build(), [4, 9, 5]
    plain = compiled()
    plain.load(PARAMS, 1)
    for slot in range(SLOTS):
        plain.free(slot)
    seed = next(s for s in range(99) if len(plain.generate({0: prompt}, {0: s})[0].tokens) > 4 or plain.free(0))
    plain.free(0)
    usual = plain.generate({0: prompt}, {0: seed})[0].tokens
    ways = {
        1: Decoding(max_tokens=2),
        2: Decoding(stop_ids=(usual[2],)),
        3: GREEDY,
        4: Decoding(temperature=0.5, top_k=1),
        5: Decoding(max_tokens=99),
    }
    answers = engine.generate(dict.fromkeys(range(SLOTS), prompt), dict.fromkeys(range(SLOTS), seed), ways)
    assert answers[0].tokens == answers[5].tokens == usual
    assert (answers[1].tokens, answers[1].finish_reason) == (usual[:2], "length")
    first = usual.index(usual[2])
    assert (answers[2].tokens, answers[2].finish_reason) == (usual[: first + 1], "stop")
    assert answers[3].tokens == answers[4].tokens != usual
    # The log-probability is the policy's own, whatever the decoding was.
    for answer in answers.values():
        context = list(prompt)
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
            expected = tiny.log_softmax(tiny.oracle(CONFIG, PARAMS, context)[-1])[token]
            np.testing.assert_allclose(logprob, expected, atol=1e-4)
            context.append(token)


def test_bug_102_a_truncated_distribution_is_marked_and_so_never_trained_on():
    assert build().exact and build(decoding=Decoding(max_tokens=3)).exact
    assert not build(decoding=Decoding(top_p=0.8)).exact and not build(decoding=GREEDY).exact


def test_a_slot_under_way_takes_nothing_new_and_can_be_freed():
    engine = build(steps_per_call=1)
    assert 2 in engine._under_way or engine.generate({2: [4, 9, 5]}, {2: 1}) == {}
    with pytest.raises(ValueError, match="slot 2: its turn is still under way"):
        engine.generate({2: [5]}, {2: 1})
    engine.free(2)
    assert engine.generate({}, {}) == {}
    with pytest.raises(ValueError, match="slot 2: 9 stop ids, expected at most 8"):
        engine.generate({2: [5]}, {2: 1}, {2: Decoding(stop_ids=tuple(range(4, 12)))})
    assert engine.generate({}, {}) == {}


def test_few_of_many_slots_and_a_prompt_longer_than_is_read_at_once(monkeypatch):
    # Of 6 slots 1 or 2 are read one by one, more all at once; 5 tokens at a time.
    monkeypatch.setattr("mpo_jax.rollout.engine.READ_TOKENS", 5)
    engine = build()
    rng = np.random.default_rng(1)
    said = {slot: rng.integers(4, 16, int(rng.integers(1, 24))).tolist() for slot in range(SLOTS)}
    seeds = {slot: 7 + slot for slot in said}
    answers = {}
    for slots in ([3], [0, 5], [1, 2, 4]):
        answers |= engine.generate({s: said[s] for s in slots}, seeds)
    listed = []
    for slot, answer in answers.items():
        listed.append(Conversation(np.random.default_rng(0), 0, 0))
        listed[-1].take(said[slot], answer)
    for c, found in zip(listed, recomputed(PARAMS, listed), strict=True):
        np.testing.assert_allclose(np.array(c.logprobs)[c.mask], found[c.mask], atol=1e-4)


def test_samplers_of_one_config_share_what_is_compiled():
    from mpo_jax.rollout import sampling

    one = build()
    one.generate({0: [4]}, {0: 1})
    with jax.log_compiles(False):
        before = sampling.sample._cache_size()
        build().generate({0: [4]}, {0: 1})
    assert sampling.sample._cache_size() == before
