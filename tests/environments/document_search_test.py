"""The search agent over a user's documents: two scripted policies reach the known reward, and runs are written."""

import json

import pytest
from gymnasium.utils.env_checker import check_env

from mpo_jax.environments.document_search import (
    TOOL_CALLS,
    WORDS,
    DocumentSearchEnvironment,
    first_words,
    read_calls,
    read_words,
)
from mpo_jax.environments.documents import Document, DocumentIndex
from mpo_jax.environments.question_files import Task
from mpo_jax.environments.run_files import run_record, write_run
from mpo_jax.environments.tools import MAXIMAL_CALLS
from mpo_jax.models.tool_calls import ToolCall, render


def write_call(name, arguments):
    return render(ToolCall(name, arguments))


INDEX = DocumentIndex(
    [
        Document("d1", "Freedonia is a country.\nIts capital is Glory City and its anthem is long."),
        Document("d2", "Glory City has a mayor, Rufus T. Firefly."),
        Document("d3", "Sylvania is a country. Its capital is Ambass."),
    ]
)
TASKS = (
    Task("q1", "Who is mayor of the capital of Freedonia?", "Rufus T. Firefly"),
    Task("q2", "capital of Sylvania?", "Ambass"),
)


def started(task=0, **settings):
    environment = DocumentSearchEnvironment(TASKS, INDEX, **settings)
    return environment, *environment.reset(options={"task": task})


def play(environment, actions):
    return [environment.step(action) for action in actions]


def test_the_interface_is_gymnasiums():
    check_env(DocumentSearchEnvironment(TASKS, INDEX), skip_render_check=True)


def test_a_policy_with_tool_calls_is_rewarded():
    environment, prompt, info = started()
    assert prompt.endswith(TASKS[0].question) and '"get_document"' in prompt
    assert info["task_id"] == "q1" and info["success"] is False and info["retrieved_docids"] == []
    actions = [
        "<think>where?</think>" + write_call("search", {"query": "capital Freedonia"}),
        write_call("search", {"query": "mayor Glory City"}) + write_call("get_document", {"docid": "d2"}),
        "Explanation: [d2]\nExact Answer: Rufus T. Firefly\nConfidence: 100%",
    ]
    (first, *rest), (second, *_), (third, reward, terminated, truncated, info) = play(environment, actions)
    hits = json.loads(first)
    assert [hit["docid"] for hit in hits] == ["d1", "d3"] and set(hits[0]) == {"docid", "score", "snippet"}
    assert rest[:3] == [0.0, False, False]
    assert second.splitlines()[1] == "Glory City has a mayor, Rufus T. Firefly."
    assert (third, reward, terminated, truncated) == ("correct", 1.0, True, False)
    assert info["success"] is True and info["end_reason"] == "answer"
    assert info["retrieved_docids"] == ["d1", "d3", "d2"]
    with pytest.raises(RuntimeError, match="reset"):
        environment.step("x")


def test_a_policy_with_words_is_rewarded():
    environment, prompt, _ = started(actions=WORDS, snippet=lambda text: first_words(text, 4))
    assert prompt == TASKS[0].question
    shown, opened, nothing, other, last = play(
        environment, ["search capital freedonia", "open 1", "open 9", "get_document d2", "answer rufus t firefly"]
    )
    assert shown[0] == "1 d1: Freedonia is a country.\n2 d3: Sylvania is a country."
    assert opened[0] == INDEX.get("d1").text and nothing[0] == "no such document" and "Firefly" in other[0]
    assert last[1:4] == (1.0, True, False)


@pytest.mark.parametrize("action", ["answer ambass", "answer", "answer rufus"])
def test_wrong_answers_end_without_reward(action):
    environment, *_ = started(actions=WORDS)
    observation, reward, terminated, _, info = environment.step(action)
    assert (observation, reward, terminated, info["success"]) == ("wrong", 0.0, True, False)


def test_the_turn_limit_truncates():
    environment, *_ = started(actions=WORDS, turn_limit=2)
    assert play(environment, ["search x", "nonsense"])[1][:4] == ("unknown action", 0.0, False, True)
    environment.reset()
    assert play(environment, ["search x", "answer x"])[1][2:4] == (True, False)


@pytest.mark.parametrize(
    ("action", "observation"),
    [
        (write_call("get_document", {"docid": "zz"}), "no such document"),
        (write_call("get_document", {}), "no such document"),
        (write_call("rm", {"path": "/"}), "unknown tool 'rm'"),
        (write_call("search", {"query": ""}), "[]"),
        (write_call("search", {"query": [1]}), "[]"),
        ("<tool_call>{", "tool call 1 is no JSON: Expecting property name enclosed in double quotes"),
        (write_call("search", {}) * 17, f"17 tool calls in one message, expected at most {MAXIMAL_CALLS}"),
    ],
)
def test_calls_that_fail_cost_a_turn(action, observation):
    environment, *_ = started()
    assert environment.step(action)[:4] == (observation, 0.0, False, False)


def test_grader_and_draws():
    asked = []
    environment, *_ = started(grader=lambda *x: asked.append(x) or True)
    assert environment.step("hello")[1] == 1.0 and asked == [(TASKS[0].question, "hello", TASKS[0].answer)]
    drawn = {environment.reset(seed=seed)[1]["task_id"] for seed in range(20)}
    assert drawn == {"q1", "q2"}
    assert environment.reset(seed=3)[0] == environment.reset(seed=3)[0]


def test_first_words():
    assert first_words("  a b\n c d", 3) == "  a b\n c" and first_words("a", 3) == "a" and first_words("", 3) == ""


def test_formats():
    assert read_words("OPEN 2") == [ToolCall("get_document", {"rank": "2"})]
    with pytest.raises(ValueError, match="unknown action"):
        read_words("hello")
    assert read_calls(" hi ") == [ToolCall("answer", {"text": "hi"})]


def test_a_run_is_written_as_the_evaluator_reads_it(tmp_path):
    """Its fields: query_id, tool_call_counts, status, retrieved_docids, and result, which ends in the answer."""
    actions = [write_call("search", {"query": "x"}) + write_call("get_document", {"docid": "d2"}), "Exact Answer: y"]
    actions.insert(1, "<tool_call>oops")
    record = run_record(
        "q1", actions, ["q", "hits", "no JSON", "wrong"], ["d2", "d1", "d2"], actions_as=TOOL_CALLS, model="m"
    )
    path = write_run(tmp_path / "runs", record, "00000000/001")
    assert path.name == "run_00000000-001.json" and json.loads(path.read_text()) == record
    assert record["query_id"] == "q1" and record["status"] == "completed"
    assert record["tool_call_counts"] == {"search": 1, "get_document": 1}
    assert record["retrieved_docids"] == ["d2", "d1"]
    assert [entry["type"] for entry in record["result"]] == ["tool_call", "tool_call", "output_text"]
    assert record["result"][0]["arguments"] == '{"query": "x"}' and record["result"][0]["output"] == "hits"
    assert record["result"][-1]["output"] == "Exact Answer: y"
    cut = run_record("q1", actions[:1], ["q", "hits"], [], actions_as=TOOL_CALLS, model="m")
    assert cut["status"] == "incomplete"
