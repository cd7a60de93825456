"""Few rows that go on alone, in a cache that is as long as it must be: the same log-probs, and the same samples."""

import itertools

import jax
import numpy as np
import pytest
from continuous_test import build, conversations
from engine_test import PARAMS, play, recomputed

from mpo_jax.models.cache import Cache
from mpo_jax.models.transformer import TransformerConfig
from mpo_jax.rollout import sampling


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def played():
    """Twenty conversations over 16 slots, two more in the freed slots; rows and cache lengths of every program run."""
    patch, listed, seen, sample = pytest.MonkeyPatch(), conversations(22, turns=(1, 5)), [], sampling.sample

    def watched(graph, id_type, width, params, cache, rows, *rest):
        seen.append((len(rows.slots), cache.length))
        assert (rows.positions + rows.room <= cache.length).all()
        return sample(graph, id_type, width, params, cache, rows, *rest)

    with patch.context() as patched:
        patched.setattr("mpo_jax.rollout.engine.SHORTEST_CACHE", 16)
        patched.setattr(sampling, "sample", watched)
        engine = build(num_slots=16)
        for part in (listed[:20], listed[20:]):
            play(engine, part, range(16))
    return listed, seen


def test_two_of_16_rows_go_on_alone_and_the_cache_has_half_of_the_context_where_that_is_enough(played):
    _, seen = played
    assert set(seen) == {(rows, length) for rows in (2, 16) for length in (16, 32)}
    assert any(before > after for (_, before), (_, after) in itertools.pairwise(seen)), "it shrinks as slots are freed"


def test_bug_020_098_their_logprobs_are_those_that_training_recomputes(played):
    listed, _ = played
    for c, found in zip(listed, recomputed(PARAMS, listed), strict=True):
        np.testing.assert_allclose(np.array(c.logprobs)[c.mask], found[c.mask], atol=1e-4, rtol=0)


def test_an_episode_is_the_same_in_a_whole_cache_with_all_rows(played):
    again = conversations(22, turns=(1, 5))
    play(build(), again, range(6))  # fewer than 8 slots have no few, and a context below 128 is not divided
    for c, other in zip(played[0], again, strict=True):
        assert c.tokens == other.tokens
        np.testing.assert_allclose(c.logprobs, other.logprobs, atol=1e-5)


def test_a_resized_cache_has_what_fits_and_zeros_after_it():
    config = TransformerConfig(
        vocab_size=8, width=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, mlp_width=8
    )
    rng, empty = np.random.default_rng(0), Cache.empty(config, 3, 6)
    numbers = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), empty)
    for length, kept in ((4, 4), (9, 6)):
        found = jax.tree.map(jax.numpy.asarray, numbers).resized(length)
        assert found.length == length
        for new, old in zip(found.keys, numbers.keys, strict=True):
            np.testing.assert_array_equal(new[..., :kept], old[..., :kept])
            assert new.shape == (3, 1, 4, length) and not np.any(new[..., kept:])
        for new, old in zip(found.values, numbers.values, strict=True):
            np.testing.assert_array_equal(new[:, :, :kept], old[:, :, :kept])
            assert new.shape == (3, 1, length, 4) and not np.any(new[:, :, kept:])
