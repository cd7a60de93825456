"""The episode store: one SQLite file between the rollout processes and the learner, crash-safe and inspectable.

Groups are a deterministic stream: the index names the task. Producers reserve indices and add whole groups in any
order; the learner takes them in index order, so what it trains on depends on neither their number nor their speed.
"""

import contextlib
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from mpo_jax.store.admission import Admission
from mpo_jax.store.episode import Episode, InvalidEpisode, decode, encode
from mpo_jax.store.schema import StoreError, connect

_UNINFORMATIVE = "nothing to learn from"  # dynamic sampling at work: no reason to warn
# Only groups of the gapless run from 0 are ever taken, so a waiting one belongs to that run as long as every waiting
# one so far has its predecessor stored.
_WAITING = """
SELECT group_id, oldest_version,
       group_id = 0 OR EXISTS (SELECT 1 FROM groups AS before WHERE before.group_id = waiting.group_id - 1) AS follows
FROM groups AS waiting WHERE step IS NULL ORDER BY group_id"""
# For the same reason a free index is looked for above the highest taken one only.
_LOWEST_FREE = """
WITH first (id) AS (SELECT COALESCE(MAX(group_id) + 1, 0) FROM groups WHERE step IS NOT NULL),
     busy (id) AS (SELECT group_id FROM groups, first WHERE group_id >= first.id
                   UNION SELECT group_id FROM reservations WHERE owner = ? OR begun > ?)
SELECT MIN(id) FROM (SELECT id FROM first UNION SELECT id + 1 FROM busy) WHERE id NOT IN busy"""
_LAST_BEGUN = """SELECT MAX(COALESCE((SELECT MAX(group_id) FROM groups), -1),
                            COALESCE((SELECT MAX(group_id) FROM reservations), -1))"""

log = logging.getLogger(__name__)


class EpisodeStore:
    """Whole groups of episodes in one SQLite file, shared by processes (one object a thread).

    The file is in WAL mode with synchronous=NORMAL: a commit has handed its pages to the operating system, so what
    `add` or `take` acknowledged survives kill -9 of every process. Only a power cut can lose the last commits (never
    tear one), and what they held is produced or taken again: both are idempotent.

    Args:
      path: the file; made if absent, and brought up to the current schema if older (see `schema`).
      read_only: refuse to make it or to change anything in it.
      vocab_size: token ids from it on are refused, when a group is added and when it is taken; None = not known.

    Raises:
      StoreError: the file is absent and only to be read, is no SQLite file, belongs to another program, or has a later
        schema.
    """

    def __init__(self, path: str | os.PathLike, *, read_only: bool = False, vocab_size: int | None = None):
        self.path, self.vocab_size = os.fspath(path), vocab_size
        with self._named_errors():
            self._db = connect(self.path, read_only=read_only)

    def close(self) -> None:
        """Closes the file; everything acknowledged is already in it."""
        self._db.close()

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: cannot be used as an episode store: {error}") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._named_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _number(self, query: str, *arguments) -> int | None:
        with self._named_errors():
            return self._db.execute(query, arguments).fetchone()[0]

    # Producers.

    def reserve(self, owner: str, lease: float, admission: Admission = Admission()) -> int | None:
        """Gives a producer the lowest group index that is neither stored nor reserved by a live producer.

        An index below one that is stored or being made is given out whatever the bounds: the learner waits for it.

        Args:
          owner: name of the producer, kept over its restarts.
          lease: seconds until the reservation lapses, unless renewed, and the index is given out again.
          admission: the bounds, with the version of the producer's weights.

        Returns:
          The index, or None while the bounds allow no new group.
        """
        with self._transaction() as db:
            now = time.time()  # in it, so that no other's can be later
            # What was begun in the future was begun before the clock was put back: it would lapse hours late.
            db.execute("DELETE FROM reservations WHERE expires <= ? OR begun > ?", (now, now))
            slow = now - admission.straggler_seconds if admission.straggler_seconds else -1.0
            group_id = self._number(_LOWEST_FREE, owner, slow)
            if group_id > self._number(_LAST_BEGUN):
                ahead = self.pending() + self._number("SELECT COUNT(DISTINCT group_id) FROM reservations")
                if not admission.capacity(self.next_step(), ahead):
                    return None
            db.execute("INSERT INTO reservations VALUES (?, ?, ?, ?)", (group_id, owner, now, now + lease))
        return group_id

    def renew(self, owner: str, lease: float) -> None:
        """Extends all reservations that the producer still holds to `lease` seconds from now."""
        with self._transaction() as db:
            db.execute("UPDATE reservations SET expires = ? WHERE owner = ?", (time.time() + lease, owner))

    def release(self, owner: str) -> None:
        """Gives up the producer's reservations; a restarted one calls this first, so that nobody waits for them."""
        with self._transaction() as db:
            db.execute("DELETE FROM reservations WHERE owner = ?", (owner,))

    def add(self, group_id: int, episodes: Sequence[Episode]) -> None:
        """Stores a whole group in one transaction and ends its reservation; a group already stored is left as it is.

        Raises:
          InvalidEpisode: a record does not hold together or names another group; nothing is stored.
          ValueError: the group has no episodes.
        """
        if not episodes:
            raise ValueError(f"group {group_id} has no episodes, expected at least one")
        for episode in episodes:
            if episode.group_id != group_id:
                raise InvalidEpisode(
                    f"episode {episode.episode_id!r}: group_id is {episode.group_id}, expected {group_id}"
                )
        records = [encode(episode, self.vocab_size) for episode in episodes]
        oldest = min((version for episode in episodes for version in episode.versions), default=0)
        with self._transaction() as db:
            db.execute("DELETE FROM reservations WHERE group_id = ?", (group_id,))
            new = db.execute(
                "INSERT OR IGNORE INTO groups (group_id, oldest_version) VALUES (?, ?)", (group_id, oldest)
            )
            if new.rowcount:
                rows = [(group_id, member, zlib.crc32(record), record) for member, record in enumerate(records)]
                db.executemany("INSERT INTO episodes VALUES (?, ?, ?, ?)", rows)

    # The learner.

    def take(
        self,
        num_groups: int,
        step: int,
        *,
        min_version: int = 0,
        keep: Callable[[list[Episode]], bool] = lambda group: True,
        max_dropped: int = 0,
    ) -> list[list[Episode]] | None:
        """Takes the next groups in index order for a learner step; asking again for that step gives them again.

        Groups that hold a turn of weights older than `min_version`, and those without one readable record, are
        passed over (logged). A group keeps its readable episodes, so it may be smaller than it was.

        Args:
          num_groups: how many.
          step: the learner's step.
          min_version: the oldest weights accepted.
          keep: whether a group teaches anything; others are passed over, so that the batch is filled with ones that
            do (dynamic sampling).
          max_dropped: how many groups a step may pass over for that; the rest is taken as it comes.

        Returns:
          The groups, or None until enough are stored without a gap.

        Raises:
          ValueError: the step lies before one that has already taken groups: `rewind` first.
        """
        with self._transaction() as db:
            taken = db.execute("SELECT group_id FROM groups WHERE step = ? AND NOT dropped ORDER BY group_id", (step,))
            if again := [self._read_group(group_id) for (group_id,) in taken.fetchall()]:
                return [group for group in again if group]
            last = self._number("SELECT MAX(step) FROM groups")
            if last is not None and step < last:
                raise ValueError(f"step {step} took no groups, but step {last} did: call rewind({step - 1}) first")
            waiting = list(takewhile(lambda row: row[2], db.execute(_WAITING)))
            stale = [group_id for group_id, version, _ in waiting if version < min_version]
            self._mark(stale, step, f"older than version {min_version}")
            fresh = [group_id for group_id, version, _ in waiting if version >= min_version]
            groups: dict[int, list[Episode]] = {}
            dropped = self._number("SELECT COUNT(*) FROM groups WHERE step = ? AND dropped", step)
            while len(groups) < num_groups <= len(fresh) + len(groups):
                group_id = fresh.pop(0)
                group = self._read_group(group_id)
                if not group:
                    self._mark([group_id], step, "without one readable episode")
                elif dropped < max_dropped and not keep(group):
                    self._mark([group_id], step, _UNINFORMATIVE)
                    dropped += 1
                else:
                    groups[group_id] = group
            if len(groups) < num_groups:
                return None
            self._mark(list(groups), step)
        return list(groups.values())

    def _mark(self, group_ids: Sequence[int], step: int, dropped_because: str = "") -> None:
        if group_ids and dropped_because:
            level = logging.INFO if dropped_because == _UNINFORMATIVE else logging.WARNING
            log.log(level, "%s: step %d passes over groups %s: %s", self.path, step, group_ids, dropped_because)
        rows = [(step, bool(dropped_because), group_id) for group_id in group_ids]
        self._db.executemany("UPDATE groups SET step = ?, dropped = ? WHERE group_id = ?", rows)

    def rewind(self, step: int) -> None:
        """Gives back all that steps after `step` took: a learner resumed from its checkpoint trains exactly those."""
        with self._transaction() as db:
            db.execute("UPDATE groups SET step = NULL, dropped = 0 WHERE step > ?", (step,))

    def _read_group(self, group_id: int) -> list[Episode]:
        """The group's readable episodes; the others move to `quarantined` with the reason (inside a transaction)."""
        query = "SELECT group_id, member, checksum, record FROM episodes WHERE group_id = ? ORDER BY member"
        episodes = []
        for row in self._db.execute(query, (group_id,)).fetchall():
            try:
                episodes.append(self._read(row))
            except InvalidEpisode as error:
                log.warning("%s: quarantined episode %d of group %d: %s", self.path, row[1], group_id, error)
                self._db.execute(
                    "INSERT OR REPLACE INTO quarantined SELECT group_id, member, ?, record FROM episodes "
                    "WHERE group_id = ? AND member = ?", (str(error), *row[:2]),
                )  # fmt: skip
                self._db.execute("DELETE FROM episodes WHERE group_id = ? AND member = ?", row[:2])
        return episodes

    def quarantine(self, number: int, reason: str, record: bytes) -> None:
        """Keeps a record that was offered from outside and is no episode, once, as a member of group -1.

        Its number there is `number`, or the next after all where a record of another file has that.
        """
        with self._transaction() as db:
            known = "SELECT 1 FROM quarantined WHERE group_id = -1 AND reason = ? AND record = ?"
            if db.execute(known, (reason, record)).fetchone():
                return
            if self._number("SELECT COUNT(*) FROM quarantined WHERE group_id = -1 AND member = ?", number):
                number = self._number("SELECT MAX(member) + 1 FROM quarantined WHERE group_id = -1")
            db.execute("INSERT INTO quarantined VALUES (-1, ?, ?, ?)", (number, reason, record))

    # Readers.

    def next_step(self) -> int:
        """The first learner step that has taken no groups to train on."""
        return self._number("SELECT COALESCE(MAX(step) + 1, 0) FROM groups WHERE step IS NOT NULL AND NOT dropped")

    def pending(self) -> int:
        """The number of stored groups that wait to be taken."""
        return self._number("SELECT COUNT(*) FROM groups WHERE step IS NULL")

    def count(self) -> int:
        """The number of stored episodes."""
        return self._number("SELECT COUNT(*) FROM episodes")

    def last_group(self) -> int | None:
        """The highest index of a stored group; None while there is none."""
        return self._number("SELECT MAX(group_id) FROM groups")

    def steps(self) -> dict[int, int]:
        """Group index to the learner step that took it, without the groups that wait or were passed over."""
        with self._named_errors():
            return dict(self._db.execute("SELECT group_id, step FROM groups WHERE step IS NOT NULL AND NOT dropped"))

    def quarantined(self) -> list[tuple[int, int, str]]:
        """(group, member, reason) of every record that was put aside because nobody can read it."""
        with self._named_errors():
            return self._db.execute("SELECT group_id, member, reason FROM quarantined ORDER BY 1, 2").fetchall()

    def episodes(self, first: int = 0, last: int = 2**63 - 1) -> Iterator[Episode]:
        """Yields every readable episode of groups `first` to `last`, by group and member.

        Changes nothing, and skips damaged records with a warning.
        """
        query = "SELECT * FROM episodes WHERE group_id BETWEEN ? AND ? ORDER BY group_id, member"
        with self._named_errors():
            for row in self._db.execute(query, (first, last)):
                try:
                    yield self._read(row)
                except InvalidEpisode as error:
                    log.warning("%s: skipped episode %d of group %d: %s", self.path, row[1], row[0], error)

    def _read(self, row: tuple[int, int, int, bytes]) -> Episode:
        group_id, _, checksum, record = row
        if zlib.crc32(record) != checksum:
            raise InvalidEpisode(f"a record of {len(record)} bytes is damaged: its checksum is wrong")
        episode = decode(record, self.vocab_size)
        if episode.group_id != group_id:
            raise InvalidEpisode(f"episode {episode.episode_id!r}: group_id is {episode.group_id}, expected {group_id}")
        return episode
