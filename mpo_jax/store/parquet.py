"""Episodes as Parquet, for those who ask their questions in SQL or pandas; needs pyarrow (the extra `tables`)."""

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import parquet

from mpo_jax.store.episode import RECORD_VERSION, Episode, InvalidEpisode
from mpo_jax.store.export import Damaged, from_plain, parse_json, written_whole

_ROWS = 512  # of a row group: what is held in memory at once
_IDS, _FLAGS, _NUMBERS = pa.list_(pa.int64()), pa.list_(pa.bool_()), pa.list_(pa.float64())
SCHEMA = pa.schema(
    {
        "episode_id": pa.string(),
        "group_id": pa.int64(),
        "task_id": pa.string(),
        "tokens": _IDS,
        "action_mask": _FLAGS,
        "executable_mask": _FLAGS,
        "turn_ids": _IDS,
        "logprobs": _NUMBERS,
        "rewards": _NUMBERS,
        "state_ids": _IDS,
        "versions": _IDS,
        "end_reason": pa.string(),
        "metadata": pa.string(),  # as JSON
        "experts": pa.binary(),
        "checksum": pa.int64(),  # CRC-32 of the other columns
    },
    metadata={"record": str(RECORD_VERSION)},
)
_OLDER = SCHEMA.remove(SCHEMA.get_field_index("experts"))  # as files were written before there was that field


def write_parquet(episodes: Iterable[Episode], path: str | os.PathLike) -> int:
    """Writes a row an episode: the columns are the fields of `Episode`, the metadata as JSON, and a checksum.

    Returns:
      The number of rows.
    """
    total, rows = 0, []
    with written_whole(path) as beside, parquet.ParquetWriter(beside, SCHEMA, compression="zstd") as writer:
        for episode in episodes:
            total += 1
            row = msgspec.structs.asdict(episode) | {"metadata": msgspec.json.encode(episode.metadata).decode()}
            rows.append(row | {"checksum": _checksum(row)})
            if len(rows) == _ROWS:
                writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
                rows.clear()
        writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
    return total


def read_parquet(path: str | os.PathLike, vocab_size: int | None = None) -> Iterator[Episode | Damaged]:
    """Yields the episode of each row, or what is wrong with it.

    Args:
      path: as `write_parquet` wrote it.
      vocab_size: ids from it on are refused; None where the model is not known.

    Raises:
      InvalidEpisode: the file is no Parquet file of episodes, of another version, or damaged beyond single rows.
    """
    try:
        with parquet.ParquetFile(path) as file:
            _check_schema(path, file.schema_arrow)
            rows = (row for batch in file.iter_batches(_ROWS) for row in batch.to_pylist())
            for number, row in enumerate(rows):
                try:
                    yield _from_row(row, vocab_size)
                except InvalidEpisode as error:
                    reason = f"{os.fspath(path)} row {number + 1}: {error}"
                    yield Damaged(number, reason, json.dumps(row, default=repr).encode())
    except (pa.ArrowException, OSError) as error:
        raise InvalidEpisode(f"{os.fspath(path)}: no readable Parquet file: {error}") from error


def _check_schema(path: str | os.PathLike, found: pa.Schema) -> None:
    if not any(schema.equals(found) for schema in (SCHEMA, _OLDER)):
        raise InvalidEpisode(f"{os.fspath(path)}: columns {found.names}, expected {SCHEMA.names} and their types")
    if (version := (found.metadata or {}).get(b"record", b"none").decode(errors="replace")) != str(RECORD_VERSION):
        raise InvalidEpisode(f"{os.fspath(path)}: record version {version}, expected {RECORD_VERSION}")


def _from_row(row: dict[str, Any], vocab_size: int | None) -> Episode:
    fields = {name: value for name, value in row.items() if name != "checksum"}
    if row["checksum"] != _checksum(fields):
        raise InvalidEpisode("damaged: its checksum is wrong")
    return from_plain(fields | {"metadata": parse_json(fields["metadata"].encode())}, vocab_size)


def _checksum(row: dict[str, Any]) -> int:
    return zlib.crc32(msgspec.msgpack.encode(sorted(row.items())))
