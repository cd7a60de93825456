"""The study's numbers on a handful of made-up episodes, and its table by hand."""

import jax
import numpy as np
from models import tiny

from mpo_jax.models import pretrained
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.scoring import study
from mpo_jax.store.episode import Episode


def episode(number, task, reward, rng):
    return Episode(
        episode_id=str(number),
        group_id=0,
        task_id=task,
        tokens=rng.integers(0, 64, 12).tolist(),
        action_mask=[False, False, True, True, False, True, True, True, False, False, True, True],
        executable_mask=[False] * 12,
        turn_ids=[0] * 4 + [1] * 4 + [2] * 4,
        logprobs=[0.0] * 12,
        rewards=[0.0, 0.0, reward],
        state_ids=[0, 1, 2],
        versions=[0, 0, 0],
        end_reason="terminated",
    )


def test_every_form_and_every_baseline_is_measured():
    rng, config = np.random.default_rng(0), tiny.config()
    tokenizer = pretrained.load("search_tiny").tokenizer
    reference = Pretrained(config=config, params=tiny.params(config), tokenizer=tokenizer)
    policy = study.with_params(reference, jax.tree.map(lambda x: 1.1 * x, reference.params))
    episodes = [episode(i, f"t{i // 2}", float(i % 2), rng) for i in range(4)]
    found = study.score_episodes(episodes, policy, reference)
    for one in found:
        # Turns of 2, 3 and 2 tokens: the sum of all is not the mean over turns of their means.
        total = one.scores["sequence_logprob"] - 7 * one.scores["ref_mean_logprob"]
        np.testing.assert_allclose(one.scores["progress_advantage, sums"], total, rtol=1e-3, atol=1e-4)
        assert abs(one.scores["progress_advantage"] - total) > 1e-3
        assert {"self_certainty", "deepconf_bottom", "sequence_logprob", "negative_entropy"} <= one.scores.keys()
    measured = study.measure(found, num_samples=5)
    assert measured["choices"] == {"mean": 0.5, "oracle": 1.0}
    assert measured["attempts"] == [2, 2]


def test_the_table_has_means_over_seeds_with_students_interval():
    score = {"auroc": 0.5, "best_of_n": 0.25}
    one = {
        "algorithm": "mpo",
        "seed": 0,
        "step": 50,
        "tasks": 4,
        "attempts": [8, 8],
        "choices": {"mean": 0.2, "oracle": 0.8},
        "scores": {"s": score},
    }
    seeds = [
        one | {"seed": seed, "scores": {"s": score | {"auroc": auroc}}} for seed, auroc in enumerate((0.5, 0.6, 0.7))
    ]
    text = study.table([*seeds, one | {"step": 100, "scores": {"s": score | {"auroc": None}}}])
    # Three seeds: 4.303 · .1/√3 = .248. One has no interval.
    assert "| s | 0.600 ± 0.248 | 0.250 ± 0.000 |" in text
    assert "mpo after 100 steps, seeds 0:" in text
    assert "| s | undefined | 0.250 |" in text
