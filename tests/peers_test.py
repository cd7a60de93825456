"""Our definitions beside those of verl 0.9.1, TRL 1.16.0, tunix 0.1.7; where they differ, how and why ours is right."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpo_jax import algorithms, kernels
from mpo_jax.types import Targets, Trajectories

torch = pytest.importorskip("torch")
from benchmarks import peers  # noqa: E402

if not peers.INSTALLED:
    pytest.skip("peers are absent: make .venv-peers/.installed", allow_module_level=True)

B, T, GROUP = 6, 24, 3
RNG = np.random.default_rng(0)


def masks():
    """Actions and observations of one episode a row: ragged turns of both, trailing observations, padding."""
    mask = np.zeros((B, T), bool)
    for row in mask:
        for start in (RNG.integers(0, 4), RNG.integers(7, 10), RNG.integers(13, 16)):
            row[start : start + RNG.integers(1, 5)] = True
    return mask


MASK = masks()
COUNT = MASK.sum()
DRAW = functools.partial(lambda scale: RNG.normal(0, scale, (B, T)).astype(np.float32))
OLD, VALUES, NEW_VALUES, RETURNS = DRAW(1.0), DRAW(1.0), DRAW(1.0), DRAW(1.0)
REF, NEW = OLD + DRAW(0.5), OLD + DRAW(0.3)
LAST = T - 1 - MASK[:, ::-1].argmax(1)
REWARDS = np.zeros((B, T), np.float32)
REWARDS[np.arange(B), LAST] = RNG.normal(size=B)
TOKEN_A = DRAW(1.0)
EPISODE_A = np.repeat(RNG.normal(size=(B, 1)).astype(np.float32), T, 1)
GROUPS = np.arange(B) // GROUP
MODE = {"token": "token-mean", "sequence": "seq-mean-token-mean"}

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def trajectories():
    ids = np.zeros((B, T), np.int32)
    return Trajectories(
        tokens=ids,
        positions=np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        sequence_ids=ids,
        turn_ids=ids,
        action_mask=MASK,
        executable_mask=MASK,
        rewards=REWARDS,
        behavior_logprobs=OLD,
        state_ids=ids,
        group_ids=GROUPS.astype(np.int32)[:, None],
        truncated=np.zeros((B, 1), bool),
        policy_version=np.zeros((B, 1), np.int32),
    )


def ours(algorithm, advantages, new=NEW, old=OLD):
    """Loss and gradient of an algorithm, with the advantages given."""
    batch = trajectories()
    rest = dict.fromkeys(("returns", "old_values"), np.zeros((B, T), np.float32))
    weights = kernels.token_mean(MASK, batch.turn_ids, batch.sequence_ids)
    constants = Targets(
        advantages=advantages,
        old_logprobs=old,
        ref_logprobs=REF,
        weights=algorithm.weights(batch, MASK),
        value_weights=weights,
        **rest,
    )
    return jax.jit(jax.value_and_grad(lambda x: algorithms.policy_loss(algorithm, x, batch, constants)[0]))(new)


def t(x):
    return torch.tensor(np.asarray(x, np.float32))


def torch_value_and_grad(loss, x):
    x = t(x).requires_grad_()
    value = loss(x)
    value.backward()
    return value.item(), x.grad.numpy()


def verl_policy(kind, mode, advantages, new=NEW, old=OLD, **config):
    config = peers.ActorConfig(**{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None} | config)
    loss = getattr(peers.verl(), f"compute_policy_loss_{kind}")
    return torch_value_and_grad(lambda x: loss(t(old), x, t(advantages), t(MASK), MODE[mode], config)[0], new)


def tunix_policy(name, advantages, new=NEW, **settings):
    plain = {
        "epsilon": 0.2,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "epsilon_c": None,
        "beta": 0.0,
        "temperature": 1.0,
    }
    plain |= {"entropy_coef": 0.0, "kl_loss_mode": "low_var_kl", "kl_clamp_value": None, "loss_algo": "grpo"}
    example = SimpleNamespace(
        prompt_ids=None,
        completion_ids=None,
        completion_mask=jnp.asarray(MASK, jnp.float32),
        advantages=jnp.asarray(advantages),
        old_per_token_logps=jnp.asarray(OLD),
        ref_per_token_logps=jnp.asarray(REF),
    )
    loss = getattr(peers.tunix(), name)
    return jax.jit(jax.value_and_grad(lambda x: loss(x, example, SimpleNamespace(**plain | settings), 0, 0)[0]))(new)


def trl_policy(advantages, new=NEW, **settings):
    inputs = {"completion_mask": MASK, "advantages": advantages, "old_per_token_logps": OLD, "ref_per_token_logps": REF}
    inputs = {name: t(x) for name, x in inputs.items()} | {"num_items_in_batch": torch.tensor(float(COUNT))}
    return torch_value_and_grad(lambda x: peers.trl_grpo_loss(x, inputs, **settings), new)


def both_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        close(a, b)


def test_ppo_loss_is_that_of_verl_tunix_and_trl():
    dual = ours(algorithms.ppo(dual_clip=3.0), TOKEN_A, NEW + OLD * MASK)  # far ratios, so that the dual clip acts
    both_close(dual, verl_policy("vanilla", "token", TOKEN_A, NEW + OLD * MASK))
    both_close(dual, tunix_policy("ppo_policy_loss_fn", TOKEN_A, NEW + OLD * MASK, epsilon_c=3.0))
    plain = ours(algorithms.ppo(), TOKEN_A)
    both_close(plain, tunix_policy("ppo_policy_loss_fn", TOKEN_A))
    both_close(plain, trl_policy(TOKEN_A, loss_type="bnpo"))
    assert np.abs(plain[1] - dual[1]).max() > 1e-3


def test_grpo_loss_is_that_of_verl_tunix_and_trl():
    found = ours(algorithms.grpo(kl_coefficient=0.04), EPISODE_A)
    both_close(found, trl_policy(EPISODE_A[:, 0], beta=0.04))
    settings = {"beta": 0.04, "loss_agg_mode": "sequence-mean-token-mean"}
    both_close(found, tunix_policy("grpo_loss_fn", EPISODE_A[:, 0], **settings))

    def kl(x):
        each = peers.verl().kl_penalty_forward(x, t(REF), "k3")
        return 0.04 * peers.verl().agg_loss(each, t(MASK), MODE["sequence"])

    policy = verl_policy("vanilla", "sequence", EPISODE_A, clip_ratio_c=1e6)
    both_close(found, [a + b for a, b in zip(policy, torch_value_and_grad(kl, NEW), strict=True)])


def test_dapo_loss_is_that_of_verl_tunix_and_trl():
    found = ours(algorithms.dapo(), EPISODE_A)
    both_close(found, verl_policy("vanilla", "token", EPISODE_A, clip_ratio_high=0.28, clip_ratio_c=1e6))
    both_close(found, trl_policy(EPISODE_A[:, 0], loss_type="dapo", epsilon_high=0.28))
    settings = {"epsilon_high": 0.28, "loss_agg_mode": "token-mean"}
    both_close(found, tunix_policy("grpo_loss_fn", EPISODE_A[:, 0], **settings))


def test_dr_grpo_loss_is_that_of_trl_and_tunix():
    found = ours(algorithms.dr_grpo(max_tokens=float(T)), EPISODE_A)
    both_close(found, trl_policy(EPISODE_A[:, 0], loss_type="dr_grpo"))
    settings = {"loss_agg_mode": "sequence-mean-token-scale"}
    both_close(found, tunix_policy("grpo_loss_fn", EPISODE_A[:, 0], **settings))


@pytest.mark.parametrize("spread", [1.0, 0.05])  # outside the clip, and for most sequences inside it
def test_gspo_loss_is_that_of_verl_tunix_and_trl(spread):
    new = OLD + np.float32(spread) * (NEW - OLD)
    found = ours(algorithms.gspo(epsilon_low=0.03, epsilon_high=0.04), EPISODE_A, new)
    both_close(found, verl_policy("gspo", "sequence", EPISODE_A, new, clip_ratio_low=0.03, clip_ratio_high=0.04))
    clip = {"epsilon_low": 0.03, "epsilon_high": 0.04}  # TRL's ratio is differentiable, with one advantage a sequence
    both_close(found, trl_policy(EPISODE_A[:, 0], new, importance_sampling_level="sequence", **clip))  # no difference
    settings = {"epsilon": 0.03, "epsilon_high": 0.04, "loss_agg_mode": "sequence-mean-token-mean"}
    both_close(found, tunix_policy("grpo_loss_fn", EPISODE_A[:, 0], new, loss_algo="gspo-token", **settings))
    assert (np.abs(found[1]).sum(1) > 0).any()


def test_gspo_token_differs_from_trl_where_advantages_differ_in_a_sequence():
    """TRL's ratio carries the whole sequence's gradient: (1/L) Σ_j A_j for every token, in place of the token's A_i."""
    wide = {"epsilon_low": 9.0, "epsilon_high": 9.0}
    _, found = ours(algorithms.gspo_token(**wide), TOKEN_A, OLD)  # on-policy: −A_i / (B L)
    close(found, np.where(MASK, -TOKEN_A / MASK.sum(1, keepdims=True) / B, 0))
    _, theirs = trl_policy(TOKEN_A, OLD, importance_sampling_level="sequence", **wide)
    mean = (TOKEN_A * MASK).sum(1, keepdims=True) / MASK.sum(1, keepdims=True)
    close(theirs, np.where(MASK, -mean / MASK.sum(1, keepdims=True) / B, 0))  # Eq. 13 of GSPO asks for the first


def test_gspo_of_verl_loses_the_gradient_of_far_ratios():
    """verl clamps log ρ at 10 outside the stop-gradient; we clamp inside, so a bad sequence (A < 0) is still pushed."""
    far, a = OLD + np.float32(12.0) * MASK, -np.ones((B, T), np.float32)
    _, theirs = verl_policy("gspo", "sequence", a, far)
    assert not theirs.any()
    _, found = ours(algorithms.gspo(), a, far)
    close(found, np.where(MASK, np.exp(12.0) / MASK.sum(1, keepdims=True) / B, 0), rtol=1e-4)


def token_gae(lambda_, gamma=1.0):
    f = jax.vmap(functools.partial(kernels.token_gae, lambda_=lambda_, discount=gamma))
    return np.asarray(f(REWARDS, VALUES, MASK, np.zeros((B, T), np.int32)))


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0)])
def test_gae_is_that_of_verl_and_tunix_up_to_the_degrees_of_freedom(gamma, lambda_):
    """They whiten by the sample's deviation (n−1). We whiten by the population's: the tokens at hand get variance 1."""
    raw = token_gae(lambda_, gamma)
    found = np.asarray(kernels.whiten(raw, MASK))
    theirs = peers.verl().compute_gae_advantage_return(t(REWARDS), t(VALUES), t(MASK), gamma, lambda_)
    advantages, returns = (np.asarray(x) for x in theirs)
    tunix_advantages, tunix_returns = peers.tunix().compute_gae_advantages(
        REWARDS, VALUES, MASK.astype(np.float32), gamma, lambda_
    )
    for whitened, targets in ((advantages, returns), (tunix_advantages, tunix_returns)):
        close(found[MASK] * np.sqrt((COUNT - 1) / COUNT), np.asarray(whitened)[MASK], rtol=1e-4)
        close((raw + VALUES)[MASK], np.asarray(targets)[MASK], rtol=1e-4)
        assert np.abs(np.asarray(whitened)[~MASK]).max() > 0.1  # off the actions theirs is something, ours is 0
    assert not found[~MASK].any()


def test_gae_of_verl_and_tunix_lets_a_nan_through_the_mask():
    """They multiply by the mask, and 0 · NaN is NaN; we select, so a critic's word on observations cannot matter."""
    values = np.where(MASK, VALUES, np.float32(np.nan))
    theirs = peers.verl().compute_gae_advantage_return(t(REWARDS), t(values), t(MASK), 1.0, 0.95)[0]
    tunix = peers.tunix().compute_gae_advantages(REWARDS, values, MASK.astype(np.float32), 1.0, 0.95)[0]
    assert np.isnan(np.asarray(theirs)[MASK]).any() and np.isnan(np.asarray(tunix)[MASK]).any()
    f = jax.vmap(functools.partial(kernels.token_gae, lambda_=0.95))
    np.testing.assert_array_equal(f(REWARDS, values, MASK, np.zeros((B, T), np.int32)), token_gae(0.95))


def test_group_advantages_are_those_of_verl_and_tunix():
    rewards = REWARDS.sum(1)
    found = kernels.group_advantages(rewards, GROUPS, normalise_std=True)
    theirs = peers.verl().compute_grpo_outcome_advantage(t(REWARDS), t(MASK), GROUPS)[0]
    close(found[:, None] * MASK, theirs, rtol=1e-4)
    close(found, peers.tunix().compute_advantages(rewards, GROUP), rtol=1e-4)
    centred = peers.verl().compute_grpo_outcome_advantage(t(REWARDS), t(MASK), GROUPS, norm_adv_by_std_in_grpo=False)
    close(kernels.group_advantages(rewards, GROUPS, normalise_std=False)[:, None] * MASK, centred[0], rtol=1e-4)


def test_uniform_groups_and_groups_of_one_differ_from_verl():
    """Rounding alone must not become credit; and a raw reward is no advantage: without siblings there is none."""
    uniform, mask = np.full(7, 0.1, np.float32), torch.ones(7, 1)
    for groups, at_least in ((np.zeros(7, int), 1e-3), (np.arange(7), 0.099)):  # (0.1 − mean)/1e-6; the reward itself
        theirs = peers.verl().compute_grpo_outcome_advantage(t(uniform[:, None]), mask, groups)[0]
        assert theirs.abs().max() > at_least
        assert not np.any(kernels.group_advantages(uniform, groups))


def test_value_loss_is_that_of_verl_and_tunix():
    def loss(x):
        each = kernels.clipped_value_loss(x, VALUES, RETURNS, epsilon=0.2)
        return jnp.sum(each * MASK) / COUNT

    found = jax.value_and_grad(loss)(NEW_VALUES)
    theirs = functools.partial(peers.verl().compute_value_loss, cliprange_value=0.2)
    both_close(found, torch_value_and_grad(lambda x: theirs(x, t(RETURNS), t(VALUES), t(MASK))[0], NEW_VALUES))
    example = SimpleNamespace(
        prompt_ids=None,
        completion_ids=MASK,
        completion_mask=MASK.astype(np.float32),
        old_values=VALUES,
        returns=RETURNS,
    )
    tunix = peers.tunix().ppo_value_loss_fn
    both_close(found, jax.value_and_grad(lambda x: tunix(x, example, 0.2, 0, 0)[0])(NEW_VALUES))


@pytest.mark.parametrize(
    ("kernel", "verl", "tunix"),
    [(kernels.kl_k1, "k1", "kl"), (kernels.kl_k2, "k2", "mse_kl"), (kernels.kl_k3, "k3", "low_var_kl")],
)
def test_kl_estimators_are_those_of_verl_and_tunix(kernel, verl, tunix):
    found = jax.value_and_grad(lambda x: kernel(x, REF).sum())(NEW)
    theirs = peers.verl().kl_penalty_forward
    both_close(found, torch_value_and_grad(lambda x: theirs(x, t(REF), verl).sum(), NEW))
    theirs = peers.tunix().compute_kl_divergence
    both_close(found, jax.value_and_grad(lambda x: theirs(x, jnp.asarray(REF), tunix).sum())(jnp.asarray(NEW)))


def test_k3_of_verl_stops_pulling_where_the_policy_is_far():
    """verl clamps k3 to 10, without gradient beyond: at x = 3 the estimate is e³ − 4 = 16.09, its slope 1 − e³."""
    theirs = torch_value_and_grad(lambda x: peers.verl().kl_penalty_forward(x, t([0.0]), "k3").sum(), [-3.0])
    both_close(theirs, (10.0, [0.0]))
    found = jax.value_and_grad(lambda x: kernels.kl_k3(x, np.zeros(1, np.float32)).sum())(np.array([-3.0], np.float32))
    both_close(found, (np.exp(3) - 4, [1 - np.exp(3)]))


@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (0.7, 2.0)])
def test_linear_logprobs_are_those_of_trl(temperature, softcap):
    n, d, v = 10, 8, 50
    hidden, head = RNG.normal(size=(n, d)).astype(np.float32), RNG.normal(size=(d, v)).astype(np.float32)
    targets, (a, b) = RNG.integers(0, v, n), RNG.normal(size=(2, n)).astype(np.float32)

    def loss(hidden, head):
        logprobs, entropy = kernels.linear_logprobs(
            hidden, head, targets, temperature=temperature, softcap=softcap, tile=16
        )
        return jnp.sum(a * logprobs + b * entropy), (logprobs, entropy)

    (_, found), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)
    inputs = t(hidden).requires_grad_(), t(head.T).requires_grad_()
    theirs = peers.trl().chunked_logprobs(
        *inputs, None, torch.tensor(targets), temperature, 16, softcap, 1.0, ("entropy",)
    )
    (t(a) * theirs[0] + t(b) * theirs[1]).sum().backward()
    for ours_is, theirs_is in zip(found, theirs[:2], strict=True):
        close(ours_is, theirs_is.detach(), rtol=1e-4, atol=1e-5)
    close(grads[0], inputs[0].grad, rtol=1e-4, atol=1e-5)
    close(grads[1], inputs[1].grad.T, rtol=1e-4, atol=1e-5)


def test_selected_logprobs_are_those_of_tunix():
    logits, targets = 5 * RNG.normal(size=(9, 40)).astype(np.float32), RNG.integers(0, 40, 9)
    found = kernels.token_logprobs_and_entropy(logits, targets)
    close(found[0], peers.tunix().selective_log_softmax(logits, targets), atol=1e-5)
    close(found[1], peers.tunix().compute_entropy_from_logits(logits), atol=1e-5)
