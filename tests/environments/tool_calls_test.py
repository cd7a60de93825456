"""Calls are read as they are written; what cannot be read is kept with its reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpo_jax.environments.tool_calls import MAXIMAL_CALLS, ToolCall, read_turn, write_call

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)


def test_text_reasoning_and_calls_are_told_apart():
    turn = read_turn(
        "<think>maybe <tool_call>{}</tool_call></think>I look."
        '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>\n<tool_call>{"name": "stop"}'
    )
    assert turn.text == "I look."
    assert turn.calls == (ToolCall("search", {"query": "x"}), ToolCall("stop"))


@given(st.text(st.characters(codec="ascii"), min_size=1), st.dictionaries(st.text(), VALUES, max_size=3))
def test_what_is_written_is_read(name, arguments):
    call = write_call(name, arguments)
    if "</tool_call>" not in call[12:-13] and "<think>" not in call:
        assert read_turn(call).calls == (ToolCall(name, arguments),)


@pytest.mark.parametrize(
    ("body", "name", "error"),
    [
        ("search x", "", "no JSON"),
        ("[1]", "", "a call is an object"),
        ('{"name": 1}', "", "a call is an object"),
        ('{"name": "f", "arguments": [1]}', "f", "arguments is list"),
        ("[" * 100_000, "", "no JSON"),
    ],
)
def test_unreadable_calls_say_why(body, name, error):
    (call,) = read_turn(f"<tool_call>{body}</tool_call>").calls
    assert call.name == name and error in call.error


@given(st.text())
def test_any_text_is_a_turn(text):
    read_turn(text)


def test_too_many_calls_are_cut():
    calls = read_turn(write_call("f", {}) * 1000).calls
    assert len(calls) == MAXIMAL_CALLS + 1 and "1000 calls" in calls[-1].error
