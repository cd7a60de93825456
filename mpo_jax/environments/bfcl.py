"""Multi-turn function calling of the Berkeley Function-Calling Leaderboard: scripted users, real state."""

import importlib.util
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium

from mpo_jax.environments.adapting import choose, require
from mpo_jax.environments.text import AnyText
from mpo_jax.environments.tools import describe_tools, read_turn
from mpo_jax.models.tool_calls import ToolCall

CATEGORIES = ("base", "long_context", "miss_param")  # "miss_func" changes the tools within an episode: not supported


class Bfcl(gymnasium.Env):
    """Multi-turn tasks of BFCL, from the package `bfcl-eval` (its data, simulated services and checker).

    See https://gorilla.cs.berkeley.edu/blogs/13_bfcl_v3_multi_turn.html. A message with tool calls has them carried
    out; one without hands over to the user, who says the next of a few scripted messages. After the last the package's
    checker compares the services' states with those of the gold calls: reward 1 or 0.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own convention

    def __init__(self, category: str = "base", calls_limit: int = 20):
        """Reads the tasks.

        Args:
          category: one of `CATEGORIES`.
          calls_limit: messages with calls that one message of the user may take, as in the leaderboard.

        Raises:
          ImportError: the package is not installed.
          ValueError: there is no such category.
        """
        require("bfcl_eval", "bfcl-eval")
        if category not in CATEGORIES:
            raise ValueError(f"category is {category!r}, expected one of {CATEGORIES}")
        from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING as DOCS
        from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils

        self._checker, self._executor, self._docs = multi_turn_checker, multi_turn_utils, DOCS
        self._data = Path(importlib.util.find_spec("bfcl_eval").origin).with_name("data")
        name = f"BFCL_v4_multi_turn_{category}.json"
        self._tasks = _read_lines(self._data / name)
        self._gold = {row["id"]: row["ground_truth"] for row in _read_lines(self._data / "possible_answer" / name)}
        self._limit, self._player = calls_limit, f"policy_{uuid.uuid4().hex}"
        self.observation_space, self.action_space = AnyText(), AnyText()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict[str, Any]]:
        """Starts a task; `options={"task": n}` is the n-th, else one is drawn.

        Returns:
          The tools and the user's first message, and info: task_id, success.
        """
        super().reset(seed=seed)
        self._task = choose(self._tasks, options, self.np_random)
        self._forget()
        schemas = [doc for name in self._task["involved_classes"] for doc in _read_lines(self._doc(name))]
        schemas = [doc for doc in schemas if doc["name"] not in self._task.get("excluded_function", ())]
        self._known = {doc["name"]: list(doc["parameters"]["properties"]) for doc in schemas}
        self._done: list[list[list[str]]] = [[]]  # of each message of the user: of each message of ours: its calls
        return f"{describe_tools(schemas)}\n\n{self._user_says()}", self._info(False)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carries out a message's calls, or hands over to the user where it has none."""
        try:
            _, calls = read_turn(action)
            texts = [self._write(call) for call in calls]
        except ValueError as error:
            return self._after(str(error))
        if texts:
            self._done[-1].append(texts)
            return self._after("\n".join(self._run(texts)))
        if len(self._done) < len(self._task["question"]):
            self._done.append([])
            return self._user_says(), 0.0, False, False, self._info(False)
        success = self._check()
        self._forget()
        return "solved" if success else "not solved", float(success), True, False, self._info(success)

    def _after(self, observation: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return observation, 0.0, False, len(self._done[-1]) >= self._limit, self._info(False)

    def _write(self, call: ToolCall) -> str:
        """The call as the package evaluates it: a known name, and literals that JSON can hold, nothing else."""
        if call.name not in self._known:
            raise ValueError(f"there is no tool {call.name!r}")
        if unknown := [name for name in call.arguments if name not in self._known[call.name]]:
            raise ValueError(f"{call.name} has no argument {unknown[0]!r}, expected some of {self._known[call.name]}")
        return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"

    def _run(self, calls: Sequence[str]) -> list[str]:
        task = self._task
        results, _ = self._executor.execute_multi_turn_func_call(
            list(calls),
            task["initial_config"],
            task["involved_classes"],
            self._player,
            task["id"],
            "long" in task["id"],
        )
        return results

    def _check(self) -> bool:
        gold, category = self._gold[self._task["id"]], self._task["id"].rsplit("_", 1)[0]
        found = self._checker.multi_turn_checker(self._done, gold, self._task, category, self._player)
        relevant = self._checker.multi_turn_irrelevance_checker(self._done, gold)
        return bool(found["valid"] and relevant["valid"])

    def _forget(self) -> None:
        """Drops the services' states, which the package keeps among its module's globals."""
        for name in [name for name in vars(self._executor) if name.startswith(self._player)]:
            delattr(self._executor, name)

    def _user_says(self) -> str:
        return "\n".join(message["content"] for message in self._task["question"][len(self._done) - 1])

    def _doc(self, service: str) -> Path:
        return self._data / "multi_turn_func_doc" / self._docs[service]

    def _info(self, success: bool) -> dict[str, Any]:
        return {"task_id": self._task["id"], "success": success, "user_messages": len(self._done)}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
