"""Tool calls between text and objects."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpo_jax.models.tool_calls import ToolCall, parse, render, render_response, split_thinking

CALL = '<tool_call>\n{"name": "search", "arguments": {"words": "capital", "n": 3}}\n</tool_call>'


def test_a_call_is_read_and_written_as_qwen_writes_it():
    call = ToolCall("search", {"words": "capital", "n": 3})
    assert parse(CALL) == ("", [call])
    assert render(call) == CALL


def test_text_around_calls_and_their_order_are_kept():
    said, calls = parse(f"I look.\n{CALL}\n{CALL.replace('3', '4')} Done")
    assert said == "I look.\n\n Done"
    assert [call.arguments["n"] for call in calls] == [3, 4]
    assert parse("no call <tool_response>") == ("no call <tool_response>", [])


def test_a_tag_inside_a_string_is_text_and_a_last_closing_tag_may_be_missing():
    call = ToolCall("say", {"text": "</tool_call><tool_call>{"})
    assert parse(render(call)) == ("", [call])
    assert parse(render(call).removesuffix("\n</tool_call>")) == ("", [call])


@given(
    st.lists(
        st.builds(
            ToolCall,
            st.text(min_size=1),
            st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text())),
        ),
        max_size=3,
    )
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_what_is_written_is_read_back(calls):
    assert parse("\n".join(map(render, calls))) == ("", calls)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>search</tool_call>", "call 1 is no JSON"),
        (f"{CALL}<tool_call>[1]</tool_call>", "call 2 is no JSON object with a name"),
        ('<tool_call>{"arguments": {}}</tool_call>', "call 1 is no JSON object with a name"),
        ('<tool_call>{"name": "a", "arguments": "b"}</tool_call>', "arguments are str, expected an object"),
        ('<tool_call>{"name": "a"} and more</tool_call>', "goes on after its JSON: ' and more"),
        ("<tool_call>", "call 1 is no JSON"),
        (
            '<tool_call>{"name": "get", "arguments": {"id": "\\ud800"}}</tool_call>',
            "1 is no JSON that can be used: .*surrogates",
        ),
        ('<tool_call>{"name": "get", "arguments": {"id": NaN}}</tool_call>', "1 is no JSON that can be used: .*float"),
        (f"{CALL}<tool_call>" + "[" * 100_000, "2 is no JSON that can be used: .*recursion"),
        ("<tool_call>" + "9" * 5_000, "1 is no JSON that can be used: .*digits"),
    ],
)
def test_a_malformed_call_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        ("Paris", "", "Paris"),
        ("<think>\nhm\n</think>\n\nParis", "hm", "Paris"),
        ("hm\n</think>\n\nParis", "hm", "Paris"),  # the template opened the block
        ("<think>\nhm, so", "hm, so", ""),
        ("<think>\n\n</think>\n\nParis </think>", "", "Paris </think>"),
    ],
)
def test_thinking_is_set_apart(text, thought, said):
    assert split_thinking(text) == (thought, said)


def test_a_response_is_framed():
    assert render_response("1 france") == "<tool_response>\n1 france\n</tool_response>"
