"""The episode store's file: its tables, the number of its schema, and the rule that brings an older file up to it.

The rule, which every file also tells in its table `about`: a file of an older schema is brought up step by step in one
transaction when it is opened to write, and in a copy in memory when it is opened to read, so that reading changes
nothing. A file of a later schema is refused.
"""

import contextlib
import os
import sqlite3
import threading

APPLICATION_ID = 0x4D504F31  # "MPO1" in the file's header
_BUSY_SECONDS = 60.0

_TABLES = (
    # oldest_version: of the weights that sampled any turn. step: the learner step that took the group, NULL = waiting.
    # dropped = 1: passed over at that step (too old, or no readable record).
    """CREATE TABLE groups (group_id INTEGER PRIMARY KEY, oldest_version INTEGER NOT NULL, step INTEGER,
       dropped INTEGER NOT NULL DEFAULT 0) STRICT""",
    "CREATE INDEX groups_waiting ON groups (group_id) WHERE step IS NULL",
    "CREATE INDEX groups_taken ON groups (group_id) WHERE step IS NOT NULL",
    "CREATE INDEX groups_step ON groups (step)",
    """CREATE TABLE episodes (group_id INTEGER NOT NULL, member INTEGER NOT NULL, checksum INTEGER NOT NULL,
       record BLOB NOT NULL, PRIMARY KEY (group_id, member)) STRICT""",
    """CREATE TABLE quarantined (group_id INTEGER NOT NULL, member INTEGER NOT NULL, reason TEXT NOT NULL,
       record BLOB NOT NULL, PRIMARY KEY (group_id, member)) STRICT""",
    "CREATE TABLE reservations (group_id INTEGER PRIMARY KEY, owner TEXT NOT NULL, expires REAL NOT NULL) STRICT",
    f"PRAGMA application_id = {APPLICATION_ID}",
)
_ABOUT = {
    "content": "episodes of mpo_jax, as msgpack of mpo_jax.store.episode.Episode with the CRC-32 of the bytes",
    "version": "PRAGMA user_version counts the schemas",
    "migration": "an older schema is brought up step by step in one transaction when the file is opened to write, and "
    "in a copy in memory when it is opened to read; a later one is refused",
}
# Entry n leads from schema n to n + 1; an entry is never changed, only followed by another.
MIGRATIONS = (
    _TABLES,
    (
        "CREATE TABLE about (name TEXT PRIMARY KEY, text TEXT NOT NULL) STRICT",
        *(f"INSERT INTO about VALUES ('{name}', '{text}')" for name, text in _ABOUT.items()),
    ),
    (  # a second producer may make a group that the first is slow with; reservations are of minutes, so none is kept
        "DROP TABLE reservations",
        """CREATE TABLE reservations (group_id INTEGER NOT NULL, owner TEXT NOT NULL, begun REAL NOT NULL,
           expires REAL NOT NULL, PRIMARY KEY (group_id, owner)) STRICT""",
    ),
    (  # a program that does not know the field would put such records aside one by one: it shall refuse the file
        "INSERT INTO about VALUES ('experts', 'records may have the field experts, since schema 4')",
    ),
)
SCHEMA_VERSION = len(MIGRATIONS)


class StoreError(RuntimeError):
    """The file is no episode store, is damaged, or cannot be used; the message names it."""


def connect(path: str, *, read_only: bool) -> sqlite3.Connection:
    """Opens the file, of the current schema; makes it if it is absent, unless it is only to be read.

    Raises:
      StoreError: the file is absent and only to be read, of another program, or of a later schema.
      sqlite3.Error: it cannot be read, or is no SQLite file.
    """
    if not os.path.exists(path):
        if read_only:
            raise StoreError(f"{path}: no such episode store")
        _create(path)
    whole = os.path.abspath(path)
    uri, mode = f"file:{whole.replace('%', '%25').replace('?', '%3f').replace('#', '%23')}", "ro" if read_only else "rw"
    if read_only and not os.access(os.path.dirname(whole), os.W_OK) and not os.path.exists(f"{whole}-wal"):
        mode += "&immutable=1"  # SQLite cannot put its files beside it, and where there is no log nobody writes
    db = sqlite3.connect(f"{uri}?mode={mode}", _BUSY_SECONDS, isolation_level=None, uri=True)
    try:
        if _number(db, "application_id") != APPLICATION_ID:
            raise StoreError(f"{path}: empty or of another program, not an episode store")
        if (version := _number(db, "user_version")) > SCHEMA_VERSION:
            raise StoreError(f"{path}: episode store of schema {version}, expected at most {SCHEMA_VERSION}")
        if version < SCHEMA_VERSION and read_only:
            original, db = db, sqlite3.connect(":memory:", isolation_level=None)
            with contextlib.closing(original):
                original.backup(db)
        _migrate(db)
        db.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        db.close()
        raise
    return db


def _migrate(db: sqlite3.Connection) -> None:
    """Brings an open file up to the current schema: all steps or none, whoever else does the same at this moment."""
    if _number(db, "user_version") == SCHEMA_VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        for statements in MIGRATIONS[_number(db, "user_version") :]:
            for statement in statements:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _create(path: str) -> None:
    """Makes an empty store beside its place and links it there whole: processes that start together never collide."""
    beside = f"{path}.{os.getpid()}-{threading.get_ident()}.new"
    try:
        with contextlib.closing(sqlite3.connect(beside, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            _migrate(db)
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(beside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def _number(db: sqlite3.Connection, pragma: str) -> int:
    return db.execute(f"PRAGMA {pragma}").fetchone()[0]
