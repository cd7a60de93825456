"""Every algorithm raises success on the search environment, from the packaged warm start, by the one train step."""

import numpy as np
import pytest

from experiments import environments, parts, playing
from experiments.configs import search
from mpo_jax import evaluation
from mpo_jax.models import pretrained
from mpo_jax.training.learner import Learner

ALGORITHMS = ("mpo", "ppo", "grpo", "dapo", "gspo", "vc_ppo", "vapo", "sao", "taspo")
QUESTIONS, STEPS, MEASURED = 4, 6, 2
SAMPLES = dict.fromkeys(ALGORITHMS, 8) | {"mpo": 16}  # with 8, MPO rose by 3.7 standard errors only


def success_by_step(algorithm_name):
    """Successes [steps, episodes] of the episodes that each step trains on: the same few questions every time."""
    config, samples = search.get_config(), SAMPLES[algorithm_name]
    config.update(
        algorithm=algorithm_name,
        group_size=samples,
        groups_per_step=QUESTIONS,
        row_tokens=512,
        row_multiple=5 * samples // 2,  # every batch fits, so that one shape serves them all
        value_pretraining_steps=1,
        learning_rate=3e-4,
        num_steps=STEPS,
        rate_decay="constant",
    )
    algorithm = parts.make_algorithm(config)
    parts.settle_groups(config, algorithm)
    model = pretrained.load(config.model)
    optimizers = parts.make_optimizers(config)
    learner = Learner(
        algorithm,
        parts.make_models(config, model),
        optimizers,
        parts.make_settings(config),
        model.tokenizer.render_hint,
    )
    setting = environments.build(config, model.tokenizer)
    tasks = setting.fixed_tasks("train", QUESTIONS)
    rollout = playing.make_rollout(
        config, model, setting, tasks=lambda group: tasks[group % QUESTIONS], group_size=samples, seed=0
    )
    state, successes = parts.make_state(config, model, algorithm, optimizers), []
    for step in range(STEPS):
        rollout.engine.load(state.policy, step)
        groups = range(step * QUESTIONS, (step + 1) * QUESTIONS)
        episodes = playing.play_jobs(rollout, (job for group in groups for job in rollout.jobs(group)))
        successes.append(evaluation.success(np.array([sum(episode.rewards) for episode in episodes])))
        state, _ = learner.update(state, episodes)
    assert learner.train_step._cache_size() == 1
    return np.array(successes, float)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_success_rises_by_three_standard_errors(algorithm):
    successes = success_by_step(algorithm)
    before, after = successes[:MEASURED].ravel(), successes[-MEASURED:].ravel()
    standard_error = np.sqrt(before.var() / before.size + after.var() / after.size)
    print(algorithm, successes.mean(axis=1).round(2), round(standard_error, 3))
    assert after.mean() - before.mean() >= 3 * standard_error, successes.mean(axis=1)
