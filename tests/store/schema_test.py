"""The file's schema: an older one is brought up, a later one refused, and reading never writes."""

import sqlite3
import threading

import pytest
from sqlite_test import add, ids

from mpo_jax.store import schema
from mpo_jax.store.sqlite import EpisodeStore, StoreError

# The first schema as it was published, written out: a file that some user still has.
FIRST = """
CREATE TABLE groups (group_id INTEGER PRIMARY KEY, oldest_version INTEGER NOT NULL, step INTEGER,
    dropped INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE INDEX groups_waiting ON groups (group_id) WHERE step IS NULL;
CREATE INDEX groups_taken ON groups (group_id) WHERE step IS NOT NULL;
CREATE INDEX groups_step ON groups (step);
CREATE TABLE episodes (group_id INTEGER NOT NULL, member INTEGER NOT NULL, checksum INTEGER NOT NULL,
    record BLOB NOT NULL, PRIMARY KEY (group_id, member)) STRICT;
CREATE TABLE quarantined (group_id INTEGER NOT NULL, member INTEGER NOT NULL, reason TEXT NOT NULL,
    record BLOB NOT NULL, PRIMARY KEY (group_id, member)) STRICT;
CREATE TABLE reservations (group_id INTEGER PRIMARY KEY, owner TEXT NOT NULL, expires REAL NOT NULL) STRICT;
PRAGMA application_id = 0x4D504F31;
PRAGMA user_version = 1;
"""
# {"episode_id": "0-0", "group_id": 0, "task_id": "t", "tokens": [1, 2], "action_mask": [F, T], "executable_mask":
# [F, T], "turn_ids": [0, 0], "logprobs": [0.0, -0.5], "rewards": [1.0], "state_ids": [0], "versions": [7],
# "end_reason": "terminated", "metadata": {}} in msgpack, as version 1 of the record was written: without a `record`.
RECORD = bytes.fromhex(
    "8daa657069736f64655f6964a3302d30a867726f75705f696400a77461736b5f6964a174a6746f6b656e73920102ab616374696f6e5f6d61"
    "736b92c2c3af65786563757461626c655f6d61736b92c2c3a87475726e5f696473920000a86c6f6770726f627392cb0000000000000000cb"
    "bfe0000000000000a77265776172647391cb3ff0000000000000a973746174655f6964739100a876657273696f6e739107aa656e645f7265"
    "61736f6eaa7465726d696e61746564a86d6574616461746180"
)
CHECKSUM = 0x512E02EA  # CRC-32 of RECORD


@pytest.fixture
def old(tmp_path):
    """A store of the first schema with one group that waits."""
    path = tmp_path / "old.sqlite"
    db = sqlite3.connect(path)
    db.executescript(FIRST)
    db.execute("INSERT INTO groups (group_id, oldest_version) VALUES (0, 7)")
    db.execute("INSERT INTO episodes VALUES (0, 0, ?, ?)", (CHECKSUM, RECORD))
    db.commit()
    db.close()
    return path


def version(path):
    db = sqlite3.connect(path)
    found = db.execute("PRAGMA user_version").fetchone()[0]
    db.close()
    return found


def test_an_older_file_is_brought_up_and_goes_on(old):
    store = EpisodeStore(old)
    assert version(old) == schema.SCHEMA_VERSION == 4
    add(store, 1)
    first, second = store.take(2, 1)
    assert (first[0].versions, first[0].tokens) == ([7], [1, 2]) and ids([second]) == [1]
    store.close()
    db = sqlite3.connect(old)
    assert "refused" in dict(db.execute("SELECT name, text FROM about"))["migration"]
    db.close()


def test_an_older_file_is_read_without_being_changed(old):
    before = old.read_bytes()
    store = EpisodeStore(old, read_only=True)
    assert [e.versions for e in store.episodes()] == [[7]]
    store.close()
    assert old.read_bytes() == before


def test_a_step_that_fails_leaves_the_file_as_it_was(old, monkeypatch):
    broken = (*schema.MIGRATIONS[1], "CREATE TABLE groups (x)")  # exists
    monkeypatch.setattr(schema, "MIGRATIONS", (schema.MIGRATIONS[0], broken))
    with pytest.raises(StoreError, match=r"old\.sqlite: cannot be used.*groups already exists"):
        EpisodeStore(old)
    monkeypatch.undo()
    assert version(old) == 1
    assert EpisodeStore(old).count() == 1


def test_many_that_open_an_older_file_at_once_bring_it_up_once(old):
    errors = []

    def open_it():
        try:
            EpisodeStore(old).close()
        except StoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and version(old) == 4


@pytest.mark.parametrize("name", ["a b.sqlite", "50%25.sqlite", "why?.sqlite", "a#b.sqlite"])
def test_any_file_name_will_do(name, tmp_path):
    store = EpisodeStore(tmp_path / name)
    add(store, 0)
    store.close()
    assert EpisodeStore(tmp_path / name, read_only=True).count() == 2
    assert (tmp_path / name).exists()


def test_a_store_in_a_folder_that_is_not_ours_to_write_can_be_read(tmp_path, monkeypatch):
    """A colleague's, or one on a read-only disk. SQLite would put its log beside it, and fail where it cannot."""
    store = EpisodeStore(tmp_path / "s.sqlite")
    add(store, 0, 1)
    store.close()
    monkeypatch.setattr(schema.os, "access", lambda path, mode: False)
    reader = EpisodeStore(tmp_path / "s.sqlite", read_only=True)
    assert len(list(reader.episodes())) == reader.count() > 0
    assert [path.name for path in tmp_path.iterdir()] == ["s.sqlite"]
    reader.close()
