"""A critic on the policy's trunk: both losses in one gradient, and what leaves either alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import adapters, parts
from mpo_jax import algorithms
from mpo_jax.models import layout, lora
from mpo_jax.models.actor_critic import Models, whole_critic
from mpo_jax.training.state import Optimizers, initial_state, judge_critic
from mpo_jax.training.step import make_evaluate, make_train_step
from training import runs

MPO = algorithms.from_config("mpo")
SHARED, OWN = Models.of(runs.model().config, shared_trunk=0.5), Models.of(runs.model().config)
SGD = Optimizers(policy=optax.sgd(1.0), critic=optax.sgd(1.0))  # the parameters then move by the gradient


@functools.cache
def ready():
    """A state on the host whose values are not 0, a batch that its policy sampled, and targets."""
    state = initial_state(runs.model().config, runs.model().params, MPO, SGD, shared_trunk=True)
    noise = np.random.default_rng(0).normal(0, 0.3, (16, 1)).astype(np.float32)
    state = state.replace(critic=jax.tree.map(lambda x: noise if x.ndim == 2 else x, state.critic))
    learner = runs.learner("mpo")
    own = runs.fresh_state("mpo")
    batch, _ = learner._pack(runs.as_sampled(learner, own, runs.flat(runs.make_groups())))
    targets = jax.jit(functools.partial(algorithms.targets, MPO))(batch, make_evaluate(MPO, SHARED)(state, batch))
    return runs.frozen(state), batch, targets


def after(step, state, update_policy=True):
    """One step of a copy of the state."""
    _, batch, targets = ready()
    state, metrics = step(jax.tree.map(jnp.array, state), batch, targets, update_policy)
    return state, {name: float(x) for name, x in metrics.items()}


step = make_train_step(MPO, SHARED, SGD, critic_patience=2)


def by_hand(coefficient):
    """Gradients of policy and value layer."""
    state, batch, targets = ready()
    return runs.shared_gradient(state.policy, state.critic, batch, targets, coefficient)


@pytest.mark.slow
def test_both_losses_reach_the_trunk():
    first, _, _ = ready()
    state, metrics = after(step, first)
    policy, critic = by_hand(0.5)
    moved = jax.tree.map(lambda new, old: old - new, (state.policy, state.critic), (first.policy, first.critic))
    assert runs.furthest(moved, (policy, critic)) < 1e-6
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm((policy, critic))), rel=1e-5)
    # Without the value loss the trunk would have moved elsewhere, and the embeddings are a part of it.
    alone = layout.names(by_hand(0.0)[0])
    for name, x in layout.names(policy).items():
        differs = np.max(np.abs(np.asarray(x - alone[name])))
        assert differs == 0 if name == "output.kernel" else differs > 1e-4, name


def test_value_pretraining_moves_the_value_layer_alone():
    first, _, _ = ready()
    state, metrics = after(step, first, update_policy=False)
    assert runs.equal((state.policy, state.policy_optimizer), (first.policy, first.policy_optimizer))
    moved = jax.tree.map(lambda new, old: old - new, state.critic, first.critic)
    assert runs.furthest(moved, by_hand(0.5)[1]) < 1e-6
    assert metrics["policy_loss"] == metrics["ratio"] == 0 < metrics["value_loss"]


def test_a_stale_critic_is_left_alone_and_out_of_the_trunk():
    first, _, _ = ready()
    stale = first
    for explained in (0.3, 0.2, 0.1):
        stale = judge_critic(stale, explained)
    state, metrics = after(step, stale)
    assert runs.equal((state.critic, state.critic_optimizer), (first.critic, first.critic_optimizer))
    moved = jax.tree.map(lambda new, old: old - new, state.policy, first.policy)
    assert runs.furthest(moved, by_hand(0.0)[0]) < 1e-6
    assert metrics["value_loss"] == 0 and metrics["ratio"] > 0


def test_adapters_share_their_trunk_too(tmp_path):
    config = runs.config(shared_trunk=0.5, lora={"rank": 2}, learning_rate=0.01, critic_learning_rate=0.01)
    models, optimizers = parts.make_models(config, runs.model()), parts.make_optimizers(config)
    first = parts.make_state(config, runs.model(), MPO, optimizers)
    assert layout.names(first.critic).keys() == {"value.kernel", "value.bias"}
    own = make_train_step(MPO, models, optimizers)
    state = first
    for _ in range(3):
        state, metrics = after(own, state)
    assert metrics["value_loss"] > 0 and not runs.equal(state.critic, first.critic)
    adapters.save(tmp_path, config, runs.model(), state)
    base = whole_critic(runs.model().params, state.critic)
    found_config, found = lora.load(tmp_path / "critic_adapter", runs.model().config, base)
    _, batch, _ = ready()
    expected = make_evaluate(MPO, models)(state, batch).values
    values, _ = jax.jit(OWN.values)(lora.merge(found_config, base, found), batch)
    np.testing.assert_allclose(values, expected, atol=1e-5)


@pytest.mark.parametrize(("algorithm", "message"), [("grpo", "grpo has no critic"), ("sao", "sao makes 2 updates")])
def test_an_algorithm_that_cannot_share_is_refused(algorithm, message):
    with pytest.raises(ValueError, match=f"shared_trunk: {message}"):
        make_train_step(algorithms.from_config(algorithm), SHARED, SGD)
