import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from kernels.rows import build, close

from mpo_jax import algorithms, kernels
from mpo_jax.types import Evaluation, Trajectories

B, T, S = 6, 64, 2
ALGORITHMS = {name: algorithms.from_config(name) for name in algorithms.ALGORITHMS}  # built, hence compiled, once
NAMES = sorted(ALGORITHMS)


def make_batch(seed=0, shapes=((3, 1, 4), (2, 5))):
    rng = np.random.default_rng(seed)
    rows = [build(shapes, seed * 100 + b, T) for b in range(B)]
    mask, turns, sequences, executable = (
        np.stack([getattr(r, name) for r in rows]) for name in ("mask", "turns", "sequences", "executable")
    )
    rewards = np.zeros((B, T), np.float32)
    for b, row in enumerate(rows):
        for s, tokens in oracles.actions(row.mask, row.sequences).items():
            rewards[b, tokens[-1]] = (b + s) % 2 if b < 4 else 1.0  # group 2 is constant
    return Trajectories(
        tokens=rng.integers(0, 9, (B, T)).astype(np.int32),
        positions=np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        sequence_ids=sequences,
        turn_ids=turns,
        action_mask=mask,
        executable_mask=executable,
        rewards=rewards,
        behavior_logprobs=np.where(mask, rng.normal(-1, 0.1, (B, T)), 0).astype(np.float32),
        state_ids=np.where(turns >= 0, turns % 3 + 10 * (np.arange(B)[:, None] // 2), -1).astype(np.int32),
        group_ids=np.repeat(np.arange(B // 2, dtype=np.int32), 2)[:, None] * np.ones((1, S), np.int32),
        truncated=rng.random((B, S)) < 0.3,
        policy_version=np.zeros((B, S), np.int32),
    )


def make_evaluation(batch, seed=1):
    rng = np.random.default_rng(seed)

    def noisy(x, scale=0.1):
        return np.where(batch.action_mask, x + rng.normal(0, scale, (B, T)), np.nan).astype(np.float32)

    logprobs = noisy(batch.behavior_logprobs, 0.02)
    return Evaluation(
        logprobs=logprobs,
        entropy=noisy(1.0),
        values=noisy(0.5, 0.3),
        final_values=rng.normal(size=(B, S)).astype(np.float32),
        ref_logprobs=noisy(logprobs),
        privileged_logprobs=noisy(logprobs, 0.5),
    )


BATCH = make_batch()
EVALUATION = make_evaluation(BATCH)
NEW = EVALUATION.logprobs + 0.1 * np.random.default_rng(5).normal(size=(B, T)).astype(np.float32)


@functools.cache
def compiled(algorithm):
    """The two programs of an algorithm, compiled once for all tests."""
    loss = jax.value_and_grad(lambda x, b, c: algorithms.policy_loss(algorithm, x, b, c), has_aux=True)
    return jax.jit(lambda b, e: algorithms.targets(algorithm, b, e)), jax.jit(loss)


def targets(algorithm, batch=BATCH, evaluation=EVALUATION):
    return compiled(algorithm)[0](batch, evaluation)


def loss_and_grad(algorithm, logprobs, batch, constants):
    return compiled(algorithm)[1](logprobs, batch, constants)


def rows_of(tree, start, stop):
    return jax.tree.map(lambda x: x[start:stop], tree)


def changed(batch, **fields):
    return batch.replace(**fields)


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_trains_and_splits_exactly(name):
    algorithm = ALGORITHMS[name]
    assert algorithm.name == name and ("critic" in algorithm.needs) == (algorithm.value_loss is not None)
    constants = targets(algorithm)
    for x in jax.tree.leaves(constants):
        assert x.dtype == jnp.float32 and np.isfinite(x).all() and not x[~BATCH.action_mask].any()
    (loss, metrics), grad = loss_and_grad(algorithm, NEW, BATCH, constants)
    assert np.isfinite(grad).all() and grad.any() and not grad[~BATCH.action_mask].any()
    parts = [
        loss_and_grad(algorithm, NEW[i : i + 2], rows_of(BATCH, i, i + 2), rows_of(constants, i, i + 2))
        for i in range(0, B, 2)
    ]
    close(sum(p[0][0] for p in parts), loss)
    close(np.concatenate([p[1] for p in parts]), grad)
    for key, value in metrics.items():
        close(sum(p[0][1][key] for p in parts), value)
    if algorithm.value_loss:
        value, slope = jax.value_and_grad(lambda v: algorithms.value_loss(algorithm, v, constants)[0])(
            EVALUATION.values
        )
        assert value > 0 and np.isfinite(slope).all() and slope.any() and not slope[~BATCH.action_mask].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_nonfinite_reward_takes_its_sequence_out_of_everything(name):
    algorithm, rewards = ALGORITHMS[name], BATCH.rewards.copy()
    gone = BATCH.action_mask & (np.arange(B) == 0)[:, None] & (BATCH.sequence_ids == 1)
    rewards[gone] = np.nan
    bad = changed(BATCH, rewards=rewards)
    clean = changed(
        BATCH,
        action_mask=BATCH.action_mask & ~gone,
        executable_mask=BATCH.executable_mask & ~gone,
        rewards=np.nan_to_num(rewards),
    )
    assert algorithms.drop_nonfinite(bad)[1] == 1 and algorithms.drop_nonfinite(BATCH)[1] == 0
    found, expected = targets(algorithm, bad), targets(algorithm, clean)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    logprobs = np.where(gone, np.nan, NEW)
    (loss, _), grad = loss_and_grad(algorithm, logprobs, bad, found)
    assert np.isfinite(loss) and np.isfinite(grad).all() and not grad[gone].any()


@pytest.mark.parametrize("name", NAMES)
def test_all_masked_batches_have_zero_loss_and_gradient(name):
    algorithm, nothing = ALGORITHMS[name], np.zeros((B, T), bool)
    batch = changed(BATCH, action_mask=nothing, executable_mask=nothing)
    constants = targets(algorithm, batch)
    (loss, _), grad = loss_and_grad(algorithm, NEW, batch, constants)
    assert loss == 0 and not np.any(grad)


@pytest.mark.parametrize("name", ["mpo", "grpo", "gspo"])
def test_a_nonfinite_logprob_at_an_active_token_stays_visible(name):
    algorithm = ALGORITHMS[name]
    logprobs = NEW.copy()
    logprobs[0, np.flatnonzero(BATCH.action_mask[0])[0]] = np.nan
    assert np.isnan(loss_and_grad(algorithm, logprobs, BATCH, targets(algorithm))[0][0])


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_nothing_is_clipped(name):
    algorithm = ALGORITHMS[name]
    evaluation = EVALUATION.replace(logprobs=BATCH.behavior_logprobs)
    _, metrics = loss_and_grad(algorithm, BATCH.behavior_logprobs, BATCH, targets(algorithm, BATCH, evaluation))[0]
    np.testing.assert_allclose(metrics["ratio"], 1, rtol=1e-5)
    assert metrics["clip_fraction"] == 0 and metrics["old_kl"] == 0


def test_mpo_advantages_are_the_whitened_oracle_and_returns_the_outcome():
    found = targets(ALGORITHMS["mpo"])
    expected = np.zeros((B, T))
    for b in range(B):
        row = [x[b] for x in (BATCH.rewards, EVALUATION.values, BATCH.action_mask, BATCH.turn_ids, BATCH.sequence_ids)]
        expected[b] = oracles.multiscale(*row, 0.8, 0.95, 1.0)
        for tokens in oracles.actions(row[2], row[4]).values():
            close(found.returns[b][np.array(tokens)], np.full(len(tokens), row[0][tokens[-1]]))
    close(found.advantages, oracles.whiten(expected, BATCH.action_mask), rtol=3e-5)


def test_mpo_bootstraps_only_truncated_sequences_and_only_when_told():
    plain, boot = targets(ALGORITHMS["mpo"]), targets(algorithms.mpo(bootstrap_truncated=True))
    rest = np.where(BATCH.truncated, EVALUATION.final_values, 0)
    extra = np.stack([np.append(rest[b], 0)[BATCH.sequence_ids[b]] for b in range(B)])
    close(boot.returns, np.where(BATCH.action_mask, plain.returns + extra, 0))


def test_turn_ppo_is_mpo_at_beta_zero_and_one_token_turns_make_it_token_gae():
    close(
        targets(algorithms.turn_ppo(lambda_turn=0.7)).advantages,
        targets(algorithms.mpo(lambda_turn=0.7, beta=0.0)).advantages,
    )
    batch = make_batch(3, ((1,) * 5, (1,) * 3))
    evaluation = make_evaluation(batch)
    close(
        targets(algorithms.mpo(lambda_turn=0.9), batch, evaluation).advantages,
        targets(algorithms.ppo(lambda_=0.9), batch, evaluation).advantages,
    )


def test_taspo_without_weights_is_grpo():
    same = algorithms.taspo(epsilon_w=0.0), algorithms.grpo(kl_coefficient=0.0)
    a, b = (targets(x) for x in same)
    np.testing.assert_array_equal(a.advantages, b.advantages)
    assert loss_and_grad(same[0], NEW, BATCH, a)[0][0] == loss_and_grad(same[1], NEW, BATCH, b)[0][0]
    weighted = targets(ALGORITHMS["taspo"]).advantages
    np.testing.assert_array_equal(np.sign(weighted), np.sign(b.advantages))
    assert np.abs(weighted - b.advantages).max() > 1e-3


def test_gspo_of_one_token_is_grpo_and_the_token_variant_is_gspo():
    batch = make_batch(4, ((1,), (1,)))
    evaluation, bounds = make_evaluation(batch), {"epsilon_low": 0.2, "epsilon_high": 0.2}
    pair = algorithms.gspo(**bounds), algorithms.grpo(kl_coefficient=0.0, **bounds)
    logprobs = evaluation.logprobs + np.float32(0.1)
    found = [loss_and_grad(a, logprobs, batch, targets(a, batch, evaluation)) for a in pair]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    pair = ALGORITHMS["gspo"], ALGORITHMS["gspo_token"]
    np.testing.assert_array_equal(*(loss_and_grad(a, NEW, BATCH, targets(a))[1] for a in pair))


def test_group_credit_is_the_oracle_spread_over_actions():
    returns = np.array([[BATCH.rewards[b][BATCH.sequence_ids[b] == s].sum() for s in range(S)] for b in range(B)])
    a = oracles.group_advantages(returns.ravel(), BATCH.group_ids.ravel()).reshape(B, S)
    expected = np.stack([np.append(a[b], 0)[BATCH.sequence_ids[b]] for b in range(B)])
    close(targets(ALGORITHMS["grpo"]).advantages, np.where(BATCH.action_mask, expected, 0))


def test_dapo_leaves_uniform_groups_out_of_the_mean_and_shapes_long_episodes():
    weights = np.asarray(targets(ALGORITHMS["dapo"]).weights)
    kept = BATCH.action_mask & (np.arange(B) < 4)[:, None]
    close(weights, kept / kept.sum())
    shaped = targets(algorithms.dapo(max_tokens=8, cache_tokens=4)).advantages
    assert np.abs(shaped - targets(ALGORITHMS["dapo"]).advantages).max() > 0.1


def test_gigpo_adds_what_equal_states_tell_apart():
    plain = targets(algorithms.gigpo(step_coefficient=0.0)).advantages
    close(plain, targets(algorithms.grpo(normalise_std=False)).advantages)
    alone = changed(BATCH, state_ids=np.where(BATCH.turn_ids >= 0, np.arange(B)[:, None] * 99 + BATCH.turn_ids, -1))
    close(targets(ALGORITHMS["gigpo"], alone).advantages, plain)  # singletons add 0
    assert np.abs(targets(ALGORITHMS["gigpo"]).advantages - plain).max() > 0.1


def test_sao_is_anchored_to_the_engine_and_updates_its_critic_twice():
    algorithm = ALGORITHMS["sao"]
    np.testing.assert_array_equal(targets(algorithm).old_logprobs, BATCH.behavior_logprobs)
    assert algorithm.critic_updates == 2 and algorithm.group_size == 1


def test_vapo_nll_counts_successes_only():
    algorithm = ALGORITHMS["vapo"]
    success = np.array([[BATCH.rewards[b][BATCH.sequence_ids[b] == s].sum() == 1 for s in range(S)] for b in range(B)])
    tokens = BATCH.action_mask & np.stack([np.append(success[b], False)[BATCH.sequence_ids[b]] for b in range(B)])
    metrics = loss_and_grad(algorithm, NEW, BATCH, targets(algorithm))[0][1]
    close(metrics["success_nll"], -NEW[tokens].sum() / BATCH.action_mask.sum())


def test_mpo_gradient_keeps_the_shares_inside_a_turn():
    evaluation = EVALUATION.replace(logprobs=NEW)
    turn, token = (algorithms.mpo(ratio_granularity=g) for g in (kernels.turn_ids, kernels.token_ids))
    constants = targets(turn, BATCH, evaluation)
    grads = [loss_and_grad(a, NEW, BATCH, constants)[1] for a in (turn, token)]
    close(grads[0], -np.asarray(constants.weights * constants.advantages))
    close(grads[0], grads[1])


def test_corrections_weight_or_drop_tokens():
    base = algorithms.grpo(kl_coefficient=0.0)
    plain = targets(base).weights
    truncated = targets(dataclasses.replace(base, correction=algorithms.truncated_importance(maximum=1.01))).weights
    ratio = np.where(BATCH.action_mask, np.exp(EVALUATION.logprobs - BATCH.behavior_logprobs), 0)
    close(truncated, plain * np.minimum(ratio, 1.01))
    drop = algorithms.masked_importance(minimum=0.98, maximum=1.02)
    dropped = np.asarray(targets(dataclasses.replace(base, weights=ALGORITHMS["ppo"].weights, correction=drop)).weights)
    kept = BATCH.action_mask & (ratio >= 0.98) & (ratio <= 1.02)
    close(dropped, np.where(kept, ratio, 0) / kept.sum())


def test_padding_and_row_order_change_nothing():
    algorithm = ALGORITHMS["mpo"]
    wide = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 9 * (x.shape[1] == T)))), (BATCH, EVALUATION))
    batch = changed(
        wide[0], **{k: np.where(np.arange(T + 9) < T, getattr(wide[0], k), -1) for k in ("sequence_ids", "turn_ids")}
    )
    close(targets(algorithm, batch, wide[1]).advantages[:, :T], targets(algorithm).advantages)
    order = np.array([3, 1, 5, 0, 2, 4])
    shuffled = jax.tree.map(lambda x: x[order], (BATCH, EVALUATION))
    close(targets(algorithm, *shuffled).advantages, np.asarray(targets(algorithm).advantages)[order])


def test_from_config_takes_strings_and_names_what_exists():
    algorithm = algorithms.from_config("mpo", ratio_granularity="token", ratio_reduce="mean", beta=0.5)
    expected = algorithms.mpo(ratio_granularity=kernels.token_ids, ratio_reduce=kernels.segment_mean, beta=0.5)
    np.testing.assert_array_equal(*(loss_and_grad(a, NEW, BATCH, targets(a))[1] for a in (algorithm, expected)))
    np.testing.assert_array_equal(
        *(targets(a).advantages for a in (algorithms.from_config("taspo", center="turn"), ALGORITHMS["taspo"]))
    )
    with pytest.raises(ValueError, match="unknown algorithm 'mppo', expected one of: mpo"):
        algorithms.from_config("mppo")
    with pytest.raises(ValueError, match="unknown hyperparameter of mpo 'lambda', expected one of: lambda_turn"):
        algorithms.from_config("mpo", **{"lambda": 1})
    with pytest.raises(ValueError, match="unknown ratio_granularity 'word', expected one of: token, turn, sequence"):
        algorithms.from_config("mpo", ratio_granularity="word")
