"""A user's own documents, searched by BM25: in memory, or in an index on disk that is built once."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import tantivy

from mpo_jax.environments.json_lines import read_json_lines, text_field

QUERY_WORDS = 64  # the rest of a longer query is ignored
STAMP = "source.txt"  # what an index on disk was built of


class Document(msgspec.Struct, frozen=True):
    """A text with a name.

    Attributes:
      docid: unique among the documents.
      text: all of it.
    """

    docid: str
    text: str


class Found(msgspec.Struct, frozen=True):
    """A document that matches a query.

    Attributes:
      docid: of the document.
      score: BM25; comparable within one query.
      text: the document's.
    """

    docid: str
    score: float
    text: str


def read_documents(path: Path | str) -> Iterator[Document]:
    """Reads lines of `{docid, text}`; other fields are ignored.

    Args:
      path: of the JSON lines.

    Yields:
      The documents in the file's order.

    Raises:
      ValueError: a field is missing; the message names file, line and field.
    """
    for place, record in read_json_lines(path):
        yield Document(text_field(record, "docid", place), text_field(record, "text", place, may_be_empty=True))


class DocumentIndex:
    """Documents with a BM25 index over their words, as tantivy has it."""

    def __init__(self, documents: Iterable[Document], folder: Path | None = None):
        """Indexes the documents.

        Args:
          documents: what can be found.
          folder: an empty one to keep the index in; in memory by default.

        Raises:
          ValueError: an id occurs twice, or there is no document.
        """
        schema = tantivy.SchemaBuilder()
        schema.add_text_field("docid", stored=True, tokenizer_name="raw")
        schema.add_text_field("text", stored=True, tokenizer_name="default")
        self._index = tantivy.Index(schema.build(), path=None if folder is None else str(folder))
        writer, seen = self._index.writer(heap_size=128_000_000, num_threads=1), set()
        try:
            for document in documents:
                if document.docid in seen:
                    raise ValueError(f"docid {document.docid!r} occurs a second time")
                seen.add(document.docid)
                writer.add_document(tantivy.Document(docid=document.docid, text=document.text))
            if not seen:
                raise ValueError("no documents, expected at least one")
            writer.commit()
        finally:
            writer.wait_merging_threads()  # nothing is written to the folder after this
        self._open(self._index)

    def _open(self, index: tantivy.Index) -> None:
        self._index = index
        index.reload()
        self._searcher = index.searcher()
        self.num_documents: int = self._searcher.num_docs

    @classmethod
    def of_file(cls, path: Path | str, cache: Path | str | None = None) -> "DocumentIndex":
        """Indexes a file of JSON lines.

        Args:
          path: of the file.
          cache: a folder for indices. One that was built there of the same file (its path, size and time) is opened
            again; without a cache the index is built anew, in memory, and so are all texts.

        Returns:
          The index.

        Raises:
          ValueError: as `read_documents`.
        """
        if cache is None:
            return cls(read_documents(path))
        try:
            stat = os.stat(path)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error}") from error
        stamp = f"{Path(path).resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n"
        folder = Path(cache) / hashlib.sha256(stamp.encode()).hexdigest()[:16]
        if not (folder / STAMP).exists():
            _build(folder, stamp, read_documents(path))
        opened = cls.__new__(cls)
        opened._open(tantivy.Index.open(str(folder)))
        return opened

    def search(self, query: str, limit: int = 5) -> list[Found]:
        """Finds documents by BM25.

        Args:
          query: any text at all; its words are looked for, operators are words too.
          limit: most documents to return.

        Returns:
          The best first; none where no word of the query occurs.
        """
        terms = re.findall(r"\w+", query.lower())[:QUERY_WORDS]
        if not terms or limit < 1:
            return []
        parsed = self._index.parse_query(" ".join(f'"{term}"' for term in terms), ["text"])  # OR, NOT stay words
        hits = self._searcher.search(parsed, limit, count=False).hits
        found = ((score, self._searcher.doc(address)) for score, address in hits)
        return [Found(document["docid"][0], float(score), document["text"][0]) for score, document in found]

    def get(self, docid: str) -> Document | None:
        """The document of that id, or None."""
        query = tantivy.Query.term_query(self._index.schema, "docid", docid)
        hits = self._searcher.search(query, 1, count=False).hits
        return Document(docid, self._searcher.doc(hits[0][1])["text"][0]) if hits else None


def _build(folder: Path, stamp: str, documents: Iterable[Document]) -> None:
    """Builds an index beside its place and moves it there whole: processes that start together never collide."""
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        DocumentIndex(documents, beside)
        (beside / STAMP).write_text(stamp)
        try:
            beside.rename(folder)
        except OSError:
            if not (folder / STAMP).exists():  # else another process was first
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
