"""Alignment: index t concerns tokens[t], for log-probs, entropies and values, packed or padded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import tiny
from mpo_jax.models.actor_critic import Models
from mpo_jax.models.evaluation import prefix_values, starts_of_sequences, token_logprobs
from mpo_jax.models.transformer import Critic, SharedCritic, Transformer

CONFIG = tiny.config()
GRAPH = tiny.graph(CONFIG)
RNG = np.random.default_rng(0)
A, B, C = (RNG.integers(0, 64, n).tolist() for n in (5, 7, 1))
evaluate = jax.jit(lambda params, batch: token_logprobs(nnx.merge(GRAPH, params), batch), compiler_options=tiny.QUICK)


def expected(sequence):
    """log π and entropy at each token of one sequence, float64; 0 at its first."""
    logp = tiny.log_softmax(tiny.oracle(CONFIG, tiny.params(CONFIG), sequence))[:-1]
    chosen = logp[np.arange(len(sequence) - 1), sequence[1:]]
    return np.append(0, chosen), np.append(0, -np.sum(np.exp(logp) * logp, axis=-1))


class Table(Transformer):
    """Predicts tokens[1:] of row 0 with the given log-probs, whatever it reads."""

    def __init__(self, tokens, next_logprobs):
        logits = np.full((len(tokens), 64), -1e30, np.float32)
        for t, (token, logprob) in enumerate(zip(tokens[1:], next_logprobs, strict=True)):
            logits[t, token], logits[t, 63] = logprob, np.log1p(-np.exp(logprob))
        logits[-1, 0] = 0
        self.table = nnx.Param(jnp.asarray(logits))

    def routed(self, tokens, positions, segment_ids=None, cache=None, replay=None):
        return jnp.eye(tokens.shape[1])[None], None, None

    def head(self):
        return self.table.get_value()


def test_bug_018_020_023_a_mask_on_a_token_selects_that_tokens_logprob():
    # tokens 10 11 12 13, next-token log-probs -1 -2 -4: index 2 is token 12, so -2; a shifted mask gives -4.
    batch = tiny.lay_out([[[10, 11, 12, 13]]], 4)
    logprobs, _ = token_logprobs(Table([10, 11, 12, 13], [-1.0, -2.0, -4.0]), batch)
    np.testing.assert_allclose(logprobs[0], [0, -1, -2, -4], atol=1e-6)
    np.testing.assert_allclose(np.sum(np.asarray(logprobs)[0, [False, False, True, False]]), -2, atol=1e-6)
    # Two prompt tokens, two actions, next-token log-probs -5 -1 -2: the actions' are the last two.
    logprobs, _ = token_logprobs(Table([10, 11, 12, 13], [-5.0, -1.0, -2.0]), batch)
    np.testing.assert_allclose(logprobs[0, 2:], [-1, -2], atol=1e-6)


def test_bug_018_020_023_packed_and_padded_rows_equal_a_plain_log_softmax():
    batch = tiny.lay_out([[A, B, None], [None, B, C, A]], 16, sequences=3)
    logprobs, entropy = (np.asarray(x) for x in evaluate(tiny.params(CONFIG), batch))
    assert logprobs.dtype == entropy.dtype == np.float32
    rest = np.ones((2, 16), bool)
    for row, start, sequence in ((0, 0, A), (0, 5, B), (1, 1, B), (1, 8, C), (1, 9, A)):
        span = slice(start, start + len(sequence))
        rest[row, span] = False
        for found, oracle in zip((logprobs, entropy), expected(sequence), strict=True):
            np.testing.assert_allclose(found[row, span], oracle, atol=1e-4, rtol=1e-4)
            assert found[row, start] == 0, "nothing in the row predicts a first token"
    assert not logprobs[rest].any() and not entropy[rest].any(), "padding is 0"


def test_bug_087_123_alone_in_a_batch_and_padded_twice_as_wide_are_equal():
    layouts = {8: [[B]], 16: [[B], [A, A], [C, A], [A, B]], 32: [[B]]}
    found = [
        np.asarray(evaluate(tiny.params(CONFIG), tiny.lay_out(rows, length, sequences=2))[0])[0, :7]
        for length, rows in layouts.items()
    ]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-5, rtol=0)
        np.testing.assert_allclose(np.exp(other - found[0]), 1, atol=1e-5)


def test_bug_095_logprobs_of_a_bfloat16_model_are_float32():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params(CONFIG))
    logprobs, entropy = evaluate(half, tiny.lay_out([[A]], 8))
    assert logprobs.dtype == entropy.dtype == jnp.float32
    stored = np.asarray(logprobs)[0, 1:5]
    assert np.any(stored != stored.astype(jnp.bfloat16).astype(np.float32)), "not rounded to bfloat16 on the way"


@pytest.mark.parametrize("shared", [None, 1.0])
def test_values_of_a_bfloat16_critic_are_not_rounded_to_it(shared):
    """Steps of 2⁻⁸ between ½ and 1 would be as large as what tells one token of a turn from the next."""
    models = dataclasses.replace(Models.of(CONFIG, shared_trunk=shared), compute_dtype=jnp.bfloat16)
    kind, rngs = (Critic if shared is None else SharedCritic), nnx.Rngs(0)
    critic = tiny.stirred(nnx.state(kind(CONFIG, rngs=rngs)))
    values, final = models.both(tiny.params(CONFIG), critic, tiny.lay_out([[B]], 8))[3:]
    assert values.dtype == final.dtype == jnp.float32
    values = np.asarray(values)[0, 1:7]
    assert np.all(values != values.astype(jnp.bfloat16).astype(np.float32))


class Outputs(Critic):
    """A critic whose output after each token is given."""

    def __init__(self, after):
        self.after = nnx.Param(jnp.asarray(after, jnp.float32))

    def __call__(self, tokens, positions, segment_ids):
        return self.after.get_value()


def test_bug_021_a_value_is_of_the_state_before_its_token():
    # Three prompt tokens, two actions: actions [3, 4] are valued after tokens 2 and 3, the whole prefix after 4.
    values, final = prefix_values(Outputs([[0.0, 0.1, 0.2, 0.3, 0.4]]), tiny.lay_out([[[1, 2, 3, 4, 5]]], 5))
    np.testing.assert_allclose(values[0], [0, 0, 0.1, 0.2, 0.3])
    np.testing.assert_allclose(final, [[0.4]])


def test_bug_021_packed_values_restart_and_final_values_are_each_sequences_own():
    batch = tiny.lay_out([[None, [1, 2, 3], [4, 5], None], [[6, 7], None], [None]], 8, sequences=3)
    after = np.arange(1, 25, dtype=np.float32).reshape(3, 8) / 8
    values, final = prefix_values(Outputs(after), batch)
    expected = np.zeros((3, 8))
    expected[0, 2:4], expected[0, 5], expected[1, 1] = after[0, 1:3], after[0, 4], after[1, 0]
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(final, [[after[0, 3], after[0, 5], 0], [after[1, 1], 0, 0], [0, 0, 0]])


def test_starts_are_first_tokens_and_padding():
    batch = tiny.lay_out([[None, [1, 2], [3], None]], 5, sequences=2)
    np.testing.assert_array_equal(starts_of_sequences(batch), [[True, True, False, True, True]])
