"""Training of a policy with experts: the load is spread, and an update uses the experts of its evaluation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import tiny

from experiments import parts
from mpo_jax import algorithms
from mpo_jax.models import layout
from mpo_jax.training.step import Models, Optimizers, initial_state, make_evaluate, make_train_step
from training import runs

CONFIG = tiny.config(vocab_size=400, num_layers=1, num_experts=4, experts_per_token=2, expert_width=8)
ALGORITHM = algorithms.from_config("dr_grpo")
MODELS = dataclasses.replace(Models.of(CONFIG), router_replay=True)
SGD = Optimizers(policy=optax.sgd(0.1), critic=optax.sgd(0.1))
evaluate = make_evaluate(ALGORITHM, MODELS)


@functools.cache
def ready():
    """A first state on the host, a batch whose turns are as long in both halves of its rows, and targets."""
    batch, _ = runs.learner("dr_grpo", minibatches=1)._pack(runs.flat(runs.make_groups()))
    state = initial_state(CONFIG, tiny.params(CONFIG), ALGORITHM, SGD)
    judged = evaluate(state, batch)
    targets = jax.jit(functools.partial(algorithms.targets, ALGORITHM))(batch, judged)
    return runs.frozen(state), batch, targets


def test_the_load_balancing_loss_falls_where_it_has_a_coefficient():
    first, batch, targets = ready()
    step, found = make_train_step(ALGORITHM, MODELS, SGD, load_balancing=10.0), []
    targets = targets.replace(experts=None, advantages=jnp.zeros_like(targets.advantages))
    state = jax.tree.map(jnp.array, first)
    for _ in range(6):
        state, metrics = step(state, batch, targets, True)
        found.append({name: float(x) for name, x in metrics.items()})
    assert 2.0 < found[-1]["load_balancing_loss"] < found[0]["load_balancing_loss"]  # 2 = k where all is even
    assert 0 < found[0]["router_entropy"] < np.log(4) and 1 < found[0]["max_load"] <= 2
    moved = {name for name, x in layout.names(first.policy).items() if np.any(layout.names(state.policy)[name] != x)}
    assert "blocks.0.mlp.router.kernel" in moved and "blocks.0.mlp.expert_gate" not in moved


def test_an_update_uses_the_experts_of_the_evaluation():
    first, batch, targets = ready()
    assert targets.experts.shape == (*batch.tokens.shape, 1, 2)
    routed = jax.jit(MODELS.routed)
    same, _, _ = routed(first.policy, batch, None, targets.experts)
    mask = batch.action_mask
    np.testing.assert_allclose(np.asarray(same)[mask], np.asarray(targets.old_logprobs)[mask], atol=1e-6)
    # Another router would choose others, and does not.
    other = jax.tree_util.tree_map_with_path(lambda path, x: -x if "router" in str(path) else x, first.policy)
    changed, _, routing = routed(other, batch, None, targets.experts)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(routing.experts), 0, 2), targets.experts)
    free = evaluate(initial_state(CONFIG, other, ALGORITHM, SGD), batch)
    assert np.any(np.asarray(free.experts) != np.asarray(targets.experts))
    assert np.max(np.abs(np.asarray(free.logprobs - changed)[mask])) > 1e-3


def test_replay_of_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match=r"router_replay: model=.* has no experts"):
        parts.make_models(runs.config(router_replay=True), runs.model())
