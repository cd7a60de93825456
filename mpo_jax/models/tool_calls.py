"""Tool calls in the format of Hermes and Qwen: a JSON object between `<tool_call>` tags.

See https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B, "Prompt Format for Function Calling".
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

_OPEN = re.compile(r"<tool_call>\s*")
_CLOSE = re.compile(r"\s*(?:</tool_call>|\Z)")


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A function's name and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


def split_thinking(text: str) -> tuple[str, str]:
    """What a policy thought, and what it then said; thinking that was cut off before its end is all thought."""
    if "<think>" not in text and "</think>" not in text:
        return "", text
    thought, _, said = text.partition("</think>")
    return thought.partition("<think>")[2].strip() if "<think>" in thought else thought.strip(), said.lstrip()


def parse(text: str) -> tuple[str, list[ToolCall]]:
    """What a policy said outside its tool calls, and the calls in order.

    The JSON says itself where it ends, so that tags inside a string of it are text. A last closing tag may be missing.

    Args:
      text: what was said, without thinking.

    Raises:
      ValueError: a call that is no JSON object with a name and arguments; the message is fit for the policy to read.
    """
    said, calls, end = [], [], 0
    while opening := _OPEN.search(text, end):
        said.append(text[end : opening.start()])
        try:
            call, end = json.JSONDecoder().raw_decode(text, opening.end())
            json.dumps(call, ensure_ascii=False, allow_nan=False).encode()  # Python reads NaN and half characters too
        except json.JSONDecodeError as error:
            raise ValueError(f"tool call {len(calls) + 1} is no JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tool call {len(calls) + 1} is no JSON that can be used: {error}") from error
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError(f"tool call {len(calls) + 1} is no JSON object with a name")
        if not isinstance(arguments := call.get("arguments", {}), dict):
            raise ValueError(
                f"tool call {len(calls) + 1}: arguments are {type(arguments).__name__}, expected an object"
            )
        if not (closing := _CLOSE.match(text, end)):
            raise ValueError(f"tool call {len(calls) + 1} goes on after its JSON: {text[end : end + 20]!r}")
        calls.append(ToolCall(call["name"], arguments))
        end = closing.end()
    said.append(text[end:])
    return "".join(said).strip(), calls


def render(call: ToolCall) -> str:
    """A call as a policy writes it."""
    name, arguments = (json.dumps(x, ensure_ascii=False) for x in (call.name, dict(call.arguments)))
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def render_response(text: str) -> str:
    """What a tool returned, as a policy reads it."""
    return f"<tool_response>\n{text}\n</tool_response>"
