"""Every algorithm raises success from the packaged warm start, through the same train step, traced once."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import parts
from experiments.configs.search import get_config
from mpo_jax.models import pretrained
from mpo_jax.training.learner import Learner

GROUPS, SIZE, STEPS = 8, 8, 14
ALGORITHMS = ("mpo", "ppo", "grpo", "dapo", "gspo", "vc_ppo", "vapo", "sao", "taspo")


def small_config(name):
    config = get_config()
    config.algorithm = name
    config.groups_per_step, config.group_size, config.num_steps = GROUPS, SIZE, STEPS
    config.row_multiple = 32  # 64 episodes of at most 384 tokens always take 32 or 64 rows
    config.value_pretraining_steps = 1
    config.learning_rate = 1e-3
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_success_rises_by_three_standard_errors(name):
    config = small_config(name)
    model = pretrained.load("search_tiny")
    algorithm, optimizers = parts.make_algorithm(config), parts.make_optimizers(config)
    learner = Learner(
        algorithm, parts.make_models(model), optimizers, parts.make_settings(config), model.tokenizer.render_hint
    )
    state = parts.make_state(model, algorithm, optimizers)
    asked = parts.fixed_questions("train", GROUPS)  # the same few questions in every step
    tasks = lambda group: {"question": asked[group % GROUPS]}  # noqa: E731
    rollout = parts.make_rollout(config, model, tasks, group_size=SIZE, seed=0)
    success = []
    for step in range(STEPS):
        rollout.engine.load(state.policy, step)
        groups = range(step * GROUPS, (step + 1) * GROUPS)
        jobs = itertools.chain.from_iterable(map(rollout.jobs, groups))
        episodes = parts.play_jobs(rollout, jobs)
        success += [[sum(episode.rewards) == 1.0 for episode in episodes]]
        if step < STEPS - 1:
            state, metrics = learner.update(state, episodes)
    assert int(state.step) == STEPS - 1
    assert int(state.skipped) == 0
    assert jnp.isfinite(metrics["grad_norm"])
    assert learner.train_step._cache_size() == 1
    before, after = np.array(success[:2]).ravel(), np.array(success[-2:]).ravel()
    error = np.sqrt(before.var() / len(before) + after.var() / len(after))
    assert after.mean() - before.mean() >= 3 * error, (before.mean(), after.mean(), error)
