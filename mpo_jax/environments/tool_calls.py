"""Tool calls inside an assistant's turn, as Qwen and the Hermes models write them, and what comes back."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

MAXIMAL_CALLS = 16  # of one turn

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True):
    """One call.

    Attributes:
      name: of the tool; "" where the call could not be read.
      arguments: by name.
      error: why it could not be read, "" where it could.
    """

    name: str
    arguments: dict[str, Any] = {}
    error: str = ""


class Turn(msgspec.Struct, frozen=True):
    """What an assistant's turn says and what it asks for.

    Attributes:
      text: without reasoning and calls.
      calls: in order.
    """

    text: str
    calls: tuple[ToolCall, ...]


def read_turn(action: str) -> Turn:
    """Splits a turn into text and calls: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them.

    Args:
      action: the policy's text; `<think>…</think>` is no part of what it says, and calls within are none.

    Returns:
      The turn. A call that cannot be read is kept, with the reason; so is the first of more than `MAXIMAL_CALLS`,
      and the rest left out.
    """
    said = _THOUGHT.sub("", action)
    bodies = _CALL.findall(said)
    calls = tuple(map(_read_call, bodies[:MAXIMAL_CALLS]))
    if len(bodies) > MAXIMAL_CALLS:
        calls += (ToolCall("", error=f"{len(bodies)} calls, expected at most {MAXIMAL_CALLS}: the rest was left out"),)
    return Turn(_CALL.sub("", said).strip(), calls)


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of a call, as `read_turn` reads it: what a scripted policy says."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


def describe_tools(schemas: Sequence[Mapping[str, Any]]) -> str:
    """What a prompt says of the tools: their JSON schemas, one a line, and how a call is written."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        f"Tools, one JSON schema a line:\n{lines}\n\n"
        'To call one, write <tool_call>{"name": its name, "arguments": an object}</tool_call>; '
        "several calls in one message are carried out in order."
    )


def _read_call(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except (json.JSONDecodeError, RecursionError) as error:
        return ToolCall("", error=f"the call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", error='a call is an object with "name" and "arguments"')
    arguments = call.get("arguments") or {}
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], error=f"arguments is {type(arguments).__name__}, expected an object")
    return ToolCall(call["name"], arguments)
