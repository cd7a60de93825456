"""Questions and relevance judgements in the formats in which they are published: BrowseComp-Plus, GAIA, HLE."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from mpo_jax.environments.json_lines import read_json_lines, text_field

log = logging.getLogger(__name__)


class Task(msgspec.Struct, frozen=True):
    """A question with its right answer.

    Attributes:
      task_id: unique in its file.
      question: what is asked.
      answer: what is right.
    """

    task_id: str
    question: str
    answer: str


def read_queries(path: Path | str) -> tuple[Task, ...]:
    """Reads lines of `{query_id, query, answer}`, as the decrypted BrowseComp-Plus has them; other fields are ignored.

    Args:
      path: of the JSON lines.

    Returns:
      The tasks in the file's order.

    Raises:
      ValueError: a field is missing or an id occurs twice (naming file, line and field), or there is no task.
    """
    return _read(path, ("query_id", "query", "answer"), needs="")


def read_gaia(path: Path | str) -> tuple[Task, ...]:
    """Reads GAIA's `metadata.jsonl`; tasks with a file beside the question are left out (logged): we read texts only.

    The answers of its test split are not public ("?"): such a file is refused. Arguments and errors as
    `read_queries`.
    """
    tasks = _read(path, ("task_id", "Question", "Final answer"), needs="file_name")
    if all(task.answer == "?" for task in tasks):
        raise ValueError(f"{path}: every Final answer is '?', the mark of the test split, whose answers are not public")
    return tasks


def read_hle(path: Path | str) -> tuple[Task, ...]:
    """Reads Humanity's Last Exam as JSON lines; questions with an image are left out (logged): we read texts only.

    Arguments and errors as `read_queries`.
    """
    return _read(path, ("id", "question", "answer"), needs="image")


QUESTION_FORMATS: dict[str, Callable[[Path | str], tuple[Task, ...]]] = {
    "queries": read_queries,
    "gaia": read_gaia,
    "hle": read_hle,
}


def read_qrels(path: Path | str) -> dict[str, frozenset[str]]:
    """Reads relevance judgements in TREC's format, "query_id iteration docid relevance" a line.

    Args:
      path: of the file, such as BrowseComp-Plus's `qrel_evidence.txt`.

    Returns:
      The ids of the relevant documents (relevance above 0) of each query.

    Raises:
      ValueError: the file cannot be read, or a line does not have these four fields.
    """
    relevant: dict[str, set[str]] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not (fields := line.split()):
            continue
        if len(fields) != 4 or not fields[3].removeprefix("-").isdecimal():
            raise ValueError(f"{path}, line {number}: {line!r}, expected: query_id iteration docid relevance")
        relevant.setdefault(fields[0], set())
        if int(fields[3]) > 0:
            relevant[fields[0]].add(fields[2])
    return {query_id: frozenset(docids) for query_id, docids in relevant.items()}


def recall(found: Collection[str], relevant: Collection[str]) -> float:
    """Share of the relevant documents that were found, |found ∩ relevant| / |relevant|.

    Args:
      found: ids of the documents that a search showed or that were opened.
      relevant: ids of the documents that are relevant.

    Returns:
      A number in 0..1; NaN where no document is relevant.
    """
    return len(set(found) & set(relevant)) / len(set(relevant)) if relevant else float("nan")


def mean_recall(found: Mapping[str, Sequence[Collection[str]]], qrels: Mapping[str, Collection[str]]) -> float:
    """Mean recall over queries with relevant documents, and over the episodes of each.

    Args:
      found: query id to what each of its episodes found.
      qrels: query id to its relevant documents.

    Returns:
      The mean; NaN where no query has a relevant document.
    """
    means = [sum(recall(x, qrels[q]) for x in runs) / len(runs) for q, runs in found.items() if qrels.get(q)]
    return sum(means) / len(means) if means else float("nan")


def _read(path: Path | str, names: tuple[str, str, str], needs: str) -> tuple[Task, ...]:
    """Tasks of the three fields named, without those whose field `needs` holds something that we cannot show."""
    tasks: dict[str, Task] = {}
    left_out = 0
    for place, record in read_json_lines(path):
        if needs and record.get(needs):
            left_out += 1
            continue
        task = Task(*(text_field(record, name, place) for name in names))
        if task.task_id in tasks:
            raise ValueError(f"{place}: {names[0]} {task.task_id!r} occurs a second time")
        tasks[task.task_id] = task
    if left_out:
        log.warning("%s: left out %d tasks whose %s is not empty; %d remain", path, left_out, needs, len(tasks))
    if not tasks:
        raise ValueError(f"{path}: holds no task that can be asked")
    return tuple(tasks.values())
