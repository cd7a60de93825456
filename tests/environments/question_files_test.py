"""Question files and judgements as they are published, and every fault named."""

import json
import math

import pytest

from mpo_jax.environments.question_files import (
    Task,
    mean_recall,
    read_gaia,
    read_hle,
    read_qrels,
    read_queries,
    recall,
)


@pytest.fixture
def write(tmp_path):
    def lines(*records):
        path = tmp_path / "file.jsonl"
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
        return path

    return lines


def test_queries(write):
    path = write(
        {"query_id": 7, "query": "who?", "answer": "me", "gold_docs": []},
        "",
        {"query_id": "8", "query": "é", "answer": 3},
    )
    assert read_queries(path) == (Task("7", "who?", "me"), Task("8", "é", "3"))


def test_gaia_leaves_out_tasks_with_files(write, caplog):
    task = {"task_id": "a-1", "Question": "how many?", "Level": 1, "Final answer": "17", "file_name": ""}
    path = write(task, task | {"task_id": "a-2", "file_name": "a.xlsx"})
    assert read_gaia(path) == (Task("a-1", "how many?", "17"),)
    assert "left out 1 tasks whose file_name is not empty; 1 remain" in caplog.text


def test_gaia_without_answers_is_refused(write):
    task = {"task_id": "a-1", "Question": "how many?", "Level": 1, "Final answer": "?", "file_name": ""}
    with pytest.raises(ValueError, match="test split"):
        read_gaia(write(task))


def test_hle_leaves_out_images(write):
    task = {
        "id": "66e8",
        "question": "x?",
        "answer": "C",
        "answer_type": "multipleChoice",
        "image": "",
        "image_preview": None,
    }
    assert read_hle(write(task, task | {"id": "66e9", "image": "data:image/png;base64,AAAA"})) == (
        Task("66e8", "x?", "C"),
    )


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"query_id": 1, "query": "q"}], r"line 1: answer is None, expected a text; the fields are query_id, query"),
        ([{"query_id": 1, "query": ["q"], "answer": "a"}], r"line 1: query is \['q'\]"),
        ([{"query_id": True, "query": "q", "answer": "a"}], r"query_id is True"),
        ([{"query_id": 1, "query": " ", "answer": "a"}], r"query is empty"),
        ([{"query_id": 1, "query": "q", "answer": "a"}] * 2, r"line 2: query_id '1' occurs a second time"),
        (['{"query_id": NaN, "query": "q", "answer": "a"}'], r"line 1: query_id is nan, expected a text"),
        (['{"query_id": 1, "query": "\\ud800", "answer": "a"}'], r"line 1: query is not all text: .*surrogates"),
        (['{"query_id": ' + "9" * 5_000 + "}"], r"line 1: no JSON: .*digits"),
        (["{"], r"line 1: no JSON"),
        (["[" * 100_000], r"line 1: no JSON"),
        (["[1]"], r"line 1: a list, expected an object"),
        ([], r"holds no task"),
    ],
)
def test_faults_are_named(write, records, message):
    with pytest.raises(ValueError, match=rf"file\.jsonl.*{message}"):
        read_queries(write(*records))


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"query_id": "\xe9"}\n')
    for name in ("absent.jsonl", "latin.jsonl"):
        for read in (read_queries, read_qrels):
            with pytest.raises(ValueError, match=rf"{name}: cannot be read"):
                read(tmp_path / name)


def test_qrels(tmp_path):
    path = tmp_path / "qrel.txt"
    path.write_text("7 0 d1 1\n7 Q0 d2\t2\n\n7 0 d3 0\n8 0 d1 0\n")
    assert read_qrels(path) == {"7": {"d1", "d2"}, "8": set()}
    path.write_text("7 0 d1 ²\n")
    with pytest.raises(ValueError, match=r"qrel\.txt, line 1: '7 0 d1 ²', expected: query_id iteration"):
        read_qrels(path)
    path.write_text("7 0 d1 1\n7 d1 1\n")
    with pytest.raises(ValueError, match=r"qrel\.txt, line 2: '7 d1 1', expected: query_id iteration docid relevance"):
        read_qrels(path)


def test_recall():
    assert recall(["d1", "d9", "d1"], ["d1", "d2"]) == 0.5  # one of two; twice is once
    assert math.isnan(recall(["d1"], []))
    qrels = {"7": {"d1", "d2"}, "8": set(), "9": {"d3"}}
    # Query 7: (1/2 + 2/2)/2 = 3/4; query 8 has nothing to find; query 9: 0. Mean (3/4 + 0)/2.
    assert mean_recall({"7": [["d1"], ["d1", "d2"]], "8": [["d1"]], "9": [[]], "?": [[]]}, qrels) == 0.375
    assert math.isnan(mean_recall({"8": [[]]}, qrels))
