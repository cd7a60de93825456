"""What Progress Advantage rests on, exactly: small KL-regularised MDPs with random transitions, in float64.

See *Progress Advantage* (arXiv:2606.26080): β log(π*/π_ref) = Q* − V*, V* the *soft* value, under any transitions.
"""

import dataclasses

import jax
import numpy as np
import pytest
import soft_mdp
from hypothesis import given, settings
from hypothesis import strategies as st

from mpo_jax import kernels

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, database=None)
EXACT = {"rtol": 1e-10, "atol": 1e-10}
PAD = 32  # at most 6 states of 5 actions


@st.composite
def mdps(draw):
    """1–6 states, 2–5 actions; discounted and endless, or episodic without a discount."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = draw(st.booleans())
    return soft_mdp.random_mdp(
        rng,
        states=draw(st.integers(1, 6)),
        actions=draw(st.integers(2, 5)),
        gamma=1.0 if ends else draw(st.sampled_from([0.0, 0.5, 0.9, 0.99])),
        beta=draw(st.sampled_from([0.3, 1.0, 3.0])),
        ends=ends,
    )


def score(mdp, policy):
    """The library's score of every state and action, one token a step: [S,A]."""
    size = policy.size
    row = np.zeros((2, PAD))
    row[:, :size] = np.log(policy).ravel(), np.log(mdp.reference).ravel()
    ids = np.where(np.arange(PAD) < size, np.arange(PAD), -1)
    with jax.enable_x64(True):
        found = np.asarray(scores(*row, ids, ids >= 0, mdp.beta))
    return found[:size].reshape(policy.shape)


scores = jax.jit(lambda *row: kernels.progress_advantage(*row[:-1], beta=row[-1]))


def kl(p, q):
    return np.sum(p * np.log(p / q), axis=1)


def objective(mdp, policy):
    return mdp.values(policy).mean()  # from a uniform start


@SETTINGS
@given(mdps(), st.integers(0, 2**32 - 1))
def test_the_solution_is_the_optimum(mdp, seed):
    """Of the objective itself, by its definition: no other policy is better, in any state, near or far."""
    best, rng = mdp.solve(), np.random.default_rng(seed)
    values = mdp.values(best)
    for scale in (1e-3, 0.1, 3.0):
        other = best * np.exp(scale * rng.normal(size=best.shape))
        other /= other.sum(axis=1, keepdims=True)
        gap = values - mdp.values(other)
        assert np.all(gap > -1e-9 * (1 + np.abs(values)))
        assert gap.max() > 0  # the optimum is unique


@SETTINGS
@given(mdps())
def test_the_score_of_the_optimum_is_its_advantage(mdp):
    best = mdp.solve()
    q, v = mdp.action_values(best), mdp.values(best)
    tolerance = {"rtol": 0, "atol": 1e-10 * (1 + np.abs(q).max())}
    np.testing.assert_allclose(score(mdp, best), q - v[:, None], **tolerance)
    np.testing.assert_allclose(v, mdp.beta * np.log(np.sum(mdp.reference * np.exp(q / mdp.beta), axis=1)), **tolerance)


@SETTINGS
@given(mdps())
def test_identities_of_every_state(mdp):
    best = mdp.solve()
    a = score(mdp, best)
    np.testing.assert_allclose(np.sum(mdp.reference * np.exp(a / mdp.beta), axis=1), 1, **EXACT)
    np.testing.assert_allclose(np.sum(best * a, axis=1), mdp.beta * kl(best, mdp.reference), **EXACT)
    np.testing.assert_allclose(np.sum(mdp.reference * a, axis=1), -mdp.beta * kl(mdp.reference, best), **EXACT)
    assert np.all(np.sum(best * a, axis=1) >= -1e-12) and np.all(np.sum(mdp.reference * a, axis=1) <= 1e-12)


@SETTINGS
@given(mdps())
def test_the_mean_value_twin_is_off_by_the_kl(mdp):
    """Q* − E_π* Q* is not the score: it is lower by β KL(π*‖π_ref) in every state."""
    best = mdp.solve()
    q = mdp.action_values(best)
    twin = q - np.sum(best * q, axis=1, keepdims=True)
    off = np.repeat(mdp.beta * kl(best, mdp.reference)[:, None], q.shape[1], axis=1)
    np.testing.assert_allclose(score(mdp, best) - twin, off, rtol=0, atol=1e-10 * (1 + np.abs(q).max()))


@pytest.mark.parametrize("ends", [True, False])
def test_the_mean_value_twin_fails_by_order_one(ends):
    errors = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        mdp = soft_mdp.random_mdp(rng, states=4, actions=4, gamma=1.0 if ends else 0.9, beta=0.3, ends=ends)
        best = mdp.solve()
        q = mdp.action_values(best)
        errors.append(np.abs(score(mdp, best) - (q - np.sum(best * q, axis=1, keepdims=True))).max())
    assert min(errors) > 0.2 and np.median(errors) > 0.4  # advantages are of order 1


@pytest.mark.parametrize("ends", [True, False])
def test_a_policy_that_is_not_the_optimum_has_another_score(ends):
    """Neither β log(π/π_ref) = Q^π − V^π nor = Q* − V* for a policy trained half-way."""
    mdp = soft_mdp.random_mdp(
        np.random.default_rng(1), states=4, actions=3, gamma=1.0 if ends else 0.9, beta=0.3, ends=ends
    )
    best = mdp.solve()
    half = np.sqrt(best * mdp.reference)
    half /= half.sum(axis=1, keepdims=True)
    for policy in (half, best):
        own = score(mdp, half) - (mdp.action_values(policy) - mdp.values(policy)[:, None])
        assert np.abs(own).max() > 0.2


@SETTINGS
@given(mdps(), st.integers(0, 2**32 - 1))
def test_another_reference_adds_its_log_ratio(mdp, seed):
    """log(π*/π') = A*/β + log(π_ref/π'): a foreign reference mixes its own taste into the score."""
    best, other = mdp.solve(), soft_mdp.random_policy(np.random.default_rng(seed), *mdp.reference.shape)
    foreign = score(dataclasses.replace(mdp, reference=other), best)
    taste = mdp.beta * np.log(mdp.reference / other)
    np.testing.assert_allclose(foreign, score(mdp, best) + taste, rtol=0, atol=1e-10 * (1 + np.abs(foreign).max()))


@SETTINGS
@given(mdps(), st.floats(0, 1))
def test_a_reference_on_the_way_to_the_policy_scales_the_score(mdp, alpha):
    """π_α ∝ π_ref^(1−α) π*^α: the score is (1 − α) A* + a constant of the state, and 0 at α = 1."""
    best = mdp.solve()
    near = mdp.reference ** (1 - alpha) * best**alpha
    constant = -mdp.beta * np.log(near.sum(axis=1, keepdims=True))
    near /= near.sum(axis=1, keepdims=True)
    found, a = score(dataclasses.replace(mdp, reference=near), best), score(mdp, best)
    np.testing.assert_allclose(found, (1 - alpha) * a - constant, rtol=0, atol=1e-10 * (1 + np.abs(a).max()))


@SETTINGS
@given(mdps(), st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_a_step_of_several_tokens_sums_to_the_actions_advantage(mdp, length, seed):
    """An action written in L tokens: whatever each token's share, the sum is A*; the mean is A*/L."""
    best, rng = mdp.solve(), np.random.default_rng(seed)
    share = rng.dirichlet(
        np.ones(length), size=2
    )  # how either model spreads the log-prob of the action over its tokens
    state, action = rng.integers(best.shape[0]), rng.integers(best.shape[1])
    logprobs = np.outer(np.log([best[state, action], mdp.reference[state, action]]), np.ones(length)) * share
    row = np.zeros((2, PAD))
    row[:, 3 : 3 + length] = logprobs
    row[:, :3] = rng.normal(size=(2, 3))  # an observation
    mask = (np.arange(PAD) >= 3) & (np.arange(PAD) < 3 + length)
    ids = np.where(np.arange(PAD) < 3 + length, 0, -1)
    with jax.enable_x64(True):
        by_mean, by_sum = (np.asarray(f(*row, ids, mask, mdp.beta))[0] for f in (scores, sums))
    advantage = mdp.action_values(best)[state, action] - mdp.values(best)[state]
    tolerance = 1e-10 * (1 + np.abs(mdp.action_values(best)).max())
    np.testing.assert_allclose([by_sum, length * by_mean], advantage, rtol=0, atol=tolerance)


sums = jax.jit(lambda *row: kernels.progress_advantage(*row[:-1], beta=row[-1], reduce=kernels.segment_sum))


@SETTINGS
@given(mdps(), st.floats(0, 5))
def test_the_score_as_a_dense_reward_keeps_an_optimum(mdp, coefficient):
    """r + c A* is (1+c) r shaped by the potential c V*: the optimum is that of β/(1+c). A* alone has π* itself."""
    best = mdp.solve()
    a = score(mdp, best)
    alone = dataclasses.replace(mdp, rewards=a)
    np.testing.assert_allclose(alone.solve(), best, atol=1e-9)
    np.testing.assert_allclose(alone.values(best), 0, atol=1e-8 * (1 + np.abs(mdp.values(best)).max()))
    dense = dataclasses.replace(mdp, rewards=mdp.rewards + coefficient * a)
    sharper = dataclasses.replace(mdp, beta=mdp.beta / (1 + coefficient))
    np.testing.assert_allclose(dense.solve(), sharper.solve(), atol=1e-8)


@SETTINGS
@given(st.integers(2, 5), st.floats(0.01, 0.95), st.integers(0, 2**32 - 1))
def test_clipping_bounds_the_kl(actions, epsilon, seed):
    """Ratios in [1−ε, 1+ε] of mean 1 under π_old: KL(π_old‖π) ≤ ε²/(2(1−ε))."""
    rng = np.random.default_rng(seed)
    old = soft_mdp.random_policy(rng, 1, actions, scale=2.0)[0]
    change = rng.choice([-1.0, 1.0], actions) * rng.uniform(0.5, 1, actions)
    change -= old @ change
    change *= epsilon / np.abs(change).max() if np.any(change) else 1
    new = old * (1 + change)
    assert abs(new.sum() - 1) < 1e-12
    assert old @ np.log(old / new) <= epsilon**2 / (2 * (1 - epsilon)) + 1e-12


def test_half_epsilon_squared_does_not_bound_the_kl():
    # π_old = (.5, .5), ratios (.5, 1.5), ε = .5: KL = −(ln .5 + ln 1.5)/2 = .1438 > ε²/2 = .125; the bound is .25.
    old, new = np.array([[0.5, 0.5]]), np.array([[0.25, 0.75]])
    assert 0.125 < kl(old, new)[0] < 0.25
    np.testing.assert_allclose(kl(old, new), 0.14384, atol=1e-5)


@SETTINGS
@given(mdps())
def test_an_episodes_scores_telescope_to_its_return_in_the_mean(mdp):
    """E_π* Σ γ^t A*_t = J_r(π*) − V*(s_0) with J_r the return without the KL cost."""
    best = mdp.solve()
    step = np.einsum("sa,sat->st", best, mdp.transitions)
    resolvent = np.linalg.inv(np.eye(len(step)) - mdp.gamma * step)
    total = resolvent @ np.sum(best * score(mdp, best), axis=1)
    reward = resolvent @ np.sum(best * mdp.rewards, axis=1)
    np.testing.assert_allclose(total, reward - mdp.values(best), rtol=0, atol=1e-9 * (1 + np.abs(reward).max()))
