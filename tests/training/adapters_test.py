"""Training of adapters: the base stays as it is, and a merged policy is what was trained."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import adapters, parts
from mpo_jax.models import layout, lora, weights
from mpo_jax.training.checkpoints import Checkpoints
from mpo_jax.training.learner import Learner
from training import runs


def config_of():
    """Adapters of rank 2 at a rate at which few steps show."""
    changes = {
        "row_tokens": 64,
        "row_sequences": 4,
        "context_length": 64,
        "minibatches": 1,
        "lora": {"rank": 2, "alpha": 4.0},
    }
    return runs.config(learning_rate=0.01, critic_learning_rate=0.01, **changes)


@functools.cache
def trained():
    """A learner with critic and reference, its first state on the host, that after three steps, and their batch."""
    c, model = config_of(), runs.model()
    algorithm, optimizers = parts.make_algorithm(c), parts.make_optimizers(c)
    algorithm = dataclasses.replace(algorithm, needs=algorithm.needs | {"reference"})
    learner = Learner(algorithm, parts.make_models(c, model), optimizers, parts.make_settings(c))
    state = parts.make_state(c, model, algorithm, optimizers)
    first = runs.frozen(state)
    batch, targets = runs.prepare(learner, state, runs.as_sampled(learner, state, runs.flat(runs.make_groups())))
    for _ in range(3):  # the value layer is 0 at first, then B beside what it reads: A moves last
        state, metrics = learner.train_step(state, batch, targets, True)
        assert float(metrics["grad_norm"]) > 0 and int(state.skipped) == 0
    return learner, first, state, batch


def test_every_adapter_moves_and_the_base_keeps_every_bit():
    _, first, state, _ = trained()
    assert runs.equal(first.base, runs.model().params) and runs.equal(state.base, first.base)
    # 7 adapted layers of one block, two factors each; the critic also has the two arrays of its value layer.
    assert [len(jax.tree.leaves(tree)) for tree in (state.policy, state.critic)] == [14, 16]
    for before, after in ((first.policy, state.policy), (first.critic, state.critic)):
        for name, x in layout.names(before).items():
            assert np.any(np.asarray(layout.names(after)[name]) != x), name


def test_the_optimizer_keeps_moments_of_the_adapters_alone():
    _, first, state, _ = trained()
    kept = sum(x.size for x in jax.tree.leaves(state.policy_optimizer) if x.ndim)
    assert kept == 2 * sum(x.size for x in jax.tree.leaves(first.policy))


def test_it_evaluates_to_what_merged_parameters_do_and_the_reference_is_the_base():
    learner, _, state, batch = trained()
    judged, logprobs = learner.evaluate(state, batch), jax.jit(learner.models.logprobs)
    merged, entropy = logprobs(learner.models.whole(state.policy, state.base), batch)
    np.testing.assert_allclose(judged.logprobs, merged, atol=1e-6)
    np.testing.assert_allclose(judged.entropy, entropy, atol=1e-5)
    base = logprobs(runs.model().params, batch)[0]
    assert state.reference is None and np.max(np.abs(np.asarray(base - merged))) > 1e-3
    np.testing.assert_allclose(judged.ref_logprobs, base, atol=1e-6)
    critic = lora.merge(learner.models.adapters, lora.critic_base(state.base), state.critic)
    np.testing.assert_allclose(judged.values, jax.jit(learner.models.values)(critic, batch)[0], atol=1e-6)


def test_checkpoints_leave_out_the_base_and_a_state_comes_back_on_it(tmp_path):
    _, first, state, _ = trained()
    checkpoints, first = Checkpoints(tmp_path), jax.tree.map(jnp.asarray, first)
    assert parts.restore_state(checkpoints, first) is first
    checkpoints.save(2, state.replace(base=None))
    assert runs.equal(parts.restore_state(checkpoints, first), state)
    checkpoints.close()


def test_saved_adapters_load_onto_the_base_and_merge_to_the_policy(tmp_path):
    learner, _, state, _ = trained()
    model = runs.model()
    adapters.save(tmp_path, config_of(), model, state)
    config, found = lora.load(tmp_path / "adapter", model.config, model.params)
    merged = weights.flatten(learner.models.whole(state.policy, state.base))
    for name, x in weights.flatten(lora.merge(config, model.params, found)).items():
        np.testing.assert_allclose(x, merged[name], atol=1e-6, err_msg=name)
    assert (tmp_path / "critic_adapter" / "adapter_config.json").exists()


def test_without_a_rank_there_is_nothing_to_save(tmp_path):
    config = runs.config()
    assert adapters.configured(config) is None
    adapters.save(tmp_path, config, runs.model(), runs.fresh_state("gspo"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="rank=-1"):
        adapters.configured(runs.config(lora={"rank": -1}))
