"""Episodes out of a store as JSON lines, and back into one from these or from another reader.

Nothing here changes the store that is read. A reader yields `Damaged` in the place of what it cannot read, with the
reason, so that one bad line costs one episode; `import_episodes` puts it into the store's quarantine.
"""

import contextlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mpo_jax.store.episode import MAX_RECORD_BYTES, RECORD_VERSION, Episode, InvalidEpisode, encode, validate
from mpo_jax.store.sqlite import EpisodeStore


class Damaged(NamedTuple):
    """A part of a file that is no episode: its number (from 0), why, and its bytes as far as they are known."""

    number: int
    reason: str
    record: bytes


def import_episodes(store: EpisodeStore, rows: Iterable[Episode | Damaged]) -> tuple[int, int]:
    """Adds whole groups to a store; a group that it already holds stays as it is, and an id counts once.

    Args:
      store: where to.
      rows: what a reader yields; the episodes of a group need not follow each other.

    Returns:
      How many episodes were read, and how many damaged rows went to the quarantine.
    """
    groups, seen, damaged = defaultdict[int, list[Episode]](list), set(), 0
    for number, row in enumerate(rows):
        if isinstance(row, Episode):
            if row.episode_id in seen:
                row = Damaged(number, f"episode {row.episode_id!r} occurs a second time", encode(row))
            else:
                seen.add(row.episode_id)
        if isinstance(row, Damaged):
            store.quarantine(row.number, row.reason, row.record)
            damaged += 1
        else:
            groups[row.group_id].append(row)
    for group_id, group in sorted(groups.items()):
        store.add(group_id, group)
    return sum(map(len, groups.values())), damaged


@contextlib.contextmanager
def written_whole(path: str | os.PathLike) -> Iterator[Path]:
    """A path beside the wanted one, moved into its place at the end: readers see the old file or the new one."""
    path = Path(path)
    beside = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_jsonl(episodes: Iterable[Episode], path: str | os.PathLike) -> int:
    """Writes an object a line, with the fields of `Episode` and `record`, its version; NaN is written as null.

    Returns:
      The number of lines.
    """
    number = 0
    with written_whole(path) as beside, beside.open("wb") as file:
        for episode in episodes:
            file.write(msgspec.json.encode(episode) + b"\n")
            number += 1
    return number


def read_jsonl(path: str | os.PathLike, vocab_size: int | None = None) -> Iterator[Episode | Damaged]:
    """Yields the episode of each line that is not empty, or what is wrong with it.

    Args:
      path: as `write_jsonl` wrote it.
      vocab_size: ids from it on are refused; None where the model is not known.
    """
    for number, line in read_lines(path):
        try:
            yield from_plain(parse_json(line), vocab_size)
        except InvalidEpisode as error:
            yield Damaged(number, f"{os.fspath(path)} line {number + 1}: {error}", line)


def read_lines(path: str | os.PathLike) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 0, line) without the empty ones; of a line beyond all bounds only the beginning."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(2 * MAX_RECORD_BYTES):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(2 * MAX_RECORD_BYTES)
            if line.strip():
                yield number, line.rstrip(b"\r\n")
            number += 1


def parse_json(line: bytes) -> Any:
    """What a line of JSON says.

    Raises:
      InvalidEpisode: it is none, or longer than any episode.
    """
    if len(line) >= 2 * MAX_RECORD_BYTES:
        raise InvalidEpisode(f"more than {2 * MAX_RECORD_BYTES} bytes in a line: no episode is that long")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidEpisode(f"{len(line)} bytes that are no JSON: {error}") from error


def from_plain(fields: Any, vocab_size: int | None = None) -> Episode:
    """An episode from what JSON can hold, where null stands for NaN.

    Raises:
      InvalidEpisode: naming the field that is missing or wrong.
    """
    if isinstance(fields, dict):
        fields = dict(fields)
        for name in ("rewards", "logprobs"):
            if isinstance(fields.get(name), list):
                fields[name] = [math.nan if value is None else value for value in fields[name]]
        if isinstance(fields.get("metadata"), dict):
            fields["metadata"] = {k: math.nan if v is None else v for k, v in fields["metadata"].items()}
    try:
        episode = msgspec.convert(fields, Episode)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise InvalidEpisode(f"no episode of record version {RECORD_VERSION}: {error}") from error
    validate(episode, vocab_size)
    return episode
