"""What runs on accelerators alone, tried on a CPU: recurrences in parallel rounds, and all that is made of them."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.rows import SETTINGS, build, close, rows
from mpo_jax import kernels
from mpo_jax.kernels import multiscale_loops, recurrence

FORMS = {
    "loop": jax.jit(recurrence._loop, static_argnames="reverse"),
    "rounds": jax.jit(recurrence._rounds, static_argnames="reverse"),
}


def elsewhere(kernel):
    """A kernel in the form that is not a CPU's, which it is given while it is traced."""

    @jax.jit
    def form(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
            return kernel(*args, **kwargs)

    return form


multiscale, token_gae = elsewhere(kernels.multiscale_advantages), elsewhere(kernels.token_gae)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_recurrence_is_its_definition(form, length):
    rng = np.random.default_rng(length)
    decay, x = rng.choice([0.0, 0.5, 1.0], length), rng.normal(size=length)
    y, expected = 0.0, []
    for d, now in zip(decay, x, strict=True):
        y = now + d * y
        expected.append(y)
    data = jnp.float32(decay), jnp.float32(x)
    close(FORMS[form](*data, reverse=False), expected)
    close(FORMS[form](*(z[::-1] for z in data), reverse=True), expected[::-1])


@pytest.mark.parametrize("form", FORMS)
def test_nothing_crosses_a_decay_of_zero(form):
    decay, x = jnp.float32([1, 0.5, 0, 0.5]), jnp.float32([1, np.nan, 3, 4])
    np.testing.assert_array_equal(FORMS[form](decay, x, reverse=False), [1, np.nan, 3, 4 + 0.5 * 3])
    np.testing.assert_array_equal(FORMS[form](jnp.flip(decay), jnp.flip(x), reverse=True), [5.5, 3, np.nan, 1])


@SETTINGS
@given(rows(), st.sampled_from([0.0, 0.8, 1.0]), st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 1.0]))
def test_multiscale_elsewhere_matches_the_oracle(row, lambda_turn, lambda_intra, beta):
    hypothesis.assume(len(row.mask) == 64)  # the other size takes long to compile
    values, boot = row.draw(), row.draw()
    terms = {"lambda_turn": lambda_turn, "lambda_intra": lambda_intra, "beta": beta}
    found = multiscale(
        row.rewards, values, row.mask, row.turns, sequence_ids=row.sequences, bootstrap_values=boot, **terms
    )
    close(found, oracles.multiscale(row.rewards, values, row.mask, row.turns, row.sequences, *terms.values(), boot))


@SETTINGS
@given(rows(), st.sampled_from([0.0, 0.95, 1.0]), st.sampled_from([0.9, 1.0]))
def test_token_gae_elsewhere_matches_the_oracle(row, lambda_, discount):
    hypothesis.assume(len(row.mask) == 64)
    data = row.rewards, row.draw(), row.mask, row.sequences
    found = token_gae(*data, lambda_=lambda_, discount=discount)
    close(found, oracles.token_gae(*data, lambda_, discount))


def test_borders_tell_how_much_begins():
    # an observation before and inside the first turn, a turn more, another sequence, padding
    mask = np.array([0, 1, 0, 1, 1, 1, 1, 0], bool)
    turns, sequences = np.array([0, 0, 7, 0, 1, 1, 2, -1]), np.array([0, 0, 0, 0, 0, 0, 1, -1])
    turns, sequences = (jnp.int32(np.where(mask, x, -1)) for x in (turns, sequences))
    np.testing.assert_array_equal(multiscale_loops._borders(turns, sequences), [0, 3, 0, 1, 2, 1, 3, 0])
    np.testing.assert_array_equal(multiscale_loops._borders(turns), [0, 2, 0, 1, 2, 1, 2, 0])


@pytest.mark.parametrize(
    "credit",
    [
        kernels.multiscale_advantages,
        functools.partial(kernels.turn_advantages, lambda_turn=0.9),
        kernels.bilevel_advantages,
        functools.partial(kernels.token_gae, lambda_=0.95),
    ],
)
def test_only_a_cpu_loops_over_tokens(credit):
    row = build([[3, 2], [4]])
    traced = jax.jit(jax.vmap(credit)).trace(*(x[None] for x in (row.rewards, row.draw(), row.mask, row.turns)))
    loops = {p: "stablehlo.while" in traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "tpu", "cuda")}
    assert loops == {"cpu": True, "tpu": False, "cuda": False}
