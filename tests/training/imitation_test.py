"""The warm start: seeded demonstrations of fixed shapes, masks on what is to be imitated, and a loss that falls."""

import itertools
import random

import jax
import numpy as np
import pytest
from flax import nnx
from models import tiny

from mpo_jax.environments.corpus import factbook
from mpo_jax.environments.demonstrations import demonstrate
from mpo_jax.environments.questions import SPLITS, questions
from mpo_jax.environments.search import SearchEnvironment
from mpo_jax.environments.search_policy import ScriptedPolicy
from mpo_jax.models import lora
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.models.tokenizer import ChatTokenizer, train_bpe
from mpo_jax.models.transformer import Transformer, TransformerConfig
from mpo_jax.training.imitation import (
    Curriculum,
    Demonstrations,
    _as_episode,
    _rows,
    imitate,
    imitate_by_adapters,
    tokenizer_texts,
)
from mpo_jax.types import PADDING
from training import runs


def make(seed=0, rows=2, row_tokens=384, difficulty=0.0, **curriculum):
    data = Demonstrations(runs.model().tokenizer, Curriculum(**curriculum), rows=rows, row_tokens=row_tokens, seed=seed)
    data.difficulty = difficulty
    return data


@pytest.mark.parametrize("difficulty", [0.0, 1.0])
def test_demonstrations_are_seeded(difficulty):
    one, two, other = (make(seed, difficulty=difficulty) for seed in (0, 0, 1))
    for _ in range(2):
        batches = [data.batch() for data in (one, two, other)]
        assert runs.equal(batches[0], batches[1])
        assert not runs.equal(batches[0].tokens, batches[2].tokens)


def test_copying_gets_harder_only_where_it_is_learnt():
    data = make(copying_loss=1.0)
    for loss in (5.0, 1.0, 1.0001, float("nan")):
        data.learnt(loss)
        assert data.difficulty == 0
    data.learnt(0.99)
    assert data.difficulty == pytest.approx(0.02)
    for _ in range(60):
        data.learnt(0.1)
    assert data.difficulty == 1.0


@pytest.mark.parametrize(("difficulty", "shape"), [(0.0, (12, 64)), (0.5, (12, 64)), (1.0, (2, 384))])
def test_every_batch_has_the_same_shape(difficulty, shape):
    data = make(difficulty=difficulty)
    for _ in range(4):
        batch = data.batch()
        assert batch.tokens.shape == shape
        assert batch.group_ids.shape == (shape[0], 64)
        assert (batch.sequence_ids != PADDING).mean() > 0.5
        assert batch.tokens.max() < runs.model().tokenizer.vocab_size


def test_copying_marks_what_can_be_foretold():
    """Each marked token follows its predecessor as it did in the source."""
    for difficulty in (0.0, 1.0):
        data = make(difficulty=difficulty)
        for _ in range(20):
            ids, mask = data._copying()
            assert len(ids) == len(mask) == 32 + int(96 * difficulty)
            source = ids[: mask.index(True) - 1]
            assert len(set(source)) == len(source) and not any(mask[: len(source)])
            follows = dict(itertools.pairwise(source))
            marked = [i for i, flag in enumerate(mask) if flag]
            assert marked and all(follows[ids[i - 1]] == ids[i] for i in marked)


def plain_transcript(data, seed):
    """The transcript behind the next demonstration of a stream with that seed, made without masks."""
    rng = random.Random(seed)
    question = rng.choice(data.questions)
    rng.random()  # whether to rename: never
    return demonstrate(question, ScriptedPolicy(data.curriculum.noise, rng), SearchEnvironment())


@pytest.mark.parametrize("seed", range(3))
def test_masks_cover_exactly_the_actions_and_their_end(seed):
    data = make(seed, renaming=0.0, hinting=0.0)
    tokenizer = runs.model().tokenizer
    ids, mask = data._demonstration()
    transcript = plain_transcript(data, seed)
    spans, at = [], 0
    while at < len(ids):
        end = next(i for i in range(at, len(ids) + 1) if i == len(ids) or mask[i] != mask[at])
        spans.append((mask[at], ids[at:end]))
        at = end
    assert [flag for flag, _ in spans] == [False, True] * len(transcript)
    for (_, read), (_, acted), (observation, action) in zip(spans[::2], spans[1::2], transcript, strict=True):
        assert acted == [*tokenizer.encode(action), tokenizer.end_of_turn]
        assert read == tokenizer.render_observation(observation, data.curriculum.observation_tokens)


def test_hints_are_read_and_never_imitated():
    tokenizer = runs.model().tokenizer
    hinted, plain = (make(3, renaming=0.0, hinting=share)._demonstration() for share in (1.0, 0.0))
    hint = tokenizer.render_hint("")[:2]  # <user>, and how a hint begins
    starts = [i for i in range(len(hinted[0])) if hinted[0][i : i + len(hint)] == hint]
    assert starts and not any(hinted[1][i] for i in starts)
    assert sum(hinted[1]) and tokenizer.render_hint("")[:2] != plain[0][:2]


def test_made_up_names_take_the_place_of_real_ones():
    data = make(renaming=1.0, hinting=0.0)
    question = next(q for q in data.questions if q.entities)
    names = data._new_names(question)
    assert names.keys() == set(question.entities)
    assert not any(new.lower() == old.lower() for old, new in names.items())
    assert all(names.values())


def test_the_tokenizer_reads_documents_and_the_words_around_names():
    texts = list(tokenizer_texts())
    fields = sum(len(document.fields) for document in factbook().documents)
    assert all(": " in text for text in texts[:fields])
    asked = texts[fields:]
    assert {"what", "whose", "search", "answer"} <= {word for text in asked for word in text.split()}
    names = {name for question in questions("train") for name in question.entities}
    assert not any(name in text for text in asked for name in names if len(name) > 12)


def test_names_of_both_splits_are_as_long_in_ids():
    """The tokenizer has learnt the names of neither split better, or those of the other would be harder to copy."""
    tokenizer = ChatTokenizer(train_bpe(tokenizer_texts(), 3072))
    train, held_out = (
        np.mean([len(tokenizer.encode(name)) for question in questions(split) for name in question.entities])
        for split in SPLITS
    )
    assert 0.95 < held_out / train < 1.05


CONFIG = TransformerConfig(
    vocab_size=400, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=24, smeared_keys=True
)


def train(seed, num_steps, difficulty, learning_rate=2e-2):
    losses = []
    params = nnx.state(Transformer(CONFIG, rngs=nnx.Rngs(seed)))
    data = make(seed, row_tokens=192, difficulty=difficulty)
    params = imitate(
        Pretrained(config=CONFIG, params=params, tokenizer=runs.model().tokenizer),
        data,
        num_steps=num_steps,
        learning_rate=learning_rate,
        report=lambda step, loss: losses.append((step, float(loss))),
    )
    assert [step for step, _ in losses] == list(range(num_steps))
    return params, np.array([loss for _, loss in losses])


@pytest.mark.parametrize("difficulty", [0.0, 1.0])
def test_imitation_lowers_the_loss(difficulty):
    assert runs.model().tokenizer.vocab_size == 400
    _, losses = train(0, 30, difficulty)
    assert losses[:3].mean() > losses[-5:].mean() + 0.5, losses


def test_imitation_repeats_from_its_seed():
    (one, first), (two, second), (other, _) = (train(seed, 3, 1.0) for seed in (0, 0, 1))
    assert runs.equal(one, two) and np.array_equal(first, second)
    assert not runs.equal(jax.tree.leaves(one)[0], jax.tree.leaves(other)[0])


def test_adapters_imitate_actions_and_the_model_stays():
    model, settings = runs.model(), lora.LoraConfig(rank=4, alpha=8.0)
    before, losses = runs.frozen(model.params), []
    observed = [7, 9, 11, 13]
    sequences = [([*observed, 20 + n, 30 + n], [False] * 4 + [True] * 2) for n in range(3)]
    adapters = imitate_by_adapters(
        model.config,
        model.params,
        settings,
        sequences,
        num_steps=30,
        row_tokens=12,  # two sequences a row
        learning_rate=0.05,
        report=lambda step, loss: losses.append(float(loss)),
    )
    assert runs.equal(model.params, before)
    assert losses[-1] < losses[0] - 1.0
    # The loss is that of the actions alone: what was observed is not foretold any better.
    logits = [
        tiny.log_softmax(tiny.oracle(model.config, params, sequences[0][0]))
        for params in (model.params, lora.merge(settings, model.params, adapters))
    ]
    base, tuned = (x[np.arange(5), sequences[0][0][1:]] for x in logits)
    assert tuned[3:].sum() > base[3:].sum() + 1.0
    assert tuned[:3].sum() < base[:3].sum() + 1.0


def test_a_row_without_actions_teaches_nothing_and_breaks_nothing():
    model, settings = runs.model(), lora.LoraConfig(rank=2, alpha=4.0)
    losses = []
    adapters = imitate_by_adapters(
        model.config,
        model.params,
        settings,
        [([7, 9, 11], [False] * 3), ([7, 9, 20], [False, False, True])],
        num_steps=4,
        row_tokens=4,  # a sequence a row
        learning_rate=0.05,
        report=lambda step, loss: losses.append(float(loss)),
    )
    assert losses.count(0.0) == 2 and np.isfinite(losses).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(runs.frozen(adapters)))


def test_nothing_to_imitate_is_an_error():
    model, settings = runs.model(), lora.LoraConfig(rank=2, alpha=4.0)
    with pytest.raises(ValueError, match="no sequences"):
        imitate_by_adapters(model.config, model.params, settings, [], num_steps=1, row_tokens=4, learning_rate=0.05)


def test_rows_hold_whole_sequences_and_go_through_all_before_any_again():
    sizes = np.array([0, 3, 4, 5, 2])  # of the sequences of 1s, 2s, …
    rows = _rows([_as_episode([n] * sizes[n], [True] * sizes[n]) for n in (1, 2, 3, 4)], 8, random.Random(0))
    met = np.zeros(5, int)
    for row in itertools.islice(rows, 12):
        assert row.tokens.shape == (1, 8)
        counts = np.bincount(row.tokens[row.sequence_ids != PADDING], minlength=5)
        assert counts.sum() > 8 - 5 and not (counts[1:] % sizes[1:]).any()
        met[1:] += counts[1:] // sizes[1:]
    assert met[1:].min() >= 4 and np.ptp(met[1:]) <= 1
