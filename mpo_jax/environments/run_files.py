"""Runs as BrowseComp-Plus's evaluator reads them: one file `run_*.json` a query."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpo_jax.environments.document_search import ANSWER, ActionFormat


def run_record(
    query_id: str,
    actions: Sequence[str],
    observations: Sequence[str],
    retrieved_docids: Sequence[str],
    *,
    actions_as: ActionFormat,
    model: str,
) -> dict[str, Any]:
    """What an episode did, in the evaluator's terms.

    Args:
      query_id: of the question.
      actions: m texts of the policy.
      observations: what the environment said: the question, then what came of each action.
      retrieved_docids: of all that was found or opened.
      actions_as: how the actions are read.
      model: named in the record's metadata.

    Returns:
      query_id, tool_call_counts, status ("completed" where there is an answer), retrieved_docids, and result: a list
      of tool calls with their outputs, and the answer as its last entry.
    """
    result, counts, status = [], Counter(), "incomplete"
    for action, observation in zip(actions, observations[1:], strict=False):
        try:
            calls = actions_as.read(action)
        except ValueError:  # it was told so, and no tool was called
            continue
        for call in calls:
            if call.name == ANSWER:
                result.append(_entry("output_text", None, None, str(call.arguments.get("text", ""))))
                status = "completed"
                break
            counts[call.name] += 1
            # The outputs of several calls of one turn are one observation.
            result.append(_entry("tool_call", call.name, json.dumps(dict(call.arguments)), observation))
    return {
        "metadata": {"model": model},
        "query_id": query_id,
        "tool_call_counts": dict(counts),
        "status": status,
        "retrieved_docids": list(dict.fromkeys(retrieved_docids)),
        "result": result,
    }


def write_run(folder: Path, record: dict[str, Any], episode: str) -> Path:
    """Writes one record.

    Args:
      folder: of the run; made if absent.
      record: what `run_record` gave.
      episode: makes the file's name unique.

    Returns:
      The path of the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"run_{re.sub(r'[^0-9A-Za-z-]', '-', episode)}.json"
    path.write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return path


def _entry(kind: str, tool: str | None, arguments: str | None, output: str) -> dict[str, Any]:
    return {"type": kind, "tool_name": tool, "arguments": arguments, "output": output}
