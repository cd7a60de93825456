"""Every algorithm with its published or documented defaults, from advantages to both losses, as float64 loops."""

import math
from typing import NamedTuple

import jax
import numpy as np
import oracles
import pytest
from algorithms_test import ALGORITHMS, BATCH, EVALUATION, B, T, compiled
from kernels.rows import close

from mpo_jax import algorithms

RNG = np.random.default_rng(11)
NEW = EVALUATION.logprobs + 0.3 * RNG.normal(size=(B, T)).astype(np.float32)  # far enough for every clip range
NEW_VALUES = EVALUATION.values + 0.3 * RNG.normal(size=(B, T)).astype(np.float32)
MASK, TURNS, SEQUENCES = BATCH.action_mask, BATCH.turn_ids, BATCH.sequence_ids
EPISODES = [(b, s, t) for b in range(B) for s, t in oracles.actions(MASK[b], SEQUENCES[b]).items()]


def rewarded():
    """Of the first group's episodes one is half a success; those that succeed also get a little for the first turn."""
    rewards = BATCH.rewards.copy()
    for b, _, tokens in EPISODES:
        first = [t for t in tokens if TURNS[b, t] == TURNS[b, tokens[0]]]
        rewards[b, first[-1]] += np.float32(0.125 * rewards[b, tokens[-1]])
    b, _, tokens = EPISODES[0]
    rewards[b, tokens[-1]] = 0.5
    return rewards


PLAYED = BATCH.replace(rewards=rewarded())
RETURNS = np.array([math.fsum(PLAYED.rewards[b, tokens]) for b, _, tokens in EPISODES])
GROUPS = np.array([BATCH.group_ids[b, s] for b, s, _ in EPISODES])


def by_row(oracle, *arguments):
    """The oracle of a row, whitened over the batch."""
    rows = [
        oracle(PLAYED.rewards[b], EVALUATION.values[b], MASK[b], *(x[b] for x in arguments[0]), *arguments[1:])
        for b in range(B)
    ]
    return oracles.whiten(np.stack(rows), MASK)


def token_gae(lambda_):
    """λ a number, or a function of an episode's number of tokens."""

    def row(b):
        length = {s: len(t) for s, t in oracles.actions(MASK[b], SEQUENCES[b]).items()}
        decay = [lambda_(length.get(s, 1)) for s in SEQUENCES[b]] if callable(lambda_) else lambda_
        return oracles.token_gae(PLAYED.rewards[b], EVALUATION.values[b], MASK[b], SEQUENCES[b], decay)

    return lambda: oracles.whiten(np.stack([row(b) for b in range(B)]), MASK)


def multiscale(*lambdas):
    return lambda: by_row(oracles.multiscale, (TURNS, SEQUENCES), *lambdas)


def bilevel(*lambdas):
    return lambda: by_row(oracles.bilevel, (TURNS, SEQUENCES), *lambdas)


def group(normalise_std, share=lambda b, tokens, a: a):
    """The episode's advantage in its group, or what `share` makes of it, on its tokens."""

    def credit():
        out = np.zeros((B, T))
        a = oracles.group_advantages(RETURNS, GROUPS, normalise_std)
        for (b, _, tokens), advantage in zip(EPISODES, a, strict=True):
            out[b, tokens] = share(b, tokens, advantage)
        return out

    return credit


def steps():
    """{(b, turn): (state, discounted reward to go)} of every turn of the batch."""
    found = {}
    for b, _, tokens in EPISODES:
        to_go = 0.0
        for turn in sorted({int(TURNS[b, t]) for t in tokens}, reverse=True):
            own = [t for t in tokens if TURNS[b, t] == turn]
            to_go = math.fsum(PLAYED.rewards[b, own]) + 0.95 * to_go
            found[b, turn] = int(BATCH.state_ids[b, own[0]]), to_go
    return found


def with_anchor(b, tokens, advantage):
    """GiGPO: plus the step's return against the mean of all steps on the same state; alone, 0."""
    found, out = steps(), []
    for t in tokens:
        state, to_go = found[b, int(TURNS[b, t])]
        same = [value for other, value in found.values() if other == state]
        out.append(advantage + (to_go - math.fsum(same) / len(same)))
    return out


def with_hindsight(b, tokens, advantage):
    """TASPO: κ, τ, ε_w = 0, 1, ½."""
    delta = EVALUATION.privileged_logprobs[b].astype(np.float64) - EVALUATION.logprobs[b]
    row = np.full(T, advantage), MASK[b], BATCH.executable_mask[b], TURNS[b], SEQUENCES[b]
    return advantage * oracles.hindsight(delta, *row, 0.0, 1.0, 0.5)[tokens]


def informative():
    """Weights of a token mean over the groups whose returns differ."""
    kept = np.zeros((B, T), bool)
    for (b, _, tokens), g in zip(EPISODES, GROUPS, strict=True):
        kept[b, tokens] = np.ptp(RETURNS[g == GROUPS]) > 0
    return kept / kept.sum()


def k3(coefficient):
    """Of KL(π‖π_ref)."""

    def penalty(b, t, episode):
        x = float(EVALUATION.ref_logprobs[b, t]) - float(NEW[b, t])
        return coefficient * (math.exp(x) - x - 1)

    return penalty


def nll(b, t, episode):
    return -0.1 * float(NEW[b, t]) if RETURNS[episode] >= 1 else 0.0


TOKENS = np.broadcast_to(np.arange(T), (B, T))
GROUP_LIKE = {"weights": lambda: oracles.weights(MASK, SEQUENCES)}


class Method(NamedTuple):
    """A row of the table of baselines: `ids` and `mean` are the ratio's, `critic` the critic's λ and clip range."""

    credit: object
    ids: np.ndarray = TOKENS
    mean: bool = False
    clip: tuple = (0.2, 0.2)
    weights: object = lambda: MASK / MASK.sum()
    penalty: object = lambda b, t, episode: 0.0
    critic: tuple | None = None
    masks: bool = False


GSPO = {"ids": SEQUENCES, "mean": True, "clip": (3e-4, 4e-4)} | GROUP_LIKE
METHODS = {
    "mpo": Method(multiscale(0.8, 0.95, 1.0), ids=TURNS, critic=(1.0, None)),
    "turn_ppo": Method(
        multiscale(0.95, 1.0, 0.0), ids=TURNS, weights=lambda: oracles.weights(MASK, TURNS), critic=(1.0, 0.2)
    ),
    "ppo": Method(token_gae(0.95), critic=(0.95, 0.2)),
    "vc_ppo": Method(token_gae(0.95), critic=(1.0, None)),
    "vapo": Method(token_gae(lambda n: max(0, 1 - 1 / (0.05 * n))), clip=(0.2, 0.28), penalty=nll, critic=(1.0, None)),
    "sao": Method(token_gae(lambda n: 1 - 1 / (1.5 * n)), clip=(0.3, 5.0), masks=True, critic=(1.0, None)),
    "bilevel_gae": Method(bilevel(1.0, 1.0, 0.95), critic=(1.0, 0.2)),
    "grpo": Method(group(True), penalty=k3(0.04), **GROUP_LIKE),
    "dr_grpo": Method(group(False), weights=lambda: MASK / (len(EPISODES) * 3000.0)),
    "dapo": Method(group(True), clip=(0.2, 0.28), weights=informative),
    "gspo": Method(group(True), **GSPO),
    "gspo_token": Method(group(True), **GSPO),
    "gigpo": Method(group(False, with_anchor), penalty=k3(0.01), **GROUP_LIKE),
    "taspo": Method(group(True, with_hindsight), **GROUP_LIKE),
}


def objective(ratio, a, low, high, masks):
    """Of one token, and its slope in the ratio."""
    inside = 1 - low <= ratio <= 1 + high
    if masks:
        return (ratio * a, a) if inside else (0.0, 0.0)
    clipped = min(max(ratio, 1 - low), 1 + high) * a
    return (ratio * a, a) if ratio * a <= clipped else (clipped, 0.0)


def test_the_table_names_every_algorithm():
    assert set(METHODS) == set(algorithms.ALGORITHMS)


@pytest.mark.parametrize("name", METHODS)
def test_an_algorithm_is_its_row_of_the_table(name):
    method, algorithm = METHODS[name], ALGORITHMS[name]
    targets, loss_and_grad = compiled(algorithm)
    constants = targets(PLAYED, EVALUATION)
    advantages, weights = method.credit(), method.weights()
    close(constants.advantages, advantages, rtol=3e-5)
    np.testing.assert_allclose(constants.weights, weights, rtol=1e-5)

    anchor = PLAYED.behavior_logprobs if name == "sao" else EVALUATION.logprobs
    loss, slope, clipped = 0.0, np.zeros((B, T)), 0
    for episode, (b, _, tokens) in enumerate(EPISODES):
        ratios = oracles.ratio(NEW[b], anchor[b], method.ids[b], MASK[b], method.mean)
        for t in tokens:
            gain, pull = objective(ratios[t], advantages[b, t], *method.clip, method.masks)
            loss += weights[b, t] * (method.penalty(b, t, episode) - gain)
            slope[b, t], clipped = -weights[b, t] * pull * ratios[t], clipped + (pull == 0 != advantages[b, t])
    (found, metrics), grad = loss_and_grad(NEW, PLAYED, constants)
    np.testing.assert_allclose(found, loss, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["clip_fraction"], clipped / MASK.sum(), rtol=1e-5)
    assert clipped > 0
    if method.penalty is Method._field_defaults["penalty"]:
        close(grad, slope, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.critic])
def test_a_critic_learns_the_returns_of_its_row(name):
    lambda_critic, epsilon = METHODS[name].critic
    algorithm = ALGORITHMS[name]
    constants = compiled(algorithm)[0](PLAYED, EVALUATION)
    total = 0.0
    for b in range(B):
        data = PLAYED.rewards[b], EVALUATION.values[b], MASK[b], SEQUENCES[b]
        returns = oracles.returns(*data, lambda_critic)
        close(constants.returns[b], returns)
        for t in np.flatnonzero(MASK[b]):
            new, old = float(NEW_VALUES[b, t]), float(EVALUATION.values[b, t])
            near = new if epsilon is None else min(max(new, old - epsilon), old + epsilon)
            total += max((new - returns[t]) ** 2, (near - returns[t]) ** 2) / 2
    found = jax.jit(lambda v: algorithms.value_loss(algorithm, v, constants)[0])(NEW_VALUES)
    np.testing.assert_allclose(found, total / MASK.sum(), rtol=1e-5)


def ends_rejected():
    """Outcomes alone, on the last tokens, to which the engine gave e⁻⁵ of the policy's probability; to others all."""
    behavior = np.where(MASK, EVALUATION.logprobs, 0)
    for b, _, tokens in EPISODES:
        behavior[b, tokens[-1]] -= 5
    return BATCH.replace(behavior_logprobs=behavior)


def test_dapo_tells_informative_groups_by_rewards_on_tokens_that_a_correction_rejects():
    """The rewards are on these very tokens: without them every group would be uniform, and nothing be learnt."""
    algorithm = algorithms.corrected(ALGORITHMS["dapo"], "masked")
    kept = informative() > 0
    for b, _, tokens in EPISODES:
        kept[b, tokens[-1]] = False
    found = compiled(algorithm)[0](ends_rejected(), EVALUATION)
    np.testing.assert_allclose(found.weights, kept / kept.sum(), rtol=1e-5)


def test_a_nan_that_a_correction_weighs_by_stays_visible():
    algorithm = algorithms.corrected(ALGORITHMS["ppo"], "truncated")
    logprobs, (b, _, tokens) = EVALUATION.logprobs.copy(), EPISODES[0]
    logprobs[b, tokens[0]] = np.nan
    targets, loss_and_grad = compiled(algorithm)
    constants = targets(PLAYED, EVALUATION.replace(logprobs=logprobs))
    assert np.isnan(loss_and_grad(NEW, PLAYED, constants)[0][0])


@pytest.mark.parametrize("cache_tokens", [0, 4096])
def test_a_penalty_of_every_episode_is_refused(cache_tokens):
    with pytest.raises(ValueError, match=f"cache_tokens={cache_tokens}, expected at most max_tokens=384"):
        algorithms.dapo(max_tokens=384, cache_tokens=cache_tokens)
