"""Environments of others, named in the config."""

import pytest
from training import runs

from experiments import environments, playing


def config(**section):
    made = runs.config(environment="adapter")
    made.adapter.update({"train_tasks": 5, "held_out_tasks": 3} | section)
    return made


def test_tasks_are_numbers_and_the_held_out_ones_come_last():
    setting = environments.build(config(), runs.model().tokenizer)
    assert sorted(setting.training_task(i)["task"] for i in range(5)) == [0, 1, 2, 3, 4]
    assert sorted(task["task"] for task in setting.fixed_tasks("held_out", 9)) == [5, 6, 7]


@pytest.mark.slow
def test_episodes_of_functions_called_in_turn():
    """The tiny model plays BFCL in a process of its own; it solves nothing, and every episode is whole."""
    pytest.importorskip("bfcl_eval", reason="needs bfcl-eval, of requirements-envs.txt")
    made = config(target="mpo_jax.environments.bfcl:Bfcl", seconds=120.0)
    setting = environments.build(made, runs.model().tokenizer)
    rollout = playing.make_rollout(made, runs.model(), setting, group_size=2, seed=0)
    rollout.engine.load(runs.model().params, 0)
    episodes = playing.play(rollout, 1)
    assert len(episodes) == 2 and {e.task_id.rsplit("_", 1)[0] for e in episodes} == {"multi_turn_base"}
    assert all(e.rewards and sum(e.rewards) == 0 and "error" not in e.metadata for e in episodes)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"target": "x"}, "target is 'x'"),
        ({"arguments": "{"}, "adapter.arguments is '{', expected a JSON object"),
        ({"arguments": "[]"}, r"adapter.arguments is '\[\]', expected a JSON object"),
        ({"seconds": 0.0}, "seconds is 0"),
        ({"held_out_tasks": 0}, "expected at least one of each"),
    ],
)
def test_faults_are_named(section, message):
    with pytest.raises(ValueError, match=message):
        environments.build(config(**section), runs.model().tokenizer)
