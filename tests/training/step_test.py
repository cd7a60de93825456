"""One train step for every algorithm: what it changes, what it leaves alone, what it refuses."""

import itertools

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

from mpo_jax.algorithms import ALGORITHMS
from mpo_jax.models import weights
from mpo_jax.training.state import Optimizers, judge_critic
from mpo_jax.training.step import make_evaluate, make_train_step
from training import runs


def ready(algorithm="mpo", episodes=None, **changes):
    """A learner, a state, and batch and targets of episodes that the state's policy sampled."""
    learner, state = runs.learner(algorithm, **changes), runs.fresh_state(algorithm)
    episodes = runs.as_sampled(learner, state, episodes or runs.flat(runs.make_groups()))
    return learner, state, *runs.prepare(learner, state, episodes)


def counts(optimizer_state):
    """Adam's count of updates."""
    return int(optax.tree_utils.tree_get(optimizer_state, "count"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_step_serves_every_algorithm_and_is_traced_once(algorithm):
    learner, state, batch, targets = ready(algorithm)
    first, parts, totals = runs.frozen(state), ([0, 1], [2, 3]), []
    for rows in parts:  # each from the first state, so that both are on-policy
        state, metrics = learner.train_step(jax.tree.map(jnp.array, first), *runs.rows_of((batch, targets), rows), True)
        totals.append(metrics)
        assert all(np.isfinite(float(x)) for x in metrics.values()), metrics
        assert not runs.equal(state.policy, first.policy)
        assert (state.critic is None) == ("critic" not in learner.algorithm.needs)
        assert state.critic is None or not runs.equal(state.critic, first.critic)
        assert state.reference is None or runs.equal(state.reference, first.reference)
        assert int(state.skipped) == 0
    # BUG-020, BUG-123: the old log-probs are of 4 rows, the new ones of 2; before any update the ratio is 1.
    mean = {name: float(totals[0][name] + totals[1][name]) / 2 for name in ("ratio", "clip_fraction", "old_kl")}
    assert mean["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert mean["clip_fraction"] == 0
    assert mean["old_kl"] == pytest.approx(0.0, abs=1e-6)
    traced = len(learner.traces)
    for update_policy in (False, True, False):
        state, _ = learner.train_step(state, *runs.rows_of((batch, targets), [0, 1]), update_policy)
    assert traced and len(learner.traces) == traced


def test_sao_leaves_the_critics_attention_as_it_was_and_trains_the_rest_of_it():
    learner, state, batch, targets = ready("sao", minibatches=1)
    before = weights.flatten(runs.frozen(state.critic))
    state, _ = learner.train_step(state, batch, targets, True)
    state, _ = learner.train_step(
        state, batch, targets, True
    )  # at first the value head is 0: the trunk has no gradient
    changed = {name for name, x in weights.flatten(state.critic).items() if np.any(x != before[name])}
    attention = {name for name in before if ".attention." in name}
    assert len(attention) >= 4
    assert not changed & attention
    assert changed >= {name for name in before if ".mlp." in name}


def test_a_stale_ratio_is_seen():
    """The counterpart of "ratio 1 before any update": log-probs that are off by one token are not."""
    learner, state, batch, targets = ready("ppo", minibatches=1)
    shifted = targets.replace(old_logprobs=jnp.roll(targets.old_logprobs, 1, axis=1))
    _, metrics = learner.train_step(state, batch, shifted, True)
    assert abs(float(metrics["ratio"]) - 1) > 1e-2
    assert float(metrics["clip_fraction"]) > 0.1


@pytest.mark.parametrize("algorithm", ["mpo", "ppo"])
def test_without_the_policy_the_critic_alone_is_trained_and_its_loss_falls(algorithm):
    """BUG-041."""
    learner, state, batch, targets = ready(algorithm)
    first, losses = runs.frozen(state), []
    for _ in range(8):
        state, metrics = learner.train_step(state, *runs.rows_of((batch, targets), [0, 1]), False)
        losses.append(float(metrics["value_loss"]))
        assert float(metrics["value_grad_norm"]) > 0
    assert runs.equal(state.policy, first.policy)
    assert runs.equal(state.policy_optimizer, first.policy_optimizer)
    assert not runs.equal(state.critic, first.critic)
    assert losses[-1] < losses[0]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses[:4]))


def test_a_critic_that_explains_less_and_less_is_left_alone_and_the_policy_is_not():
    learner, state, batch, targets = ready("mpo", minibatches=1, critic_patience=2)
    for explained, stale in ((0.1, 0), (0.3, 0), (0.3, 1), (0.2, 2)):  # only what exceeds the best so far is a gain
        state = judge_critic(state, explained)
        assert int(state.critic_stale) == stale
    assert float(state.critic_best) == pytest.approx(0.3)
    first = runs.frozen(state)
    state, metrics = learner.train_step(state, batch, targets, True)
    assert runs.equal(state.critic, first.critic)
    assert runs.equal(state.critic_optimizer, first.critic_optimizer)
    assert not runs.equal(state.policy, first.policy)
    assert metrics["value_grad_norm"] == 0 < metrics["grad_norm"]
    state, _ = learner.train_step(judge_critic(state, 0.4), batch, targets, True)
    assert not runs.equal(state.critic, first.critic)


@pytest.mark.parametrize("algorithm", ["mpo", "gspo"])
def test_microbatches_change_no_number(algorithm):
    """Also with very uneven rows (BUG-067), and no row is lost (BUG-066)."""
    groups = runs.make_groups(3, 3)
    learner, state, batch, targets = ready(algorithm, runs.flat(groups), minibatches=1)
    assert len({int(x) for x in batch.action_mask.sum(axis=1)}) > 1
    sgd = Optimizers(policy=optax.sgd(1.0), critic=optax.sgd(1.0))  # the parameters then move by the gradient
    state = state.replace(
        policy_optimizer=sgd.policy.init(state.policy),
        critic_optimizer=None if state.critic is None else sgd.critic.init(state.critic),
    )
    first, found = runs.frozen(state), []
    for microbatches in (1, 2, 4):
        judged = make_evaluate(learner.algorithm, learner.models, microbatches)(state, batch)
        step = make_train_step(learner.algorithm, learner.models, sgd, microbatches)
        after, metrics = step(jax.tree.map(jnp.array, first), batch, targets, True)
        found.append((judged, after.policy, after.critic, metrics))
    for other in found[1:]:
        assert runs.furthest(found[0], other) < 1e-6
    assert runs.furthest(first.policy, found[0][1]) > 1e-3


def spoilt(targets, batch, active):
    """The targets with a NaN log-prob at one token, and where it is."""
    row, column = np.argwhere(np.asarray(batch.action_mask) == active)[2]
    return targets.replace(old_logprobs=jnp.asarray(targets.old_logprobs).at[row, column].set(jnp.nan)), row


@pytest.mark.parametrize("algorithm", ["mpo", "ppo", "sao", "gspo", "dapo"])
def test_a_nan_logprob_at_an_active_token_refuses_the_update_and_is_counted(algorithm):
    """BUG-072, BUG-077."""
    learner, state, batch, targets = ready(algorithm)
    broken, row = spoilt(targets, batch, True)
    first = runs.frozen(state)
    rows = [row, (row + 1) % 4]
    state, _ = learner.train_step(state, *runs.rows_of((batch, broken), rows), True)
    assert runs.equal(state.policy, first.policy)
    assert runs.equal(state.policy_optimizer, first.policy_optimizer)
    assert int(state.skipped) == 1
    state, _ = learner.train_step(state, *runs.rows_of((batch, targets), rows), True)  # and the next one is made
    assert not runs.equal(state.policy, first.policy)
    assert int(state.skipped) == 1


@pytest.mark.parametrize("microbatches", [2])
def test_one_bad_microbatch_refuses_the_whole_update(microbatches):
    """BUG-072: neither a rescaled nor a NaN update."""
    learner, state, batch, targets = ready("grpo", minibatches=1, microbatches=microbatches)
    broken, _ = spoilt(targets, batch, True)
    first = runs.frozen(state)
    state, _ = learner.train_step(state, batch, broken, True)
    assert runs.equal(state.policy, first.policy) and runs.equal(state.policy_optimizer, first.policy_optimizer)
    assert int(state.skipped) == 1


@pytest.mark.parametrize("algorithm", ["mpo", "sao", "gspo"])
def test_what_lies_at_a_masked_token_has_no_effect(algorithm):
    """BUG-077."""
    learner, state, batch, targets = ready(algorithm)
    mask = np.asarray(batch.action_mask)

    def rubbish(x):
        return jnp.where(mask, x, jnp.nan)

    dirty = targets.replace(**{name: rubbish(getattr(targets, name)) for name in ("old_logprobs", "ref_logprobs")})
    dirty_batch = batch.replace(behavior_logprobs=np.where(mask, batch.behavior_logprobs, np.nan))
    first = runs.frozen(state)
    clean, _ = learner.train_step(state, *runs.rows_of((batch, targets), [0, 1]), True)
    clean = runs.frozen(clean)
    after, _ = learner.train_step(jax.tree.map(jnp.array, first), *runs.rows_of((dirty_batch, dirty), [0, 1]), True)
    assert runs.equal(after, clean)
    judged = [learner.evaluate(jax.tree.map(jnp.array, first), b) for b in (batch, dirty_batch)]
    assert runs.equal(*(learner.targets(b, j) for b, j in zip((batch, dirty_batch), judged, strict=True)))


@pytest.mark.parametrize("algorithm", ["mpo", "grpo"])
def test_a_nan_reward_takes_its_own_sequence_out_and_nothing_else(algorithm):
    episodes = runs.flat(runs.make_groups())
    bad = msgspec.structs.replace(episodes[1], rewards=[*episodes[1].rewards[:-1], float("nan")])
    learner, state, batch, targets = ready(algorithm, [episodes[0], bad, *episodes[2:]])
    poisoned = np.zeros_like(batch.action_mask)
    for row, slot in zip(*np.nonzero(learner._pack([episodes[0], bad, *episodes[2:]])[1] == 1), strict=True):
        poisoned[row] = batch.sequence_ids[row] == slot
    assert poisoned.any() and np.isnan(batch.rewards[poisoned]).any()
    without = batch.replace(rewards=np.where(poisoned, 0, batch.rewards), action_mask=batch.action_mask & ~poisoned)
    judged = learner.evaluate(state, batch)
    expected = learner.targets(without, judged)
    assert runs.furthest(targets, expected) < 1e-6
    assert not np.asarray(targets.weights)[poisoned].any()
    assert np.asarray(targets.weights)[batch.action_mask & ~poisoned].all()
    first = runs.frozen(state)
    rows = [int(np.argwhere(poisoned)[0, 0]), 3]
    after, metrics = learner.train_step(state, *runs.rows_of((batch, targets), rows), True)
    assert int(after.skipped) == 0 and all(np.isfinite(float(x)) for x in metrics.values())
    assert not runs.equal(after.policy, first.policy)


@pytest.mark.parametrize("algorithm", ["mpo", "ppo", "gspo", "dapo", "vapo", "sao"])
def test_a_batch_without_an_action_changes_no_parameter(algorithm):
    """BUG-154."""
    learner, state, batch, _ = ready(algorithm)
    empty = batch.replace(
        action_mask=np.zeros_like(batch.action_mask), executable_mask=np.zeros_like(batch.executable_mask)
    )
    targets = learner.targets(empty, learner.evaluate(state, batch))
    first = runs.frozen(state)
    state, metrics = learner.train_step(state, *runs.rows_of((empty, targets), [0, 1]), True)
    assert runs.equal(state.policy, first.policy) and runs.equal(state.critic, first.critic)
    assert int(state.skipped) == 0 and all(np.isfinite(float(x)) for x in metrics.values())


def test_bug_154_clipping_zero_gradients_gives_zero_and_a_norm_of_zero_is_refused():
    """BUG-154: the optimiser that the programs use."""
    from experiments import parts

    with pytest.raises(ValueError, match=r"max_grad_norm is 0\.0"):
        parts.make_optimizers(runs.config(max_grad_norm=0.0))
    optimizer = parts.make_optimizers(runs.config(max_grad_norm=1.0)).policy
    params = {"w": jnp.ones(3)}
    updates, _ = optimizer.update({"w": jnp.zeros(3)}, optimizer.init(params), params)
    assert not np.asarray(updates["w"]).any()


def test_a_minibatch_of_padding_leaves_a_trained_state_alone():
    """BUG-069, BUG-156: no update over no tokens, and no moments decayed by it."""
    learner, state, batch, targets = ready("mpo")
    state, _ = learner.train_step(state, *runs.rows_of((batch, targets), [0, 1]), True)
    first = runs.frozen(state)
    nothing, _ = learner._pack([])
    none = learner.targets(nothing, learner.evaluate(state, nothing))
    state, _ = learner.train_step(state, *runs.rows_of((nothing, none), [0, 1]), True)
    assert runs.equal(state.policy, first.policy) and runs.equal(state.critic, first.critic)
    assert runs.equal(state.policy_optimizer, first.policy_optimizer)
    assert runs.equal(state.critic_optimizer, first.critic_optimizer)


@pytest.mark.parametrize(("algorithm", "critic_updates"), [("mpo", 1), ("sao", 2)])
def test_each_update_counts_once_for_adam(algorithm, critic_updates):
    """BUG-156; SAO trains its critic twice for each update of the policy."""
    learner, state, batch, targets = ready(algorithm)
    for done in (1, 2):
        state, _ = learner.train_step(state, *runs.rows_of((batch, targets), [0, 1]), True)
        assert counts(state.policy_optimizer) == done
        assert counts(state.critic_optimizer) == done * critic_updates


def test_microbatches_are_one_update_of_adam():
    """BUG-156."""
    learner, state, batch, targets = ready("grpo", minibatches=1, microbatches=2)
    state, _ = learner.train_step(state, batch, targets, True)
    assert counts(state.policy_optimizer) == 1


def test_the_state_is_donated_and_the_batch_is_not():
    learner, state, batch, targets = ready("mpo")
    leaf = jax.tree.leaves(state.policy)[0]
    part, part_targets = runs.rows_of((batch, targets), [0, 1])
    learner.train_step(state, part, part_targets, True)
    assert leaf.is_deleted()
    np.asarray(part_targets.advantages)
