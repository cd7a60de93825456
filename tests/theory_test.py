"""What MPO's theory claims, exactly: all trajectories of random token-level MDPs are enumerated, in float64.

What the expected gradient E Σ A ∇log π of each estimator is, and so what these tests hold:

  λ_turn = 1, β = 0; token GAE, λ = 1  ∇J for *any* critic
  any λ_turn, β = 0; token GAE, any λ  ∇J for the exact critic; biased for others unless λ = 1
  λ_turn = λ_intra = 1, any β          ∇J for a critic that does not change inside turns
  any λ_turn, exact critic, turns of L tokens
                                       ∇J with the part of a turn's k-th token times 1 + β(1 − w_k/L), w_k = Σ_{j<k}
                                       λ_intra^j: no bias at L = 1, one common factor at λ_intra = 0, else a bias
                                       towards early tokens that never turns against ∇J
  the same, turns of random length     biased (13–48 % of |∇J| in 40 draws at β = 1), by no such factor, but close to
                                       ∇J in direction (cosine ≥ .98)
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import token_mdp
from hypothesis import given, settings
from hypothesis import strategies as st

from mpo_jax import kernels

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, database=None)
EXACT = {"rtol": 0, "atol": 1e-12}


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@st.composite
def cases(draw, longest=(1, 2, 3)):
    """An MDP and two policies, far apart or close."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    turns, longest, vocabulary = draw(st.integers(2, 3)), draw(st.sampled_from(longest)), draw(st.integers(2, 3))
    small = turns * longest * vocabulary > 18
    mdp = token_mdp.random_mdp(
        rng,
        turns=turns,
        longest=longest,
        vocabulary=2 if small else vocabulary,
        observations=draw(st.integers(1, 2)),
        end_of_turn=draw(st.booleans()),
    )
    logits = rng.normal(size=(len(mdp.turn_of), mdp.vocabulary))
    step = draw(st.sampled_from([0.1, 0.5, 2.0])) * rng.normal(size=logits.shape)
    return mdp, token_mdp.softmax(logits), token_mdp.softmax(logits + step)


def surrogates(mdp, old, new):
    """Macro E_{h_t~π, y_t~π'} A^turn and token E_{h_{t,i}~π, a~π'} A^tok, summed over turns and tokens."""
    p = mdp.probabilities(old)
    token, _, turn = mdp.log_ratios(new, old)
    macro = p @ np.sum(np.exp(turn) * mdp.turn_advantages(old), axis=1)
    return macro, p @ np.sum(np.exp(token) * mdp.chosen(mdp.token_advantages(old)), axis=1)


def prefix_gaps(mdp, old, new):
    """E_{prefix~π'} g − E_{prefix~π} g for each turn and i ≥ 2 (h_t ~ π; 0 for turns that have ended), and max|g|."""
    g = np.sum(new * mdp.token_advantages(old), axis=1)
    _, prefix, _ = mdp.log_ratios(new, old)
    gap = g * mdp.by_state(mdp.probabilities(old)[:, None] * np.expm1(prefix))
    turns, length = mdp.turn_of.max() + 1, mdp.position_of.max() + 1
    sums = np.bincount(mdp.turn_of * length + mdp.position_of, gap, turns * length).reshape(turns, length)
    np.testing.assert_allclose(sums[:, 0], 0, **EXACT)
    return sums[:, 1:], np.abs(g).max()


def delta(mdp, old, new):
    return np.max(np.abs(prefix_gaps(mdp, old, new)[0]), initial=0.0)


def bound_ratio(mdp, old, new):
    """|Macro − Token| over (T+1)(L_max−1)Δ."""
    macro, token = surrogates(mdp, old, new)
    return abs(macro - token) / ((mdp.turn_of.max() + 1) * mdp.position_of.max() * delta(mdp, old, new))


@SETTINGS
@given(cases())
def test_performance_difference_over_turns_and_over_tokens(case):
    mdp, old, new = case
    found = mdp.objective(new) - mdp.objective(old)
    p, a_turn = mdp.probabilities(new), mdp.turn_advantages(old)
    a_token = mdp.chosen(mdp.token_advantages(old))
    np.testing.assert_allclose(p.sum(), 1, **EXACT)
    np.testing.assert_allclose(p @ a_turn.sum(axis=1), found, **EXACT)
    np.testing.assert_allclose(p @ a_token.sum(axis=1), found, **EXACT)
    np.testing.assert_allclose(mdp.probabilities(old) @ a_turn, 0, **EXACT)  # under π itself every turn's is 0
    inside = np.stack([np.sum(a_token * (mdp.turns == t), axis=1) for t in range(a_turn.shape[1])], axis=1)
    np.testing.assert_allclose(inside, a_turn, **EXACT)  # a turn's advantage is the sum of its tokens'


@SETTINGS
@given(cases())
def test_macro_and_token_surrogates_are_within_the_bound(case):
    mdp, old, new = case
    macro, token = surrogates(mdp, old, new)
    gaps, _ = prefix_gaps(mdp, old, new)
    np.testing.assert_allclose(macro - token, gaps.sum(), **EXACT)  # the proof: one gap a turn and place i ≥ 2
    assert gaps.size == (mdp.turn_of.max() + 1) * mdp.position_of.max()
    assert abs(macro - token) <= gaps.size * delta(mdp, old, new) + 1e-12


@SETTINGS
@given(cases(longest=(1,)))
def test_surrogates_are_equal_with_one_token_turns(case):
    mdp, old, new = case
    np.testing.assert_allclose(*surrogates(mdp, old, new), **EXACT)
    assert delta(mdp, old, new) == 0


@pytest.mark.parametrize(
    "turns,longest,least", [(1, 2, 1 - 1e-9), (2, 2, 0.95), (3, 2, 0.85), (2, 3, 0.9), (3, 3, 0.45)]
)
def test_the_bound_is_not_vacuous(turns, longest, least):
    rng, found = np.random.default_rng(0), []
    for _ in range(40):
        mdp = token_mdp.random_mdp(rng, turns=turns, longest=longest)
        found += [bound_ratio(mdp, mdp.policy(rng), mdp.policy(rng)) for _ in range(5)]
    assert least - 1e-9 <= max(found) <= 1 + 1e-9  # with one turn of two tokens there is one gap: equality


@SETTINGS
@given(cases(longest=(2, 3)))
def test_delta_is_bounded_by_the_complete_turn_kl(case):
    mdp, old, new = case
    gaps, largest = prefix_gaps(mdp, old, new)
    _, _, turn = mdp.log_ratios(new, old)
    forward = np.max(mdp.probabilities(old) @ (np.exp(turn) * turn))  # KL(π'‖π) of a turn, mean over its histories
    backward = np.max(mdp.probabilities(old) @ -turn)
    assert min(forward, backward) >= 0
    for kl in (forward, backward):
        assert np.abs(gaps).max() <= 2 * np.sqrt(kl / 2) * largest + 1e-12


def test_the_kl_bound_is_not_vacuous():
    rng, found = np.random.default_rng(1), []
    for _ in range(200):
        mdp = token_mdp.random_mdp(rng, turns=2, longest=2)
        old, new = mdp.policy(rng), mdp.policy(rng)
        gaps, largest = prefix_gaps(mdp, old, new)
        kl = np.max(mdp.probabilities(old) @ -mdp.log_ratios(new, old)[2])
        found.append(np.abs(gaps).max() / (2 * np.sqrt(kl / 2) * largest))
    assert max(found) > 0.3


def _mae(rewards, values, mask, turns, lambda_turn, lambda_intra, beta):
    kwargs = {"lambda_turn": lambda_turn, "lambda_intra": lambda_intra, "beta": beta}
    return kernels.multiscale_advantages(rewards, values, mask, turns, **kwargs)


def _gae(rewards, values, mask, sequences, lambda_):
    return kernels.token_gae(rewards, values, mask, sequences, lambda_=lambda_)


every_mae = jax.jit(jax.vmap(_mae, (0, 0, 0, 0, None, None, None)))  # traced λ and β: one compile a shape
every_gae = jax.jit(jax.vmap(_gae, (0, 0, 0, 0, None)))


def advantages(mdp, critic, lambda_turn, lambda_intra, beta):
    """The library's A^MAE of every trajectory, with critic [N]."""
    row = mdp.rewards, np.where(mdp.mask, critic[mdp.states], 0), mdp.mask, mdp.turns
    return np.asarray(every_mae(*row, lambda_turn, lambda_intra, beta))


def token_gae(mdp, critic, lambda_):
    row = mdp.rewards, np.where(mdp.mask, critic[mdp.states], 0), mdp.mask, np.where(mdp.mask, 0, -1)
    return np.asarray(every_gae(*row, lambda_))


def world(seed, **kwargs):
    rng = np.random.default_rng(seed)
    mdp = token_mdp.random_mdp(rng, **kwargs)
    policy = mdp.policy(rng)
    return mdp, policy, mdp.score_gradient(policy, np.where(mdp.mask, mdp.outcomes[:, None], 0.0)), rng


def in_turn(mdp, critic):
    """The critic that keeps all through a turn what it said at its start."""
    start = np.take_along_axis(mdp.states, np.take_along_axis(mdp.first, np.maximum(mdp.turns, 0), 1), 1)
    found = np.zeros(len(critic))
    found[mdp.states[mdp.mask]] = critic[start[mdp.mask]]
    return found


def bias(found, gradient):
    return np.linalg.norm(found - gradient) / np.linalg.norm(gradient)


def test_the_score_gradient_is_the_gradient_of_the_objective(float64):
    mdp, policy, gradient, _ = world(0)

    def objective(logits):
        logprobs = jax.nn.log_softmax(logits)[mdp.states, mdp.tokens]
        return jnp.sum(mdp.chance * mdp.outcomes * jnp.exp(jnp.sum(jnp.where(mdp.mask, logprobs, 0), axis=1)))

    np.testing.assert_allclose(jax.grad(objective)(np.log(policy)), gradient, **EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_beta_zero_and_lambda_one_is_unbiased_for_any_critic(seed, float64):
    mdp, policy, gradient, rng = world(seed)
    critic = rng.normal(size=len(mdp.turn_of))
    for a in (advantages(mdp, critic, 1.0, 0.95, 0.0), token_gae(mdp, critic, 1.0)):
        np.testing.assert_allclose(mdp.score_gradient(policy, a), gradient, **EXACT)
    for a in (advantages(mdp, critic, 0.8, 0.95, 0.0), token_gae(mdp, critic, 0.8)):
        assert bias(mdp.score_gradient(policy, a), gradient) > 0.05  # λ < 1 believes the critic


@pytest.mark.parametrize("lambda_turn", [0.0, 0.8, 1.0])
def test_beta_zero_is_unbiased_for_the_exact_critic_at_any_lambda(lambda_turn, float64):
    mdp, policy, gradient, _ = world(3)
    critic = mdp.values(policy)
    for a in (advantages(mdp, critic, lambda_turn, 0.95, 0.0), token_gae(mdp, critic, lambda_turn)):
        np.testing.assert_allclose(mdp.score_gradient(policy, a), gradient, **EXACT)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_a_critic_blind_inside_turns_is_unbiased_at_lambda_one_for_any_beta(beta, float64):
    mdp, policy, gradient, rng = world(4)
    critic = rng.normal(size=len(mdp.turn_of))
    found = mdp.score_gradient(policy, advantages(mdp, in_turn(mdp, critic), 1.0, 1.0, beta))
    np.testing.assert_allclose(found, gradient, **EXACT)
    assert bias(mdp.score_gradient(policy, advantages(mdp, critic, 1.0, 1.0, beta)), gradient) > 0.05


@pytest.mark.parametrize("lambda_intra", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_beta_reweights_the_tokens_of_a_turn_of_fixed_length(lambda_intra, beta, float64):
    mdp, policy, gradient, _ = world(5, end_of_turn=False)
    found = mdp.score_gradient(policy, advantages(mdp, mdp.values(policy), 0.8, lambda_intra, beta))
    w = np.cumsum(lambda_intra ** np.arange(3.0))
    factor = (1 + beta * (1 - w / 3))[mdp.position_of][:, None]
    np.testing.assert_allclose(found, factor * gradient, **EXACT)
    assert (factor >= 1 - 1e-12).all() and bias(found, gradient) > 0.1  # never against ∇J, nor equal to it
    assert (np.ptp(factor) < 1e-12) == (lambda_intra == 0.0)


def test_one_token_turns_are_unbiased_for_any_beta(float64):
    mdp, policy, gradient, rng = world(6, turns=3, longest=1, vocabulary=3)
    for critic, lambda_turn in ((rng.normal(size=len(mdp.turn_of)), 1.0), (mdp.values(policy), 0.8)):
        found = mdp.score_gradient(policy, advantages(mdp, critic, lambda_turn, 0.95, 2.0))
        np.testing.assert_allclose(found, gradient, **EXACT)


def test_beta_is_biased_with_an_exact_critic_and_turns_of_random_length(float64):
    found = []
    for seed in range(40):
        mdp, policy, gradient, _ = world(seed)
        g = mdp.score_gradient(policy, advantages(mdp, mdp.values(policy), 0.8, 0.95, 1.0))
        found.append((bias(g, gradient), np.sum(g * gradient) / np.linalg.norm(g) / np.linalg.norm(gradient)))
    biases, cosines = np.transpose(found)
    assert biases.min() > 0.1 and cosines.min() > 0.95


def turn_ratio_objective(mdp, old, a, ids, *, differentiable=False):
    """E_old Σ ρ A as a function of the logits; with `differentiable`, ρ's gradient is the whole turn's."""

    def row(logprobs, anchor, a, ids, mask):
        ratio = kernels.importance_ratio(logprobs, anchor, ids, mask)
        if differentiable:
            total = kernels.segment_sum(jnp.where(mask, logprobs - anchor, 0), ids, mask, len(ids))
            ratio = jnp.exp(kernels.spread(total, ids, mask))
        return jnp.sum(jnp.where(mask, ratio * a, 0))

    def objective(logits):
        logprobs = jax.nn.log_softmax(logits)[mdp.states, mdp.tokens]
        rows = jax.vmap(row)(logprobs, np.log(old)[mdp.states, mdp.tokens], a, ids, mdp.mask)
        return jnp.sum(mdp.probabilities(old) * rows)

    return objective


def test_check_8_the_turn_ratio_keeps_the_centred_part_of_the_gradient(float64):
    mdp, old, _, rng = world(7)
    new, critic = mdp.policy(rng), rng.normal(size=len(mdp.turn_of))
    flat, shaped = (advantages(mdp, critic, 0.8, 0.95, beta) for beta in (0.0, 1.0))
    ratio = np.exp(np.take_along_axis(mdp.log_ratios(new, old)[2], np.maximum(mdp.turns, 0), axis=1))
    p = mdp.probabilities(old)[:, None]
    ours, twin = [], []
    for a in (flat, shaped):
        x = p * ratio * a  # ∇ = E ρ_t Σ_i A_i ∇log π_i
        ours.append(np.asarray(jax.grad(turn_ratio_objective(mdp, old, a, mdp.turns))(np.log(new))))
        np.testing.assert_allclose(ours[-1], mdp.by_pair(x) - new * mdp.by_state(x)[:, None], **EXACT)
        objective = turn_ratio_objective(mdp, old, a, mdp.turns, differentiable=True)
        twin.append(np.asarray(jax.grad(objective)(np.log(new))))
    total = np.stack([np.sum(shaped * (mdp.turns == t), axis=1) for t in range(2)], axis=1)
    x = p * ratio * np.take_along_axis(total, np.maximum(mdp.turns, 0), axis=1)  # E ρ_t (Σ A_i) Σ_j ∇log π_j
    np.testing.assert_allclose(twin[1], mdp.by_pair(x) - new * mdp.by_state(x)[:, None], **EXACT)
    np.testing.assert_allclose(twin[1], twin[0], **EXACT)  # β has no effect at all
    assert bias(ours[1], ours[0]) > 0.1


def test_gradients_are_those_of_the_macro_and_of_the_token_surrogate(float64):
    mdp, old, _, rng = world(8)
    new, one_each = mdp.policy(rng), np.where(mdp.mask, np.arange(mdp.turns.shape[1]), -1)
    a_turn, a_token = mdp.turn_advantages(old), mdp.chosen(mdp.token_advantages(old))

    def macro(logits):
        change = jax.nn.log_softmax(logits)[mdp.states, mdp.tokens] - np.log(old)[mdp.states, mdp.tokens]
        turns = jnp.stack([jnp.sum(jnp.where(mdp.turns == t, change, 0), axis=1) for t in range(2)], axis=1)
        return jnp.sum(mdp.probabilities(old)[:, None] * jnp.exp(turns) * a_turn)

    found = surrogates(mdp, old, new)
    np.testing.assert_allclose(macro(np.log(new)), found[0], **EXACT)
    spread = np.where(mdp.mask, np.take_along_axis(a_turn, np.maximum(mdp.turns, 0), axis=1), 0.0)
    by_turn = turn_ratio_objective(mdp, old, spread, mdp.turns)
    np.testing.assert_allclose(jax.grad(by_turn)(np.log(new)), jax.grad(macro)(np.log(new)), **EXACT)
    by_token = turn_ratio_objective(mdp, old, a_token, one_each)
    np.testing.assert_allclose(by_token(np.log(new)), found[1], **EXACT)
    gradients = [np.asarray(jax.grad(f)(np.log(new))) for f in (by_turn, by_token)]
    assert bias(*gradients) > 0.1  # the two surrogates agree to first order at π' = π only
    for f, a in ((by_turn, spread), (by_token, a_token)):
        expected = mdp.score_gradient(old, a)
        np.testing.assert_allclose(jax.grad(f)(np.log(old)), expected, **EXACT)
        np.testing.assert_allclose(expected, mdp.score_gradient(old, mdp.mask * mdp.outcomes[:, None]), **EXACT)
