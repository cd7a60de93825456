"""The corpus: what is packaged, and what a search finds."""

import pytest

from mpo_jax.environments.corpus import Corpus, Document, factbook

BORDERS = Document("Freedonia", "Geography", (("area total", "5 sq km"), ("border countries", "Sylvania 3 km")))
GOVERNMENT = Document(
    "Sylvania", "Government", (("capital name", "Vlatzky"), ("capital note", "the capital has moved"))
)


def test_packaged_factbook():
    corpus = factbook()
    assert factbook() is corpus
    assert len({document.country for document in corpus.documents}) == 249
    assert len({document.title for document in corpus.documents}) == len(corpus.documents) == 2449
    texts = [text for document in corpus.documents for _, text in document.fields]
    assert all(text and text.isascii() and text == " ".join(text.split()) and " ; " not in text for text in texts)


def test_finds_titles_field_names_and_texts():
    corpus = Corpus([BORDERS, GOVERNMENT])
    assert [hit.document for hit in corpus.search("government")] == [GOVERNMENT]
    assert [hit.document for hit in corpus.search("border")] == [BORDERS]
    assert {hit.document for hit in corpus.search("sylvania")} == {BORDERS, GOVERNMENT}
    assert len(corpus.search("sylvania", limit=1)) == 1


def test_best_field_has_most_query_words_names_first_then_brevity():
    corpus = Corpus([BORDERS, GOVERNMENT])
    assert corpus.search("freedonia area")[0].field == 0
    assert corpus.search("freedonia sylvania")[0].field == 1
    assert corpus.search("capital sylvania government")[0].field == 0  # both names say capital; three words beat six
    assert corpus.search("capital moved")[0].field == 1


@pytest.mark.parametrize(
    "query", ["", " ", "\0", "é ☃", "AND OR NOT", 'a:b^3 ~"', "(((", "title:[a TO z]", "*", "x " * 9999]
)
def test_no_query_raises(query):
    assert isinstance(factbook().search(query, 3), list)


def test_operators_are_words():
    assert factbook().search("france NOT") == factbook().search("france not")
    assert factbook().search("france", 0) == []
