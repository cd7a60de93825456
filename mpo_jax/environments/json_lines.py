"""Files of JSON lines: every fault names the file, the line and the field."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def read_json_lines(path: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads a file of one JSON object a line; empty lines are passed over.

    Args:
      path: of the file, in UTF-8.

    Yields:
      Where the object stands ("queries.jsonl, line 3"), and the object.

    Raises:
      ValueError: the file cannot be read, or a line holds no JSON object.
    """
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield place, _parse(line, place)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def text_field(record: Mapping[str, Any], name: str, place: str, *, may_be_empty: bool = False) -> str:
    """Takes a text out of a record; numbers count as texts, as ids often are.

    Raises:
      ValueError: it is absent, of another type, empty, or holds half a character; the message names its place.
    """
    value = record.get(name)
    infinite = isinstance(value, float) and not math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or infinite:
        has = ", ".join(map(str, record))
        raise ValueError(f"{place}: {name} is {value!r}, expected a text; the fields are {has}")
    if not str(value).strip() and not may_be_empty:
        raise ValueError(f"{place}: {name} is empty, expected a text")
    try:
        str(value).encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise ValueError(f"{place}: {name} is not all text: {error}") from error
    return str(value)


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: no JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: a {type(record).__name__}, expected an object")
    return record
