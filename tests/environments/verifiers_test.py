"""Environments of `verifiers`, of whichever generation is installed: a scripted policy reaches the rubric's reward."""

import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import textwrap

import pytest

from mpo_jax.environments.isolated import IsolatedEnvironment
from mpo_jax.environments.verifiers import Verifiers
from mpo_jax.models.tool_calls import ToolCall, render

FOLDER = pathlib.Path(__file__).parents[2] / ".venv-verifiers"
HERE = importlib.util.find_spec("verifiers") is not None
CLASSIC = HERE and int(importlib.metadata.version("verifiers").split(".")[1]) < 2  # 0.1.x

ADDING = """
    import verifiers as vf
    from datasets import Dataset

    def add(a: int, b: int) -> int:
        "Adds two numbers."
        return a + b

    def exact(completion, answer, **_):
        last = completion[-1]
        return float((last["content"] if isinstance(last, dict) else last.content) == answer)

    def load_environment(size=3):
        data = Dataset.from_list([{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(size)])
        return vf.ToolEnv(tools=[add], dataset=data, rubric=vf.Rubric(funcs=[exact]), system_prompt="Add.", max_turns=5)
"""


@pytest.mark.slow
@pytest.mark.skipif(not CLASSIC, reason="needs verifiers 0.1.x, which is 0.6 GB: in an environment of its own")
def test_an_environment_with_a_tool(tmp_path, monkeypatch):
    (tmp_path / "adding_numbers.py").write_text(textwrap.dedent(ADDING))
    monkeypatch.syspath_prepend(tmp_path)
    environment = Verifiers("adding-numbers", {"size": 3})
    try:
        prompt, info = environment.reset(options={"task": 2})
        assert '"name": "add"' in prompt and prompt.endswith("2 + 1?") and info["task_id"] == "adding-numbers/2"
        assert environment.step(render(ToolCall("add", {"a": 2, "b": 1})))[:4] == ("3", 0.0, False, False)
        text, reward, terminated, truncated, info = environment.step("3")
        assert (text, reward, terminated, truncated) == ("reward 1", 1.0, True, False)
        assert info["success"] is True and info["metric_exact"] == 1.0
        environment.reset(options={"task": 1})
        assert environment.step("9")[1:3] == (0.0, True)
    finally:
        environment.close()
        sys.modules.pop("adding_numbers", None)


SUMS = """
    import asyncio, json, urllib.request
    import verifiers.v1 as vf
    from verifiers.v1.runtimes import ProgramResult

    class Data(vf.TaskData):
        answer: str

    class Sum(vf.Task[Data]):
        @vf.reward
        async def exact(self, trace) -> float:
            return float(trace.last_reply == self.data.answer)

    class Sums(vf.Taskset[Sum]):
        def load(self):
            return [Sum(Data(prompt=f"{i} + 1?", answer=str(i + 1)), self.config.task) for i in range(3)]

    class Doubting(vf.Harness):
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
            messages = [{"role": "user", "content": data.prompt}]
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}

            def ask():
                body = json.dumps({"model": ctx.model, "messages": messages}).encode()
                request = urllib.request.Request(f"{endpoint}/chat/completions", body, headers)
                return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

            messages += [await asyncio.to_thread(ask), {"role": "user", "content": "Sure?"}]
            await asyncio.to_thread(ask)
            return ProgramResult(0, "", "")

    __all__ = ["Sums", "Doubting"]
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """In a process of its own, as the programs run it, which finds the package and the tasks."""
    (tmp_path / "sums.py").write_text(textwrap.dedent(SUMS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(FOLDER)]))
    environment = IsolatedEnvironment("mpo_jax.environments.verifiers:Verifiers", {"environment": "sums"})
    yield environment
    environment.close()


@pytest.mark.slow
@pytest.mark.skipif(not (FOLDER / "verifiers").exists(), reason="needs make .venv-verifiers/.installed")
def test_a_taskset_with_a_harness_of_its_own(environment):
    text, info = environment.reset(options={"task": 1})
    assert (text, info["task_id"]) == ("1 + 1?", "sums/1")
    assert environment.step("3")[:4] == ("Sure?", 0.0, False, False)
    text, reward, terminated, truncated, info = environment.step("2")
    assert (text, reward, terminated, truncated, info["success"]) == ("reward 1", 1.0, True, False, True)
    environment.reset(options={"task": 2})
    environment.step("3")
    assert environment.step("4")[1:3] == (0.0, True)
