"""The CIA World Factbook as a searchable corpus: one document a country and section, BM25 over all of them."""

import functools
import json
import lzma
import pathlib
import re
from collections.abc import Iterable, Sequence

import msgspec
import tantivy

DATA = pathlib.Path(__file__).with_name("data")
QUERY_WORDS = 32  # the rest of a longer query is ignored


class Document(msgspec.Struct, frozen=True):
    """One section of the Factbook on one country.

    Attributes:
      country: the country's name.
      section: "Geography", "Government", ….
      fields: (name, text) pairs in the order of the Factbook.
    """

    country: str
    section: str
    fields: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        """What a hit is headed with: country, then section."""
        return f"{self.country} {self.section}"


class Hit(msgspec.Struct, frozen=True):
    """A document that matches a query.

    Attributes:
      document: the document.
      field: the index of the field that matches the query best.
    """

    document: Document
    field: int


def words(text: str) -> list[str]:
    """Splits a text into lower-case words of ASCII letters and digits, much as the index does.

    Args:
      text: any text.

    Returns:
      Its words, in order.
    """
    return re.findall(r"[a-z0-9]+", text.lower())


class Corpus:
    """Documents with an index in memory: BM25 as tantivy has it, noisy as real search is."""

    def __init__(self, documents: Iterable[Document]):
        """Indexes the documents.

        Args:
          documents: what can be found.
        """
        self.documents: Sequence[Document] = tuple(documents)
        schema = tantivy.SchemaBuilder()
        schema.add_integer_field("number", stored=True)
        schema.add_text_field("title")
        schema.add_text_field("text")
        self._index = tantivy.Index(schema.build())
        writer = self._index.writer(heap_size=64_000_000, num_threads=1)
        for number, document in enumerate(self.documents):
            text = "\n".join(f"{name} {text}" for name, text in document.fields)
            writer.add_document(tantivy.Document(number=number, title=document.title, text=text))
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()
        self._searcher = self._index.searcher()
        self._field_words = [
            [(frozenset(words(name)), frozenset(words(text))) for name, text in document.fields]
            for document in self.documents
        ]

    def search(self, query: str, limit: int = 10) -> list[Hit]:
        """Finds documents by BM25 over titles and texts.

        Args:
          query: any text at all; only its words of ASCII letters and digits count.
          limit: most hits to return.

        Returns:
          Hits, best first; none where no word of the query occurs or the limit is not positive.
        """
        terms = words(query)[:QUERY_WORDS]
        if not terms or limit < 1:
            return []
        # Quoted, so that OR, NOT and IN stay words.
        parsed = self._index.parse_query(" ".join(f'"{term}"' for term in terms), ["title", "text"])
        found = self._searcher.search(parsed, limit, count=False).hits
        numbers = [self._searcher.doc(address)["number"][0] for _, address in found]
        return [Hit(self.documents[number], self._best_field(number, frozenset(terms))) for number in numbers]

    def _best_field(self, number: int, terms: frozenset[str]) -> int:
        """Picks the field with the most words of the query; a word in its name counts twice, one in its text once.

        Words of the document's title count for nothing, as they hold for every field alike. Of equals, the field
        with the fewest words, which the query covers most of, and then the earliest.
        """
        terms = terms.difference(words(self.documents[number].title))

        def merit(index: int) -> tuple[int, int, int]:
            name, text = self._field_words[number][index]
            return 2 * len(terms & name) + len(terms & text - name), -len(name) - len(text), -index

        return max(range(len(self._field_words[number])), key=merit)


@functools.cache
def factbook() -> Corpus:
    """Loads the packaged Factbook, once a process.

    Returns:
      Its corpus: 249 countries and territories, ten sections each at most.
    """
    lines = lzma.decompress((DATA / "factbook.jsonl.xz").read_bytes()).splitlines()
    return Corpus(msgspec.convert(json.loads(line), Document) for line in lines)
