"""Temperature, top-k and top-p against a numpy oracle, and what is drawn against what may be drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpo_jax.rollout.decoding import EXACT, GREEDY, Decoding, draw, likeliest, reshape

V = 7
reshaped = jax.jit(reshape)
drawn = jax.jit(draw)


def oracle(p, temperature, top_k, top_p):
    """The distribution that is drawn from, ids ranked one by one in float64; no two probabilities are equal."""
    if temperature == 0:
        return np.eye(V)[np.argmax(p)]
    q = np.asarray(p, np.float64) ** (1 / temperature)
    order = list(np.argsort(-q))[: top_k or V]
    kept, mass, whole = [], 0.0, sum(q[i] for i in order)
    for i in order:
        if mass >= top_p:
            break
        kept.append(i)
        mass += q[i] / whole
    return np.array([q[i] if i in kept else 0.0 for i in range(V)]) / sum(q[i] for i in kept)


@given(
    st.permutations([0.4, 0.25, 0.16, 0.09, 0.06, 0.03, 0.01]),
    st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    st.integers(0, V + 2),
    st.sampled_from([0.05, 0.5, 0.8, 0.95, 1.0]),
)
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_what_may_be_drawn_is_that_of_the_oracle(p, temperature, top_k, top_p):
    # Two rows of different settings: the second is the policy's own.
    logprobs = np.log(np.array([p, p], np.float32))
    arguments = (np.float32([temperature, 1]), np.int32([top_k, 0]), np.float32([top_p, 1]))
    found = np.exp(np.asarray(reshaped(logprobs, *arguments), np.float64))
    found /= found.sum(-1, keepdims=True)
    np.testing.assert_allclose(found[0], oracle(p, temperature, top_k, top_p), atol=1e-6)
    np.testing.assert_allclose(found[1], p, atol=1e-6)


def test_bug_100_temperature_divides_logits_and_is_normalised_after():
    # Logits [2, 0] at T = 0.5 are [4, 0]: log p(0) = -log(1 + e^-4) = -0.018150; half the log-prob would be -0.253856.
    logprobs = jax.nn.log_softmax(np.float32([[2.0, 0.0]]))
    found = jax.nn.log_softmax(reshaped(logprobs, np.float32([0.5]), np.int32([0]), np.float32([1])))
    np.testing.assert_allclose(found[0, 0], -0.018150, atol=1e-5)


def test_ids_that_tie_at_the_border_are_all_kept():
    logprobs = np.log(np.float32([[0.4, 0.2, 0.2, 0.2]]))
    for top_k, top_p in ((2, 1.0), (0, 0.5)):
        found = reshaped(logprobs, np.float32([1]), np.int32([top_k]), np.float32([top_p]))
        assert np.isfinite(found).all()


def test_bug_091_what_is_cut_off_is_never_drawn_and_the_rest_follows_its_distribution():
    # 4,000 draws: Pearson's X² over 3 cells; the 0.999 quantile of chi-square with 2 degrees of freedom is 13.82.
    n, p = 4000, np.float32([0.3, 0.05, 0.25, 0.2, 0.1, 0.06, 0.04])
    cut = reshaped(
        np.log(np.tile(p, (n, 1))), np.full(n, 0.5, np.float32), np.full(n, 3, np.int32), np.ones(n, np.float32)
    )
    counts = np.bincount(drawn(cut, np.arange(n, dtype=np.uint32), np.full(n, 5, np.int32)), minlength=V)
    expected = n * np.array([0.09, 0, 0.0625, 0.04, 0, 0, 0]) / 0.1925  # squares of the three likeliest
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 13.82


def test_a_draw_is_the_inverse_of_the_running_sum_over_a_vocabulary_of_several_blocks():
    # Ids 64 to 127 and those from 190 on cannot be drawn: a block without mass, and a last one that ends without any.
    n, vocabulary = 300, 200
    logits = np.random.default_rng(0).normal(size=(n, vocabulary)).astype(np.float32)
    logits[:, 64:128], logits[:, 190:] = -np.inf, -np.inf
    seeds, positions = np.arange(n, dtype=np.uint32), np.full(n, 5, np.int32)
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), 5))(seeds)
    uniform = np.asarray(jax.vmap(jax.random.uniform)(keys), np.float64)
    cumulative = np.cumsum(np.exp(logits.astype(np.float64)), axis=-1)
    found = np.asarray(drawn(logits, seeds, positions))
    share = cumulative / cumulative[:, -1:]
    upper = np.take_along_axis(share, found[:, None], axis=-1)[:, 0]
    lower = np.where(found > 0, np.take_along_axis(share, np.maximum(found - 1, 0)[:, None], axis=-1)[:, 0], 0.0)
    assert np.all((lower - 1e-6 <= uniform) & (uniform <= upper + 1e-6)) and np.all(upper > lower)
    assert len(set(found.tolist())) > 80
    np.testing.assert_array_equal(drawn(logits + 100, seeds, positions), found)  # a constant a row changes nothing


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"max_tokens": 0},
    ],
)
def test_what_is_out_of_range_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"decoding: {next(iter(wrong))} is"):
        Decoding(**wrong)


def test_only_the_policys_own_distribution_is_exact():
    assert EXACT.exact and Decoding(stop_ids=(1,), max_tokens=3).exact
    assert not (GREEDY.exact or Decoding(top_k=5).exact or Decoding(top_p=0.9).exact or Decoding(temperature=0.9).exact)


def test_the_likeliest_is_the_first_of_those_that_tie_and_always_an_id():
    rows = jnp.asarray([[0.0, 2.0, 2.0, 1.0], [-jnp.inf] * 4, [3.0, 0.0, 0.0, 3.0], [jnp.nan] * 4])
    np.testing.assert_array_equal(likeliest(rows), [1, 0, 0, 3])
