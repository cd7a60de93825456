"""Questions over a user's own documents, by BrowseComp-Plus's two tools: search, and get a document."""

import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from mpo_jax.environments.documents import DocumentIndex, Found
from mpo_jax.environments.graders import Grader, exact_match
from mpo_jax.environments.question_files import Task
from mpo_jax.environments.text import AnyText
from mpo_jax.environments.tools import describe_tools, read_turn
from mpo_jax.models.tool_calls import ToolCall

ANSWER = "answer"  # the call that ends an episode; no tool of the benchmark's
_WORD = re.compile(r"\s*\S+")

SCHEMAS = (
    {
        "name": "search",
        "description": "Finds documents. Gives docid, score and the start of the text of the best.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
    {
        "name": "get_document",
        "description": "Gives the whole text of a document.",
        "parameters": {"type": "object", "properties": {"docid": {"type": "string"}}, "required": ["docid"]},
    },
)
INSTRUCTIONS = (
    f"{describe_tools(SCHEMAS)}\n\n"
    'Answer the question from the documents. A message without a call is your answer; it ends with a line "Exact '
    'Answer: " and the answer, as short as can be.\n\nQuestion: '
)


@dataclasses.dataclass(frozen=True)
class ActionFormat:
    """How a policy writes its calls and reads what they find.

    Attributes:
      instructions: what stands before a question.
      read: an action's calls; an answer is the call `answer(text)`. Raises ValueError, with a message for the
        policy, where it cannot be read.
      show: what a search found, with the snippets.
    """

    instructions: str
    read: Callable[[str], Sequence[ToolCall]]
    show: Callable[[Sequence[Found], Sequence[str]], str]


def read_words(action: str) -> Sequence[ToolCall]:
    """Reads `search <words>`, `open <rank>`, `get_document <docid>` and `answer <text>`: what tiny models write."""
    verb, _, argument = action.strip().partition(" ")
    names = {"search": "query", "open": "rank", "get_document": "docid", ANSWER: "text"}
    if (name := names.get(verb.lower())) is None:
        raise ValueError("unknown action")
    tool = "get_document" if name == "rank" else verb.lower()
    return [ToolCall(tool, {name: argument.strip()})]


def read_calls(action: str) -> Sequence[ToolCall]:
    """Reads `<tool_call>…</tool_call>`; a message without one is the answer."""
    said, calls = read_turn(action)
    return calls or [ToolCall(ANSWER, {"text": said})]


def show_lines(found: Sequence[Found], snippets: Sequence[str]) -> str:
    """One line a hit, "<rank> <docid>: <snippet>"."""
    lines = (f"{rank} {hit.docid}: {' '.join(s.split())}" for rank, (hit, s) in _ranked(found, snippets))
    return "\n".join(lines) or "no hits"


def show_json(found: Sequence[Found], snippets: Sequence[str]) -> str:
    """A JSON list of docid, score and snippet: the benchmark's own."""
    hits = [{"docid": hit.docid, "score": hit.score, "snippet": s} for _, (hit, s) in _ranked(found, snippets)]
    return json.dumps(hits, ensure_ascii=False)


WORDS = ActionFormat("", read_words, show_lines)
TOOL_CALLS = ActionFormat(INSTRUCTIONS, read_calls, show_json)
ACTION_FORMATS: dict[str, ActionFormat] = {"words": WORDS, "tool_calls": TOOL_CALLS}


def first_words(text: str, limit: int) -> str:
    """The first `limit` words, with the blanks between them."""
    words = _WORD.finditer(text)
    end = 0
    for _, word in zip(range(limit), words, strict=False):
        end = word.end()
    return text[:end]


class DocumentSearchEnvironment(gymnasium.Env):
    """Answers a question with `search(query)` and `get_document(docid)`; the reward is 1 for a right answer, else 0.

    See *BrowseComp-Plus* (arXiv:2508.06600) for the tools: a search gives docid, score and snippet of five documents,
    a snippet is the first 512 tokens of the text.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own convention

    def __init__(
        self,
        tasks: Sequence[Task],
        index: DocumentIndex,
        *,
        grader: Grader = exact_match,
        actions: ActionFormat = TOOL_CALLS,
        snippet: Callable[[str], str] = lambda text: first_words(text, 512),
        limit: int = 5,
        turn_limit: int = 100,
    ):
        """Sets what is asked, and where it is looked for.

        Args:
          tasks: what `reset` draws from.
          index: what is searched.
          grader: says whether an answer is right.
          actions: how calls are written and results shown.
          snippet: cuts a document's text for a list of hits; 512 words by default, since tokens need a tokenizer.
          limit: hits of a search.
          turn_limit: turns after which an episode without an answer is truncated.
        """
        self._tasks, self._index, self._grader, self._actions = tasks, index, grader, actions
        self._snippet, self._limit, self._turn_limit = snippet, limit, turn_limit
        self.observation_space, self.action_space = AnyText(), AnyText()
        self._task: Task | None = None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode.

        Args:
          seed: of the draw of tasks.
          options: {"task": its place among the tasks} asks that one, else one is drawn.

        Returns:
          Instructions and question, and info: task_id, state_id, success, retrieved_docids (of all that searches
          found or that was opened, in order).
        """
        super().reset(seed=seed)
        number = (options or {}).get("task")
        self._task = self._tasks[self.np_random.integers(len(self._tasks)) if number is None else number]
        self._hits: Sequence[Found] = ()
        self._retrieved: dict[str, None] = {}
        self._turns = 0
        observation = self._actions.instructions + self._task.question
        return observation, self._info(observation)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes one turn; its calls are carried out in order, up to an answer.

        Args:
          action: the policy's text.

        Returns:
          Observation, reward, terminated, truncated, and info as `reset`, with end_reason when the episode is over.

        Raises:
          RuntimeError: no episode is under way.
          JudgeError: where the grader is a judge that cannot be asked.
        """
        if self._task is None:
            raise RuntimeError("no episode is under way: call reset first")
        task, observations, answer = self._task, [], None
        self._turns += 1
        try:
            calls = self._actions.read(action)
        except ValueError as error:
            calls = ()
            observations.append(str(error))
        for call in calls:
            if call.name == ANSWER:
                answer = str(call.arguments.get("text", ""))
                break
            observations.append(self._carry_out(call))
        success = answer is not None and self._grader(task.question, answer, task.answer)
        truncated = answer is None and self._turns >= self._turn_limit
        if answer is not None:
            observations.append("correct" if success else "wrong")
        observation = "\n".join(observations)
        info = self._info(observation, success)
        if answer is not None or truncated:
            info["end_reason"] = "turn_limit" if truncated else "answer"
            self._task = None
        return observation, float(success), answer is not None, truncated, info

    def _carry_out(self, call: ToolCall) -> str:
        if call.name == "search":
            self._hits = self._index.search(str(call.arguments.get("query", "")), self._limit)
            self._retrieved |= dict.fromkeys(hit.docid for hit in self._hits)
            return self._actions.show(self._hits, [self._snippet(hit.text) for hit in self._hits])
        if call.name == "get_document":
            docid = self._docid(call)
            document = None if docid is None else self._index.get(docid)
            if document is None:
                return "no such document"
            self._retrieved[document.docid] = None
            return document.text
        return f"unknown tool {call.name!r}"

    def _docid(self, call: ToolCall) -> str | None:
        """The id that a call names, or that of the hit whose rank it names."""
        if "rank" not in call.arguments:
            return str(call.arguments.get("docid", ""))
        rank = str(call.arguments["rank"])
        known = re.fullmatch(r"[1-9]\d?", rank) and int(rank) <= len(self._hits)
        return self._hits[int(rank) - 1].docid if known else None

    def _info(self, observation: str, success: bool = False) -> dict[str, Any]:
        state_id = zlib.crc32(f"{self._task.task_id}\n{observation}".encode()) & 0x7FFFFFFF
        retrieved = list(self._retrieved)
        return {
            "task_id": self._task.task_id,
            "state_id": state_id,
            "success": bool(success),
            "retrieved_docids": retrieved,
        }


def _ranked(found: Sequence[Found], snippets: Sequence[str]):
    return enumerate(zip(found, snippets, strict=True), start=1)
