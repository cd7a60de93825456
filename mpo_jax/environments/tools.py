"""Tools of an environment: how a prompt tells of them, how a turn's calls are read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mpo_jax.models.tool_calls import ToolCall, parse, split_thinking

MAXIMAL_CALLS = 16  # of one turn


def describe_tools(schemas: Sequence[Mapping[str, Any]]) -> str:
    """What a prompt says of the tools: their JSON schemas, one a line, and how a call is written."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        f"Tools, one JSON schema a line:\n{lines}\n\n"
        'To call one, write <tool_call>{"name": its name, "arguments": an object}</tool_call>; '
        "several calls in one message are carried out in order."
    )


def read_turn(action: str) -> tuple[str, list[ToolCall]]:
    """What a turn says, without its thinking and its calls, and the calls in order.

    Args:
      action: the policy's text.

    Raises:
      ValueError: a call cannot be read, or there are more than `MAXIMAL_CALLS`; the message is fit for the policy.
    """
    said, calls = parse(split_thinking(action)[1])
    if len(calls) > MAXIMAL_CALLS:
        raise ValueError(f"{len(calls)} tool calls in one message, expected at most {MAXIMAL_CALLS}")
    return said, calls
