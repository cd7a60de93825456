"""Tables of scores as Parquet, CSV or JSON lines: rows in, rows out, a row at a time."""

import csv
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]

TEXT = ("level", "episode", "task", "agent")  # columns of names; all others hold numbers
INDEX = ("step", "token", "token_id", "num_tokens", "truncated", "reward")  # columns of numbers that are no scores
BATCH = 8_192  # rows of a Parquet file that are held until they are written


def read_table(path: Path | str) -> Iterator[Row]:
    """Yields the rows of a table; the ending of its name says which kind it is.

    Numbers of a CSV file are numbers again (in all columns but those of `TEXT`), empty cells None.

    Raises:
      ValueError: no such file, another ending, or a damaged line; the message names it.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    read = _kind(path, _READERS)
    try:
        yield from read(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def write_table(path: Path | str, columns: Mapping[str, type], rows: Iterable[Row]) -> int:
    """Writes rows as they come: beside the place, then moved there, so that the file is whole or not there.

    Args:
      path: ends in `.parquet`, `.csv` or `.jsonl`.
      columns: names and types (str, int, float); a cell may be missing or None in any row.
      rows: consumed one at a time.

    Returns:
      How many rows were written.

    Raises:
      ValueError: another ending.
    """
    path = Path(path)
    write = _kind(path, _WRITERS)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.unfinished")
    count = write(beside, columns, rows)
    beside.replace(path)
    return count


def episode_scores(path: Path | str) -> dict[str, dict[str, float]]:
    """Scores of episodes by episode and name: every numeric column of the rows whose level is "episode" or not given.

    Raises:
      ValueError: as `read_table` does, a row without an episode, or an episode that has two.
    """
    found: dict[str, dict[str, float]] = {}
    for row in read_table(path):
        if row.get("level") not in (None, "episode"):
            continue
        if row.get("episode") is None:
            raise ValueError(f"{path}: a row without an `episode`: {row}")
        if (name := str(row["episode"])) in found:
            raise ValueError(f"{path}: episode {name!r} has two rows")
        found[name] = {
            key: _number(path, row, key)
            for key, value in row.items()
            if key not in (*TEXT, *INDEX) and isinstance(value, int | float)
        }
    return found


def step_scores(path: Path | str, column: str) -> dict[str, dict[int, float]]:
    """One score of each step, by episode and index of the message, from the rows whose level is "step"; NaN is none.

    Raises:
      ValueError: as `read_table` does, no row has the column, one is not of numbers, or a step has two.
    """
    found: dict[str, dict[int, float]] = {}
    for row in read_table(path):
        if row.get("level") != "step" or row.get(column) is None:
            continue
        step, score = _number(path, row, "step"), _number(path, row, column)
        if row.get("episode") is None or not step.is_integer():
            raise ValueError(f"{path}: a step without an `episode` or a whole number as its `step`: {row}")
        steps = found.setdefault(str(row["episode"]), {})
        if step in steps:
            raise ValueError(f"{path}: step {step:g} of episode {row['episode']!r} has two rows")
        if not math.isnan(score):
            steps[int(step)] = score
    if not found:
        raise ValueError(f"{path}: no steps with a column {column!r}")
    return found


def _number(path: Path | str, row: Row, column: str) -> float:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {column} is no number ({error}) in the row {str(row)[:300]}") from None


def check_tasks(path: Path | str, tasks: Mapping[str, str]) -> None:
    """Finds out whether a table is of other episodes, which may have the same names: they are often mere numbers.

    Args:
      path: of the table; rows without a `task` may be of any.
      tasks: of the episodes, by name.

    Raises:
      ValueError: as `read_table` does, or an episode has another task there.
    """
    for row in read_table(path):
        name, task = str(row.get("episode")), row.get("task")
        if task is not None and tasks.get(name, str(task)) != str(task):
            raise ValueError(
                f"{path}: episode {name!r} is of task {task!r}, but here of {tasks[name]!r}: scores of other episodes"
            )


def check_ending(path: Path | str) -> None:
    """Raises the ValueError of `write_table`, before any work is done."""
    _kind(Path(path), _WRITERS)


def _kind(path: Path, functions: Mapping) -> Any:
    if path.suffix not in functions:
        raise ValueError(f"{path}: a table ends in one of {', '.join(functions)}")
    return functions[path.suffix]


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a JSON {type(row).__name__}, expected an object")
            yield row


def _write_jsonl(path: Path, columns: Mapping[str, type], rows: Iterable[Row]) -> int:
    count = 0
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps({name: row.get(name) for name in columns if row.get(name) is not None}) + "\n")
            count += 1
    return count


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row:  # where DictReader puts what the header has no name for
                raise ValueError(f"{path}:{reader.line_num}: more cells than the {len(row) - 1} columns of the header")
            yield {name: _cell(path, reader.line_num, name, text) for name, text in row.items()}


def _cell(path: Path, line: int, column: str, text: str | None) -> str | float | None:
    if not text:
        return None
    if column in TEXT:
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{path}:{line}: {column} is {text!r}, expected a number") from None


def _write_csv(path: Path, columns: Mapping[str, type], rows: Iterable[Row]) -> int:
    count = 0
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow(row)
            count += 1
    return count


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: no readable Parquet file: {error}") from error


def _write_parquet(path: Path, columns: Mapping[str, type], rows: Iterable[Row]) -> int:
    import pyarrow.parquet

    kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
    count = 0
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        rows = iter(rows)
        while batch := list(itertools.islice(rows, BATCH)):
            writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema))
            count += len(batch)
    return count


_READERS = {".parquet": _read_parquet, ".csv": _read_csv, ".jsonl": _read_jsonl}
_WRITERS = {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl": _write_jsonl}
