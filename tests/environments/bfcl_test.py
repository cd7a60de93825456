"""BFCL's multi-turn tasks: gold calls are rewarded, fewer or others are not."""

import ast

import pytest
from gymnasium.utils.env_checker import check_env

from mpo_jax.environments.bfcl import Bfcl
from mpo_jax.models.tool_calls import ToolCall, render

pytest.importorskip("bfcl_eval", reason="needs bfcl-eval, of requirements-envs.txt")


@pytest.fixture(scope="module")
def environment():
    return Bfcl()


def as_action(environment, gold):
    """A gold call, which is Python text, as a policy writes it."""
    call = ast.parse(gold).body[0].value
    names = environment._known[call.func.id]
    arguments = dict(zip(names, map(ast.literal_eval, call.args), strict=False))
    arguments |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return render(ToolCall(call.func.id, arguments))


def play(environment, task, spoil=lambda turn, actions: actions):
    _, info = environment.reset(options={"task": task})
    for turn, calls in enumerate(environment._gold[info["task_id"]]):
        for action in spoil(turn, [as_action(environment, call) for call in calls]):
            assert environment.step(action)[1:4] == (0.0, False, False)
        result = environment.step("Done.")
    return result


@pytest.mark.parametrize("task", range(5))
def test_gold_calls_are_rewarded(environment, task):
    assert play(environment, task)[:4] == ("solved", 1.0, True, False)


@pytest.mark.parametrize("task", range(2))
def test_a_call_left_out_is_not(environment, task):
    result = play(environment, task, lambda turn, actions: actions[:-1] if turn == 1 else actions)
    assert result[:4] == ("not solved", 0.0, True, False) and result[4]["success"] is False


def test_the_state_of_an_episode_is_forgotten(environment):
    for _ in range(2):
        play(environment, 0)
        assert not [name for name in vars(environment._executor) if name.startswith("policy_")]


def test_users_speak_in_turn(environment):
    prompt, info = environment.reset(options={"task": 0})
    said = [messages[0]["content"] for messages in environment._task["question"]]
    assert prompt.endswith(said[0]) and "excluded" not in prompt and '"name": "cp"' not in prompt
    assert info == {"task_id": "multi_turn_base_0", "success": False, "user_messages": 1}
    assert environment.step("Done.")[0] == said[1]


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (ToolCall("no_such", {}), "there is no tool 'no_such'"),
        (ToolCall("__import__", {"name": "os"}), "there is no tool '__import__'"),
        (ToolCall("cd", {"folder='.', x": 1}), "cd has no argument"),
        (ToolCall("cd", {"folder": "'); __import__('os').abort(); ('"}), "error"),
    ],
)
def test_calls_are_names_and_literals_only(environment, call, answer):
    environment.reset(options={"task": 0})
    text, reward, terminated, *_ = environment.step(render(call))
    assert answer in text.lower() and (reward, terminated) == (0.0, False)


def test_too_many_calls_truncate():
    environment = Bfcl(calls_limit=2)
    environment.reset(options={"task": 0})
    call = render(ToolCall("ls", {"a": True}))
    assert [environment.step(call)[2:4] for _ in range(2)] == [(False, False), (False, True)]


def test_the_interface_is_gymnasiums(environment):
    check_env(environment, skip_render_check=True)


def test_an_unknown_category_is_named():
    with pytest.raises(ValueError, match="category is 'miss_func', expected one of"):
        Bfcl("miss_func")
