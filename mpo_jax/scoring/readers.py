"""Files of episodes to transcripts, one at a time; an episode that cannot be read is named and passed over."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mpo_jax.scoring import formats, verifiers_format
from mpo_jax.scoring.transcripts import InvalidTranscript, Transcript, validate
from mpo_jax.store.sqlite import EpisodeStore


class Format(NamedTuple):
    """How a kind of file is read.

    Attributes:
      split: path to (place for people, name in the file, raw episode); an exception stands for one that is damaged.
      convert: (raw episode, name) to a transcript.
    """

    split: Callable[[Path], Iterator[tuple[str, str, Any]]]
    convert: Callable[[Any, str], Transcript]


def read(path: Path | str, kind: str, errors: list[str]) -> Iterator[Transcript]:
    """Reads a file of episodes.

    Args:
      path: a file, or a folder where the format is one of folders.
      kind: a key of `FORMATS`.
      errors: a line is appended for each episode that cannot be read: the file, the place and the field.

    Yields:
      The episodes that can be read, in the file's order, each with an id of its own.

    Raises:
      ValueError: the path does not exist or is no such file at all.
    """
    if kind not in FORMATS:
        raise ValueError(f"format {kind!r}, expected one of {', '.join(FORMATS)}")
    if not Path(path).exists():
        raise ValueError(f"{path}: no such file or folder")
    split, convert = FORMATS[kind]
    seen: Counter[str] = Counter()
    for place, name, raw in split(Path(path)):
        try:
            if isinstance(raw, Exception):
                raise raw
            transcript = convert(raw, name)
            validate(transcript)
        except (msgspec.ValidationError, ValueError, RecursionError) as error:
            errors.append(f"{place}: {error}")
        else:
            name = given = transcript.episode_id
            while seen[name]:  # runs that were resumed may hold a trial twice
                seen[given] += 1
                name = f"{given}#{seen[given]}"
            seen[name] += 1
            yield transcript if name == given else msgspec.structs.replace(transcript, episode_id=name)


def _lines(path: Path) -> Iterator[tuple[str, str, Any]]:
    """The rows of a JSONL file; empty lines are none."""
    if path.is_dir():
        raise ValueError(f"{path}: a folder, expected a file of JSON lines")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", str(number), _parse(line)


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        return InvalidTranscript(f"no JSON: {error}")


def _document(path: Path) -> Any:
    if path.is_dir():
        raise ValueError(f"{path}: a folder, expected a JSON file")
    document = _parse(path.read_bytes())
    if isinstance(document, Exception):
        raise ValueError(f"{path}: {document}")
    return document


def _list(path: Path) -> Iterator[tuple[str, str, Any]]:
    """The items of a JSON list."""
    document = _document(path)
    if not isinstance(document, list):
        raise ValueError(f"{path}: a JSON {type(document).__name__}, expected a list of episodes")
    for index, item in enumerate(document):
        yield f"{path}[{index}]", str(index), item


def _simulations(path: Path) -> Iterator[tuple[str, str, Any]]:
    """The simulations of a tau2 result file."""
    document = _document(path)
    if not isinstance(document, dict) or not isinstance(document.get("simulations"), list):
        raise ValueError(f"{path}: expected an object with a list `simulations`")
    for index, item in enumerate(document["simulations"]):
        yield f"{path}: simulations[{index}]", str(index), item


def _files(path: Path) -> Iterator[tuple[str, str, Any]]:
    """The JSON files of a folder, 2.json before 10.json."""
    files = sorted(path.glob("*.json"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise ValueError(f"{path}: a folder with JSON files was expected")
    for file in files:
        try:
            raw = _parse(file.read_bytes())
        except OSError as error:
            raw = InvalidTranscript(f"cannot be read: {error.strerror}")
        yield str(file), file.stem, raw


def _stored(path: Path) -> Iterator[tuple[str, str, Any]]:
    """The episodes of a store."""
    store, seen = EpisodeStore(path, read_only=True), 0
    try:
        for episode in store.episodes():
            seen += 1
            yield f"{path}: episode {episode.episode_id!r}", episode.episode_id, episode
        if damaged := store.count() - seen:
            yield f"{path}", "", InvalidTranscript(f"{damaged} damaged episodes were passed over")
    finally:
        store.close()


FORMATS = {
    "messages": Format(_lines, formats.from_messages),
    "store": Format(_stored, formats.from_store),
    "tau_bench": Format(_list, formats.from_tau_bench),
    "tau2": Format(_simulations, formats.from_tau2),
    "verifiers": Format(_lines, verifiers_format.from_verifiers),
    "who_and_when": Format(_files, formats.from_who_and_when),
}
