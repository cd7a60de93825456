"""What an evaluation over one's own documents says of retrieval."""

import types

import pytest

from experiments.run_files import retrieved


def played(task_id, *docids):
    return types.SimpleNamespace(task_id=task_id, metadata={"retrieved_docids": list(docids)})


def test_recall_is_a_mean_over_judged_queries_or_absent():
    episodes = [played("a", "1", "2"), played("a"), played("b", "9")]
    # a: {1, 3} are relevant, found are half of them and none; b was not judged.
    assert retrieved(episodes, {"a": {"1", "3"}, "b": set()}) == {"recall": [pytest.approx((0.5 + 0.0) / 2)]}
    assert retrieved(episodes, {"b": set()}) == retrieved(episodes, {}) == {}
