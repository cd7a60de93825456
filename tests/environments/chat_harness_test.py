"""A harness of a few lines, turned inside out: its requests are observations, actions are its replies."""

import json
import threading
import urllib.error
import urllib.request

import pytest
from gymnasium.utils.env_checker import check_env

from mpo_jax.environments.chat_harness import ChatHarness, HarnessFailed
from mpo_jax.models.tool_calls import ToolCall, render

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def post(url, body):
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        return reply.read()


def adder(url, task):
    """Asks for the sum of task and 1: by the tool `add`, then in words."""
    messages = [{"role": "system", "content": "Use add."}, {"role": "user", "content": f"{task} + 1?"}]
    while True:
        reply = json.loads(post(url, {"model": "m", "messages": messages, "tools": [TOOL]}))["choices"][0]
        messages.append(reply["message"])
        if reply["finish_reason"] == "stop":
            reward = float(reply["message"]["content"] == str(task + 1))
            return "the end", reward, {"success": reward == 1.0}
        for call in reply["message"]["tool_calls"]:
            result = sum(json.loads(call["function"]["arguments"])["terms"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"the sum is {result}"})


@pytest.fixture
def made():
    environments = []

    def make(run=adder, **settings):
        environments.append(ChatHarness(run, **settings))
        return environments[-1]

    yield make
    for environment in environments:
        environment.close()


def test_a_scripted_policy_reaches_its_reward(made):
    environment = made()
    prompt, info = environment.reset(options={"task": 4})
    assert prompt.startswith("Tools") and '"add"' in prompt and prompt.endswith("Use add.\n\n4 + 1?")
    assert info == {"task_id": "harness/4", "success": False}
    call = render(ToolCall("add", {"terms": [4, 1]}))
    assert environment.step(f"<think>hm</think>{call}{call}")[:4] == ("the sum is 5\n\nthe sum is 5", 0.0, False, False)
    assert environment.step("5") == ("the end", 1.0, True, False, {"task_id": "harness/4", "success": True})
    environment.reset(options={"task": 7})
    assert environment.step("9")[1:3] == (0.0, True)
    with pytest.raises(RuntimeError, match="reset"):
        environment.step("x")


def test_an_unfinished_episode_is_abandoned(made):
    """Its harness is told so and ends; what it says then disturbs no later episode."""
    environment, before = made(), threading.active_count()
    for task in range(5):
        assert environment.reset(options={"task": task})[0].endswith(f"{task} + 1?")
    assert environment.step("5")[1:3] == (1.0, True)
    assert threading.active_count() <= before + 8


def test_the_turn_limit_truncates(made):
    environment = made(turn_limit=2)
    environment.reset(options={"task": 1})
    call = render(ToolCall("add", {"terms": []}))
    assert [environment.step(call)[2:4] for _ in range(2)] == [(False, False), (False, True)]


def test_calls_that_cannot_be_read_are_text(made):
    environment = made()
    environment.reset(options={"task": 1})
    assert environment.step("<tool_call>oops")[1:3] == (0.0, True)


def fails(url, task):
    raise LookupError("no such task")


def hangs(url, task):
    threading.Event().wait(30)


def crashes_later(url, task):
    post(url, {"messages": [{"role": "user", "content": "hi"}]})
    raise OSError("tool server is gone")


@pytest.mark.parametrize(
    ("run", "message"),
    [(fails, "LookupError: no such task"), (hangs, r"silent for 0\.5 s"), (crashes_later, "OSError")],
)
def test_failures_are_raised_and_named(made, run, message):
    environment = made(run, seconds=0.5)
    with pytest.raises(HarnessFailed, match=message):
        environment.reset()
        environment.step("x")


def test_bad_requests_are_refused_and_do_not_reach_the_policy(made):
    statuses = []

    def probe(url, task):
        for path, body in (
            (f"{url}/chat", b"{}"),
            (f"{url}/chat/completions", b"{"),
            (f"{url}/chat/completions", b"{}"),
        ):
            try:
                urllib.request.urlopen(urllib.request.Request(path, body), timeout=10)
            except urllib.error.HTTPError as error:
                statuses.append(error.code)
        return adder(url, task)

    assert made(probe).reset(options={"task": 2})[0].endswith("2 + 1?")
    assert statuses == [404, 400, 400] or statuses == [404, 400]


def test_streams_are_one_event(made):
    seen = []

    def stream(url, task):
        parts = [{"type": "text", "text": "look"}, {"type": "image_url"}]
        seen.append(post(url, {"stream": True, "messages": [{"role": "user", "content": parts}]}).decode())
        return "", 0.0, {}

    environment = made(stream)
    assert environment.reset()[0] == "look\n[image_url]"
    environment.step("a" + render(ToolCall("f", {"x": 1})))
    event, done, _ = seen[0].split("\n\n")
    choice = json.loads(event.removeprefix("data: "))["choices"][0]
    assert done == "data: [DONE]" and choice["finish_reason"] == "tool_calls" and choice["delta"]["content"] == "a"
    assert choice["delta"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}


def test_the_interface_is_gymnasiums(made):
    check_env(made(), skip_render_check=True)
