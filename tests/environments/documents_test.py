"""Indices over a user's documents, in memory and on disk."""

import json

import pytest

from mpo_jax.environments.documents import Document, DocumentIndex, read_documents

DOCUMENTS = [
    Document("doc 1", "the quick brown fox, ünder the bridge"),
    Document("2", "a slow brown dog. The dog sleeps."),
    Document("3", ""),
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"docid": d.docid, "text": d.text, "url": "x"}) + "\n" for d in DOCUMENTS))
    return path


def test_search_ranks_by_bm25():
    index = DocumentIndex(DOCUMENTS)
    found = index.search("brown dog")
    assert [hit.docid for hit in found] == ["2", "doc 1"] and found[0].score > found[1].score > 0
    assert found[0].text == DOCUMENTS[1].text
    assert [hit.docid for hit in index.search("brown dog", 1)] == ["2"]
    assert [hit.docid for hit in index.search("ÜNDER")] == ["doc 1"]


@pytest.mark.parametrize("query", ["", "??", "NOT", "zzz", "text:zzz", '"', "(", "x" * 10_000, "z " * 10_000, "\0"])
def test_any_query_is_words(query):
    assert DocumentIndex(DOCUMENTS).search(query) == []


def test_get():
    index = DocumentIndex(DOCUMENTS)
    assert [index.get(d.docid) for d in DOCUMENTS] == DOCUMENTS
    assert index.get("doc") is None and index.get("") is None
    assert index.num_documents == 3


def test_an_index_on_disk_is_built_once(path, tmp_path, monkeypatch):
    first = DocumentIndex.of_file(path, tmp_path / "cache")
    assert [hit.docid for hit in first.search("dog")] == ["2"]
    with monkeypatch.context() as patch:
        patch.setattr("mpo_jax.environments.documents._build", None)
        again = DocumentIndex.of_file(path, tmp_path / "cache")
    assert again.search("brown dog") == first.search("brown dog") and again.get("3") == DOCUMENTS[2]
    path.write_text(json.dumps({"docid": "9", "text": "a cat"}) + "\n")
    assert [hit.docid for hit in DocumentIndex.of_file(path, tmp_path / "cache").search("cat")] == ["9"]
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_build_that_fails_leaves_nothing(path, tmp_path):
    path.write_text(path.read_text() + '{"docid": "4"}\n')
    with pytest.raises(ValueError, match=r"documents\.jsonl, line 4: text is None"):
        DocumentIndex.of_file(path, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_faults_are_named(path, tmp_path):
    with pytest.raises(ValueError, match="docid '2' occurs a second time"):
        DocumentIndex([DOCUMENTS[1], DOCUMENTS[1]])
    with pytest.raises(ValueError, match="no documents"):
        DocumentIndex([])
    with pytest.raises(ValueError, match=r"absent\.jsonl: cannot be read"):
        DocumentIndex.of_file(tmp_path / "absent.jsonl", tmp_path / "cache")
    with pytest.raises(ValueError, match=r"absent\.jsonl: cannot be read"):
        list(read_documents(tmp_path / "absent.jsonl"))
