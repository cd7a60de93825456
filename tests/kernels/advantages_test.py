import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.rows import SETTINGS, build, close, rows
from mpo_jax import kernels

mae = jax.jit(kernels.multiscale_advantages)
turn_gae = jax.jit(kernels.turn_advantages)
bilevel = jax.jit(kernels.bilevel_advantages)
hindsight = jax.jit(kernels.hindsight_weights)
by_token = jax.jit(functools.partial(kernels.hindsight_weights, center=kernels.token_ids))
whiten = jax.jit(kernels.whiten)
token_gae = jax.jit(kernels.token_gae)

BUG_025 = {
    "rewards": np.array([0, 0, 0, 0, 1], np.float32),
    "action_mask": np.array([1, 1, 0, 0, 1], bool),
    "turn_ids": np.array([0, 0, -1, -1, 1]),
}


def turn_means(x, row):
    return {turn: np.mean(np.asarray(x)[t]) for turn, t in oracles.actions(row.mask, row.turns).items()}


def terminal(row):
    """The row with one reward, at the last action of each sequence."""
    rewards = np.where(row.mask, np.float32(0), np.float32(np.nan))
    for tokens in oracles.actions(row.mask, row.sequences).values():
        rewards[tokens[-1]] = 1.0
    return rewards


@SETTINGS
@given(
    rows(),
    st.sampled_from([0.0, 0.6, 0.8, 1.0]),
    st.sampled_from([0.9, 0.95, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
def test_multiscale_matches_the_oracle(row, lambda_turn, lambda_intra, beta):
    values, boot = row.draw(), row.draw()
    found = mae(
        row.rewards,
        values,
        row.mask,
        row.turns,
        sequence_ids=row.sequences,
        bootstrap_values=boot,
        lambda_turn=lambda_turn,
        lambda_intra=lambda_intra,
        beta=beta,
    )
    expected = oracles.multiscale(
        row.rewards, values, row.mask, row.turns, row.sequences, lambda_turn, lambda_intra, beta, boot
    )
    close(found, expected)


@SETTINGS
@given(rows(), st.sampled_from([0.5, 1.0]), st.sampled_from([0.95, 1.0]), st.sampled_from([0.9, 1.0]))
def test_bilevel_matches_the_oracle(row, lambda_turn, lambda_token, discount_turn):
    values, lambdas = row.draw(), (lambda_turn, lambda_token, discount_turn)
    found = bilevel(
        row.rewards,
        values,
        row.mask,
        row.turns,
        sequence_ids=row.sequences,
        lambda_turn=lambda_turn,
        lambda_token=lambda_token,
        discount_turn=discount_turn,
    )
    close(found, oracles.bilevel(row.rewards, values, row.mask, row.turns, row.sequences, *lambdas))


def test_multiscale_under_vmap_and_grad():
    many = [build([[3, 1, 4], [2, 0, 7]], seed, length=64) for seed in range(5)]
    values = np.stack([row.draw() for row in many])
    data = [np.stack([getattr(r, name) for r in many]) for name in ("rewards", "mask", "turns", "sequences")]
    f = jax.vmap(lambda r, v, m, t, s: kernels.multiscale_advantages(r, v, m, t, sequence_ids=s))
    found = jax.jit(f)(data[0], values, *data[1:])
    for row, v, a in zip(many, values, found, strict=True):
        close(a, oracles.multiscale(row.rewards, v, row.mask, row.turns, row.sequences, 0.8, 0.95, 1.0))
    grad = jax.grad(lambda v: f(data[0], v, *data[1:]).sum())(values)
    assert np.isfinite(grad).all() and not grad[~data[1]].any()


@SETTINGS
@given(rows())
def test_check_1_turn_advantages_ignore_values_inside_turns(row):
    values = row.draw()
    starts = np.zeros_like(row.mask)
    for tokens in oracles.actions(row.mask, row.turns).values():
        starts[tokens[0]] = True
    other = np.where(starts, values, 1e6 * row.draw())
    found = [
        turn_gae(row.rewards, v, row.mask, row.turns, sequence_ids=row.sequences, lambda_turn=0.8)
        for v in (values, other)
    ]
    np.testing.assert_array_equal(*found)


@SETTINGS
@given(rows(), st.sampled_from([0.5, 1.0, 2.0]))
def test_check_2_and_3_turn_means_are_the_turn_advantages(row, beta):
    data, kwargs = (row.rewards, row.draw(), row.mask, row.turns), {"sequence_ids": row.sequences}
    turns, found = turn_gae(*data, lambda_turn=0.8, **kwargs), mae(*data, beta=beta, **kwargs)
    means = turn_means(found, row)
    for turn, mean in turn_means(turns, row).items():
        np.testing.assert_allclose(means[turn], mean, atol=2e-5)
        assert len(set(np.asarray(turns)[row.mask & (row.turns == turn)])) == 1  # β = 0: constant in a turn
    if row.mask.sum() > 1:  # after whitening, affinely: one slope and one offset for all turns
        white = np.asarray(whiten(found[None], row.mask[None])[0])
        x, y = (np.array(list(turn_means(a, row).values())) for a in (found, white))
        kept = np.asarray(found)[row.mask]
        np.testing.assert_allclose(y, (x - kept.mean()) / np.sqrt(kept.var() + 1e-8), atol=1e-3)


def test_check_3_one_token_turns_are_turn_gae_for_any_beta():
    row = build([[1] * 9, [1] * 5], length=64)
    data = row.rewards, row.draw(), row.mask, row.turns
    expected = turn_gae(*data, lambda_turn=0.8, sequence_ids=row.sequences)
    for beta in (0.0, 1.0, 2.0):
        close(mae(*data, beta=beta, sequence_ids=row.sequences), expected)
    close(token_gae(*data[:3], row.sequences, lambda_=0.8), expected)


def test_check_4_lambda_intra_one_centres_the_values():
    row = build([[4, 3, 7]], length=64)
    values = row.draw()
    found = mae(row.rewards, values, row.mask, row.turns, lambda_intra=1.0)
    level = turn_gae(row.rewards, values, row.mask, row.turns, lambda_turn=0.8)
    mean = np.array([turn_means(values, row).get(t, 0) for t in row.turns])
    close((found - level)[row.mask], -(values - mean)[row.mask])


def test_check_5_lambda_one_is_outcome_less_value_and_not_token_ppo():
    row = build([[4, 3, 7]], length=64)
    values, rewards = row.draw(), terminal(row)
    found = turn_gae(rewards, values, row.mask, row.turns, lambda_turn=1.0)
    first = {turn: values[t[0]] for turn, t in oracles.actions(row.mask, row.turns).items()}
    start = np.array([first.get(t, 0) for t in row.turns])
    close(found[row.mask], (1.0 - start)[row.mask])
    multi = mae(rewards, values, row.mask, row.turns, lambda_turn=1.0, lambda_intra=1.0)
    token = token_gae(rewards, values, row.mask, row.sequences, lambda_=1.0)
    means = np.array([turn_means(values, row).get(t, 0) for t in row.turns])
    close((token - multi)[row.mask], (start - means)[row.mask])
    assert np.abs((token - multi)[row.mask]).max() > 0.1


def test_check_6_observations_change_nothing():
    few, many = build([[4, 3, 7], [2, 2]], 1, 64, observations=0), build([[4, 3, 7], [2, 2]], 2, 1024, observations=50)
    actions = few.rng.normal(size=(2, few.mask.sum())).astype(np.float32)
    found = []
    for row in (few, many):
        rewards, values = (np.full(len(row.mask), np.nan, np.float32) for _ in range(2))
        rewards[row.mask], values[row.mask] = actions
        found.append(mae(rewards, values, row.mask, row.turns, sequence_ids=row.sequences)[row.mask])
    np.testing.assert_allclose(*found, atol=1e-6)


def test_packing_equals_separate_rows():
    packed = build([[4, 3], [2, 5]], length=64)
    values = packed.draw()
    both = mae(packed.rewards, values, packed.mask, packed.turns, sequence_ids=packed.sequences)
    for s in (0, 1):
        alone = packed.mask & (packed.sequences == s)
        close(mae(packed.rewards, values, alone, packed.turns)[alone], both[alone])


@pytest.mark.parametrize("junk", [9.0, -1000.0, np.nan])
def test_bug_025_mpo_ignores_observations(junk):
    values = np.array([0.2, 0.4, junk, junk, 0.6], np.float32)
    lambdas = {"lambda_turn": 0.5, "lambda_intra": 0.5}
    np.testing.assert_allclose(mae(values=values, **BUG_025, **lambdas), [0.65, 0.55, 0, 0, 0.4], rtol=1e-6)
    found = turn_gae(values=values, **BUG_025, lambda_turn=0.5)
    np.testing.assert_allclose(found, [0.6, 0.6, 0, 0, 0.4], rtol=1e-6)


def test_plain_arrays_from_numpy_and_dlpack_agree():
    row = build([[4, 3, 7]], length=64)
    data = row.rewards, row.draw(), row.mask, row.turns
    expected = kernels.multiscale_advantages(*data)
    np.testing.assert_array_equal(kernels.multiscale_advantages(*(jnp.from_dlpack(x) for x in data)), expected)


def test_torch_tensors_through_dlpack_agree():
    torch = pytest.importorskip("torch")
    row = build([[4, 3, 7]], length=64)
    data = row.rewards, row.draw(), row.mask, row.turns
    found = kernels.multiscale_advantages(*(jnp.from_dlpack(torch.tensor(x)) for x in data))
    np.testing.assert_array_equal(found, kernels.multiscale_advantages(*data))


@SETTINGS
@given(rows())
def test_whiten_matches_the_oracle(row):
    x = row.draw(3.0)
    close(whiten(x[None], row.mask[None])[0], oracles.whiten(x, row.mask))


@pytest.mark.parametrize("mask", [[1, 0, 0], [0, 0, 0]])
def test_bug_042_whitening_fewer_than_two_tokens(mask):
    x, mask = np.array([[2, 5, np.nan]], np.float32), np.array([mask], bool)
    assert not np.any(whiten(x, mask))  # x − mean
    assert np.isfinite(jax.grad(lambda x: whiten(x, mask).sum())(x)).all()


@pytest.mark.parametrize("value", [0.5, 0.7, 1.1, 100.1])
@pytest.mark.parametrize("shape", [(2, 3), (7, 333)])
def test_whiten_of_equal_values_is_zero(value, shape):
    """Their float32 mean is off by more than 1e-4 · value: over √1e-8 that would be as large as a real advantage."""
    assert not np.any(whiten(np.full(shape, value, np.float32), np.ones(shape, bool)))


@SETTINGS
@given(rows(), st.sampled_from([0.0, 0.5]), st.sampled_from([0.3, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_hindsight_matches_the_oracle(row, kappa, tau, epsilon_w):
    delta, sign = row.draw(), row.rng.choice([-1.0, 0.0, 1.0], 4).astype(np.float32)
    data = delta, sign[row.sequences], row.mask, row.executable, row.turns
    kwargs = {"sequence_ids": row.sequences, "kappa": kappa, "tau": tau, "epsilon_w": epsilon_w}
    close(hindsight(*data, **kwargs), oracles.hindsight(*data, row.sequences, kappa, tau, epsilon_w))
    close(by_token(*data, **kwargs), oracles.hindsight(*data, row.sequences, kappa, tau, epsilon_w, by_token=True))


@SETTINGS
@given(rows(), st.sampled_from([-2.0, 1.5]))
def test_hindsight_checks_of_the_paper(row, advantage):
    delta, a = row.draw(), np.full(len(row.mask), advantage, np.float32)
    data, kwargs = (row.mask, row.executable, row.turns), {"sequence_ids": row.sequences}
    w = np.asarray(hindsight(delta, a, *data, **kwargs))
    assert (np.abs(w - 1) < 0.5).all() and (w[~row.mask] == 1).all()
    for members in oracles.actions(row.mask, row.sequences).values():
        keep = np.isin(np.arange(len(w)), members)
        np.testing.assert_allclose(np.mean([w[t[0]] for t in oracles.actions(keep, row.turns).values()]), 1, atol=1e-5)
        np.testing.assert_allclose(np.mean(np.asarray(by_token(delta, a, *data, **kwargs))[keep]), 1, atol=1e-5)
    moved = hindsight(delta + np.float32(0.7), a, *data, **kwargs)
    np.testing.assert_allclose(moved, w, atol=1e-5)  # a constant added to every d changes nothing


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_hindsight_credit_never_falls_as_d_grows(sign):
    row = build([[1] * 6], length=64, observations=0, trailing=False)
    delta = np.where(row.mask, np.sort(row.draw(garbage=9)), 0).astype(np.float32)
    a = np.full(64, sign, np.float32)
    credit = (a * hindsight(delta, a, row.mask, row.mask, row.turns))[row.mask]
    assert (np.diff(credit) >= 0).all() and (np.sign(credit) == sign).all() and np.ptp(credit) > 0.1


@pytest.mark.parametrize(
    "change",
    [{"epsilon_w": 0.0}, {"kappa": np.inf}, {"advantage": 0.0}, {"delta": 0.0}, {"sizes": [[9]]}, {"executable": 0}],
)
def test_hindsight_reduces_to_grpo_exactly(change):
    row = build(change.pop("sizes", [[4, 3, 7]]), length=64)
    a = np.full(64, change.pop("advantage", 1.0), np.float32)
    delta = row.draw() * np.float32(change.pop("delta", 1.0))
    executable = row.executable & bool(change.pop("executable", 1))
    np.testing.assert_array_equal(hindsight(delta, a, row.mask, executable, row.turns, **change), np.ones(64))


def test_hindsight_has_no_gradient_and_keeps_nan_visible():
    row = build([[4, 3, 7]], length=64)
    a, delta = np.ones(64, np.float32), row.draw()
    assert not np.any(jax.grad(lambda d: hindsight(d, a, row.mask, row.mask, row.turns).sum())(delta))
    delta[np.flatnonzero(row.mask)[0]] = np.nan
    assert np.isnan(hindsight(delta, a, row.mask, row.mask, row.turns)[row.mask]).all()
