"""Environments of `verifiers`, of whichever generation is installed: a scripted policy reaches the rubric's reward."""

import sys
import textwrap

import pytest

from mpo_jax.environments.verifiers import Verifiers
from mpo_jax.models.tool_calls import ToolCall, render

verifiers = pytest.importorskip("verifiers", reason="needs verifiers, which is 0.6 GB: in an environment of its own")
CLASSIC = hasattr(verifiers, "load_environment")

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
@pytest.mark.skipif(not CLASSIC, reason="this is generation 0.1.x's way; a later one is installed")
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
