"""The sampler against what training recomputes: log-probs, independence of slots, the distribution, new weights."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from models import tiny

from mpo_jax.models.evaluation import token_logprobs
from mpo_jax.rollout.decoding import EXACT, GREEDY
from mpo_jax.rollout.engine import Sampler
from mpo_jax.rollout.protocol import Engine, Generation

V, CONTEXT, SLOTS, TURN, END = 16, 32, 6, 6, 3
CONFIG = tiny.config(vocab_size=V)
PARAMS, OTHER = tiny.params(CONFIG), tiny.stirred(tiny.params(CONFIG), seed=7, scale=0.2)
evaluate = jax.jit(
    lambda params, batch: token_logprobs(nnx.merge(tiny.graph(CONFIG), params), batch)[0], compiler_options=tiny.QUICK
)


def build(decoding=EXACT):
    engine = Sampler(
        CONFIG, num_slots=SLOTS, context_length=CONTEXT, max_turn_tokens=TURN, stop_ids=[END], decoding=decoding
    )
    engine.load(PARAMS, 1)
    return engine


@functools.cache
def compiled():
    return build()


@pytest.fixture
def engine():
    """The one compiled sampler, with every slot free and the first weights."""
    engine = compiled()
    engine.load(PARAMS, 1)
    for slot in range(SLOTS):
        engine.free(slot)
    return engine


def observation(rng, low=1, high=5):
    return rng.integers(4, V, rng.integers(low, high + 1)).tolist()


class Conversation:
    """What one slot has read and sampled."""

    def __init__(self, rng, turns, seed):
        self.news = [observation(rng) for _ in range(turns)]
        self.seed, self.tokens, self.logprobs, self.mask, self.turns = seed, [], [], [], []

    def take(self, news, generation):
        self.tokens += [*news, *generation.tokens]
        self.logprobs += [0.0] * len(news) + generation.logprobs
        self.mask += [False] * len(news) + [True] * len(generation.tokens)
        self.turns.append((len(self.tokens) - len(generation.tokens), generation))

    def next(self):
        """What is said next, or None at the end or where it does not fit."""
        turn = len(self.turns)
        fits = turn < len(self.news) and len(self.tokens) + len(self.news[turn]) < CONTEXT
        return self.news[turn] if fits else None


def play(engine, conversations, slots, rng=None):
    """Runs conversations in slots that are refilled, some of which pause where `rng` is given."""
    waiting, running = list(conversations), {}
    while waiting or running:
        for slot in slots:
            if slot not in running and waiting:
                running[slot] = waiting.pop(0)
        news = {slot: c.next() for slot, c in running.items()}
        for slot in [slot for slot, said in news.items() if said is None]:
            engine.free(slot)
            del running[slot], news[slot]
        active = {slot: said for slot, said in news.items() if rng is None or rng.random() < 0.7}
        if active:
            answers = engine.generate(active, {slot: running[slot].seed for slot in active})
            assert answers.keys() == active.keys()
            for slot, generation in answers.items():
                running[slot].take(active[slot], generation)
    return conversations


def recomputed(params, conversations):
    """What training says of each conversation's tokens, one conversation a row."""
    rows = [[c.tokens] for c in conversations]
    rows += [[[0]]] * (30 - len(rows))
    found = np.asarray(evaluate(params, tiny.lay_out(rows, CONTEXT)))
    return [row[: len(c.tokens)] for row, c in zip(found, conversations, strict=False)]


@functools.cache
def played():
    engine = compiled()
    rng = np.random.default_rng(0)
    conversations = [Conversation(rng, turns=int(rng.integers(2, 5)), seed=100 + i) for i in range(30)]
    return play(engine, conversations, range(SLOTS), rng)


def test_it_is_an_engine(engine):
    assert isinstance(engine, Engine) and engine.version == 1


def test_bug_020_098_102_behavior_logprobs_are_those_that_training_recomputes(engine):
    conversations = played()
    assert sum(len(c.turns) > 1 for c in conversations) >= 20
    for c, found in zip(conversations, recomputed(PARAMS, conversations), strict=True):
        np.testing.assert_allclose(np.array(c.logprobs)[c.mask], found[c.mask], atol=1e-4, rtol=0)
        assert not np.any(np.array(c.logprobs)[~np.array(c.mask)])
    all_logprobs = np.concatenate([np.array(c.logprobs)[c.mask] for c in conversations])
    assert all_logprobs.max() < 0 and all_logprobs.std() > 0.1


def test_bug_006_010_a_turn_stops_with_its_sampled_end_or_at_a_limit_with_nothing_appended(engine):
    reasons = {"stop": 0, "turn": 0, "context": 0}
    for start, generation in (turn for c in played() for turn in c.turns):
        room = min(TURN, CONTEXT - start)
        assert 1 <= len(generation.tokens) == len(generation.logprobs) <= room
        assert END not in generation.tokens[:-1], "an end is the last"
        if generation.tokens[-1] == END:
            assert generation.finish_reason == "stop"
            reasons["stop"] += 1
        else:
            assert generation.finish_reason == "length" and len(generation.tokens) == room
            reasons["turn" if room == TURN else "context"] += 1
    assert min(reasons.values()) > 0, reasons


@pytest.mark.parametrize("prompt", [29, 31])
def test_bug_010_a_turn_at_the_end_of_the_context_is_cut_by_length(engine, prompt):
    for seed in range(20):
        said = np.random.default_rng(seed).integers(4, V, prompt).tolist()
        answer = engine.generate({2: said}, {2: seed})[2]
        if END not in answer.tokens:
            assert len(answer.tokens) == CONTEXT - prompt and answer.finish_reason == "length"
            with pytest.raises(ValueError, match="slot 2"):
                engine.generate({2: [5]}, {2: seed})  # no room for it and an action
            conversation = Conversation(np.random.default_rng(0), 0, 0)
            conversation.take(said, answer)
            (found,) = recomputed(PARAMS, [conversation])
            np.testing.assert_allclose(answer.logprobs, found[prompt:], atol=1e-4, rtol=0)
            return
        engine.free(2)
    pytest.fail("no turn without an end")


def test_an_episode_samples_the_same_alone_in_another_slot_and_among_others(engine):
    def mine():
        return Conversation(np.random.default_rng(5), turns=4, seed=42)

    (alone,) = play(engine, [mine()], [0])
    assert len(alone.turns) >= 3
    among = mine()
    rng = np.random.default_rng(6)
    others = [Conversation(rng, turns=3, seed=i) for i in range(5)]
    long = [Conversation(rng, turns=1, seed=50 + i) for i in range(3)]
    for c in long:
        c.news = [observation(rng, 20, 25)]  # a wider read, of another compiled shape
    play(engine, [*others[:3], among, *others[3:], *long], [5, 4, 0, 3, 2, 1])
    assert among.tokens == alone.tokens
    np.testing.assert_allclose(among.logprobs, alone.logprobs, atol=1e-5)
    (again,) = play(engine, [mine()], [4])
    assert again.tokens == alone.tokens
    other = mine()
    other.seed = 43
    play(engine, [other], [0])
    assert other.tokens != alone.tokens, "another seed samples something else"


def test_equal_context_and_seed_in_two_slots_sample_the_same_and_neighbouring_seeds_do_not(engine):
    answers = engine.generate({s: [4, 5, 6] for s in range(SLOTS)}, {0: 9, 1: 9, 2: 10, 3: 11, 4: 12, 5: 13})
    assert answers[0] == answers[1]
    assert len({tuple(a.tokens) for a in answers.values()}) >= 4


def test_bug_100_samples_follow_the_models_distribution(engine):
    # 2004 draws of the first token after one prompt: Pearson's X² over V cells against the 0.001 quantile.
    prompt, draws = [4, 9, 5], 2004
    counts = np.zeros(V)
    for first in range(0, draws, SLOTS):
        answers = engine.generate(dict.fromkeys(range(SLOTS), prompt), {s: first + s for s in range(SLOTS)})
        for slot, answer in answers.items():
            counts[answer.tokens[0]] += 1
            engine.free(slot)
    p = np.exp(tiny.log_softmax(tiny.oracle(CONFIG, PARAMS, prompt)[-1]))
    assert p.max() > 3 * p.min(), "uneven enough to tell"
    common = draws * p >= 5
    expected = np.append(draws * p[common], draws * p[~common].sum())
    found = np.append(counts[common], counts[~common].sum())
    kept = expected > 0
    statistic = np.sum((found[kept] - expected[kept]) ** 2 / expected[kept])
    # Wilson and Hilferty's quantile of chi-square with k degrees of freedom at z = 3.09 (probability 0.001).
    k = kept.sum() - 1
    assert statistic < k * (1 - 2 / (9 * k) + 3.09 * np.sqrt(2 / (9 * k))) ** 3


def test_the_tokens_of_a_turn_are_drawn_independently(engine):
    # Where each draw fell in its cumulative distribution (the middle of the token's interval), first against second
    # token: one random number for both would correlate them at almost 1; chance at 300 pairs is 0.06.
    prompt, places = [4, 9, 5], []

    @functools.cache
    def middle(token, *context):
        p = np.exp(tiny.log_softmax(tiny.oracle(CONFIG, PARAMS, context)[-1]))
        return p[:token].sum() + p[token] / 2

    for first in range(0, 330, SLOTS):
        answers = engine.generate(dict.fromkeys(range(SLOTS), prompt), {s: first + s for s in range(SLOTS)})
        for slot, answer in answers.items():
            engine.free(slot)
            if len(answer.tokens) > 1:
                one, two = answer.tokens[:2]
                places.append((middle(one, *prompt), middle(two, *prompt, one)))
    places = np.array(places)
    assert len(places) > 200
    assert abs(np.corrcoef(places.T)[0, 1]) < 0.25


def test_greedy_is_the_argmax_loop_of_the_uncached_model():
    engine = build(GREEDY)
    said = {0: [4, 5], 3: [7], 5: [8, 9, 10, 11]}
    context = {slot: [] for slot in said}
    for _ in range(2):
        answers = engine.generate(said, dict.fromkeys(said, 0))
        for slot, news in said.items():
            context[slot] += news
            for token, logprob in zip(answers[slot].tokens, answers[slot].logprobs, strict=True):
                expected = tiny.log_softmax(tiny.oracle(CONFIG, PARAMS, context[slot])[-1])
                assert token == expected.argmax()
                np.testing.assert_allclose(logprob, expected.max(), atol=1e-4)
                context[slot].append(token)
            assert answers[slot].tokens[-1] == END or len(answers[slot].tokens) == TURN


def test_bug_136_after_new_weights_a_live_episode_is_that_of_a_fresh_engine(engine):
    rng = np.random.default_rng(3)
    conversations = {slot: Conversation(rng, turns=2, seed=200 + slot) for slot in (0, 2, 5)}
    for slot, c in conversations.items():
        c.take(c.news[0], engine.generate({slot: c.news[0]}, {slot: c.seed})[slot])
    engine.load(OTHER, 2)
    assert engine.version == 2
    news = {slot: c.news[1] for slot, c in conversations.items()}
    answers = engine.generate(news, {slot: c.seed for slot, c in conversations.items()})
    fresh = build()
    fresh.load(OTHER, 2)
    whole = {slot: c.tokens + c.news[1] for slot, c in conversations.items()}
    expected = fresh.generate(whole, {slot: c.seed for slot, c in conversations.items()})
    for slot, c in conversations.items():
        assert answers[slot].tokens == expected[slot].tokens
        np.testing.assert_allclose(answers[slot].logprobs, expected[slot].logprobs, atol=1e-5)
        c.take(c.news[1], answers[slot])
    listed = list(conversations.values())
    for c, new, old in zip(listed, recomputed(OTHER, listed), recomputed(PARAMS, listed), strict=True):
        start = c.turns[1][0]
        np.testing.assert_allclose(c.logprobs[start:], new[start:], atol=1e-4)
        assert np.abs(new[start:] - old[start:]).max() > 0.05, "the weights do differ"


def test_free_forgets_the_context_and_gives_the_room_back(engine):
    first = engine.generate({1: [4] * 25}, {1: 3})[1]
    with pytest.raises(ValueError, match="slot 1"):
        engine.generate({1: [5] * 25}, {1: 3})
    engine.free(1)
    short = engine.generate({1: [6, 7]}, {1: 3})[1]
    (found,) = np.exp(tiny.log_softmax(tiny.oracle(CONFIG, PARAMS, [6, 7])[-1:]))
    np.testing.assert_allclose(np.exp(short.logprobs[0]), found[short.tokens[0]], rtol=1e-4)
    engine.free(1)
    assert engine.generate({1: [4] * 25}, {1: 3})[1] == first


def test_bug_037_nothing_to_read_and_too_much_are_refused(engine):
    with pytest.raises(ValueError, match=r"slot 4: 0 new tokens; expected 1 to 31"):
        engine.generate({4: []}, {4: 0})
    with pytest.raises(ValueError, match=r"slot 4: 32 new tokens; expected 1 to 31"):
        engine.generate({4: [5] * 32}, {4: 0})
    assert len(engine.generate({4: [5] * 31}, {4: 0})[4].tokens) == 1


def test_a_refused_call_leaves_every_context_as_it_was(engine):
    with pytest.raises(ValueError, match="slot 1"):
        engine.generate({0: [5, 6], 1: []}, {0: 1, 1: 1})
    after = engine.generate({0: [5, 6]}, {0: 1})[0]
    engine.free(0)
    assert engine.generate({0: [5, 6]}, {0: 1})[0] == after


@pytest.mark.parametrize(("tokens", "logprobs"), [([], []), ([1, 2], [-1.0])])
def test_a_generation_has_tokens_and_a_logprob_each(tokens, logprobs):
    with pytest.raises(ValueError, match="logprob"):
        Generation(tokens, logprobs, "stop")
