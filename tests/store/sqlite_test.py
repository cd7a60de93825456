"""The store: order, reservations, rewinding, damage, and processes that are killed."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
import types

import msgspec
import pytest

from mpo_jax.store import sqlite
from mpo_jax.store.admission import Admission
from mpo_jax.store.episode import Episode, InvalidEpisode
from mpo_jax.store.schema import SCHEMA_VERSION
from mpo_jax.store.sqlite import EpisodeStore, StoreError


def episode(group_id, member=0, version=0):
    return Episode(
        episode_id=f"{group_id}-{member}",
        group_id=group_id,
        task_id="t",
        tokens=[1, 2],
        action_mask=[False, True],
        executable_mask=[False, True],
        turn_ids=[0, 0],
        logprobs=[0.0, -0.5],
        rewards=[1.0],
        state_ids=[0],
        versions=[version],
        end_reason="terminated",
    )


def add(store, *group_ids, version=0):
    for group_id in group_ids:
        store.add(group_id, [episode(group_id, member, version) for member in range(2)])


def ids(groups):
    return [group[0].group_id for group in groups]


@pytest.fixture
def store(tmp_path):
    store = EpisodeStore(tmp_path / "episodes.sqlite")
    yield store
    store.close()


def test_groups_are_taken_whole_in_index_order_and_once(store):
    add(store, 2, 1)
    assert store.take(1, 1) is None  # group 0 is still to come
    add(store, 0, 4)
    assert [e.episode_id for group in store.take(2, 1) for e in group] == ["0-0", "0-1", "1-0", "1-1"]
    assert ids(store.take(1, 2)) == [2]
    assert store.take(1, 3) is None  # 4 waits for 3
    assert (store.pending(), store.count()) == (1, 8)
    assert [e.group_id for e in store.episodes()] == [0, 0, 1, 1, 2, 2, 4, 4]


def test_adding_a_stored_group_again_is_ignored(store):
    add(store, 0, version=1)
    add(store, 0, version=2)
    assert store.count() == 2
    assert store.take(1, 1)[0][0].versions == [1]


def test_BUG_138_a_smaller_group_or_one_that_failed_before_acting_is_no_gap(store):
    lists = ("tokens", "action_mask", "executable_mask", "turn_ids", "logprobs", "rewards", "state_ids", "versions")
    failed = msgspec.structs.replace(episode(0), **{field: [] for field in lists}, metadata={"error": "x"})
    store.add(0, [failed])
    add(store, 1)
    assert [len(group) for group in store.take(2, 1)] == [1, 2]


def test_BUG_099_an_invalid_episode_stores_nothing_of_its_group(store):
    bad = msgspec.structs.replace(episode(0, 1), logprobs=[0.0, float("nan")])
    with pytest.raises(InvalidEpisode, match="'0-1': logprobs"):
        store.add(0, [episode(0), bad])
    with pytest.raises(InvalidEpisode, match="group_id is 1, expected 0"):
        store.add(0, [episode(1)])
    with pytest.raises(ValueError, match="group 0 has no episodes"):
        store.add(0, [])
    assert store.count() == store.pending() == 0


def test_BUG_146_rewound_steps_take_the_same_groups_again(store):
    add(store, *range(6))
    taken = {step: store.take(2, step) for step in (1, 2, 3)}
    assert store.take(2, 2) == taken[2]
    store.rewind(1)
    assert store.pending() == 4
    assert [store.take(2, step) for step in (2, 3)] == [taken[2], taken[3]]
    assert store.take(2, 4) is None


def test_a_step_before_the_last_one_that_took_must_rewind(store):
    add(store, 0, 1)
    store.take(1, 5)
    with pytest.raises(ValueError, match=r"step 3 took no groups, but step 5 did: call rewind\(2\)"):
        store.take(1, 3)


def test_stale_groups_are_passed_over_and_give_room_to_new_ones(store, caplog):
    add(store, 0, version=3)
    add(store, 1, version=1)
    assert store.take(2, 7, min_version=2) is None
    assert store.pending() == 1
    assert "passes over groups [1]: older than version 2" in caplog.text
    assert store.reserve("w", 60.0) == 2
    add(store, 2, version=3)
    assert ids(store.take(2, 7, min_version=2)) == [0, 2]
    assert ids(store.take(2, 7, min_version=2)) == [0, 2]
    store.rewind(6)
    assert ids(store.take(3, 7)) == [0, 1, 2]


def test_reservations_lapse_are_renewed_and_released(store):
    assert [store.reserve("a", 60.0), store.reserve("b", 0.05), store.reserve("a", 60.0)] == [0, 1, 2]
    time.sleep(0.1)
    assert [store.reserve("c", 60.0), store.reserve("c", 60.0)] == [1, 3]  # b is dead: its group is made again
    add(store, 0)
    store.release("a")
    assert store.reserve("d", 0.05) == 2
    store.renew("d", 60.0)
    time.sleep(0.1)
    assert store.reserve("e", 60.0) == 4


def test_a_clock_that_is_put_back_keeps_no_dead_producers_reservation_alive(store, monkeypatch):
    day = 86_400.0
    for now, owner, group in ((2 * day, "killed", 0), (day, "b", 0), (day + 1, "c", 1)):
        monkeypatch.setattr(sqlite.time, "time", lambda now=now: now)
        assert store.reserve(owner, 60.0) == group


def test_BUG_143_waiting_groups_and_those_in_the_making_stay_below_the_limit(store):
    assert [store.reserve(owner, 60.0, Admission(max_pending=2)) for owner in "abc"] == [0, 1, None]
    add(store, 0)
    assert store.reserve("c", 60.0, Admission(max_pending=2)) is None
    store.take(1, 1)
    assert store.reserve("c", 60.0, Admission(max_pending=2)) == 2


def test_a_gap_below_a_stored_group_is_given_out_whatever_the_limit(store):
    add(store, 0, 1, 3)
    full = Admission(max_pending=1)
    assert [store.reserve("a", 60.0, full), store.reserve("a", 60.0, full)] == [2, None]


def test_a_group_that_takes_too_long_is_given_to_one_other_producer_at_a_time(store, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(sqlite, "time", types.SimpleNamespace(time=lambda: now))

    def reserve(owner):
        return store.reserve(owner, 60.0, Admission(max_pending=2, straggler_seconds=20.0))

    assert [reserve("a"), reserve("a"), reserve("b")] == [0, 1, None]
    now += 21
    assert [reserve("a"), reserve("b"), reserve("c"), reserve("d")] == [None, 0, 1, None]  # never its own again
    assert store.reserve("e", 60.0, Admission(max_pending=3)) == 2  # two are in the making, however many make them
    store.release("a")
    add(store, 0)
    assert reserve("f") is None


def test_damaged_record_is_quarantined_with_its_reason(store, caplog):
    add(store, 0, 1, 2)
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE episodes SET record = x'00' WHERE group_id = 0 AND member = 0")
        db.execute("UPDATE episodes SET record = substr(record, 2) WHERE group_id = 1")
    assert len(list(store.episodes())) == 3
    assert [[e.episode_id for e in group] for group in store.take(2, 1)] == [["0-1"], ["2-0", "2-1"]]
    assert "quarantined episode 0 of group 0" in caplog.text
    assert "passes over groups [1]: without one readable episode" in caplog.text
    with sqlite3.connect(store.path) as db:
        rows = db.execute("SELECT group_id, member, reason FROM quarantined ORDER BY 1, 2").fetchall()
    assert [row[:2] for row in rows] == [(0, 0), (1, 0), (1, 1)]
    assert all("checksum" in row[2] for row in rows)
    assert store.count() == 3


def test_files_that_are_no_store_are_named(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database " * 100)
    with pytest.raises(StoreError, match=r"notes\.txt: cannot be used.*not a database"):
        EpisodeStore(text)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE songs (name TEXT)")
    with pytest.raises(StoreError, match=r"foreign\.sqlite: empty or of another program"):
        EpisodeStore(foreign)
    EpisodeStore(tmp_path / "old.sqlite").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign.sqlite", "notes.txt", "old.sqlite"]
    with sqlite3.connect(tmp_path / "old.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match=f"schema 99, expected at most {SCHEMA_VERSION}"):
        EpisodeStore(tmp_path / "old.sqlite")
    with pytest.raises(StoreError, match="no such episode store"):
        EpisodeStore(tmp_path / "absent.sqlite", read_only=True)
    with pytest.raises(StoreError, match=r"absent"):
        EpisodeStore(tmp_path / "absent" / "x.sqlite")


def test_corrupt_pages_are_one_clear_error(tmp_path):
    store = EpisodeStore(tmp_path / "s.sqlite")
    add(store, *range(200))
    store.close()
    content = bytearray((tmp_path / "s.sqlite").read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    (tmp_path / "s.sqlite").write_bytes(content)
    with pytest.raises(StoreError, match=r"s\.sqlite: cannot be used"):
        EpisodeStore(tmp_path / "s.sqlite").take(1, 1)


PRODUCER = """
import sys
sys.path.insert(0, {folder!r})
from sqlite_test import add
from mpo_jax.store.sqlite import EpisodeStore
store = EpisodeStore({path!r})
for _ in range({count}):
    group_id = store.reserve({owner!r}, 60.0)
    add(store, group_id)
    print(group_id, flush=True)
"""


def start_producer(path, owner, count):
    code = PRODUCER.format(folder=os.path.dirname(__file__), path=os.fspath(path), owner=owner, count=count)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_kill_9_of_a_writer_loses_nothing_acknowledged_and_tears_no_group(tmp_path):
    path = tmp_path / "s.sqlite"
    producer = start_producer(path, "a", 10**6)
    acknowledged = [int(producer.stdout.readline()) for _ in range(50)]
    producer.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in producer.stdout.read().split()]
    producer.wait()
    store = EpisodeStore(path)
    stored = store.pending()
    assert acknowledged == list(range(len(acknowledged)))
    assert len(acknowledged) <= stored <= len(acknowledged) + 1
    assert store.count() == 2 * stored
    store.release("a")
    assert store.reserve("a", 60.0) == stored
    assert ids(store.take(stored, 1)) == list(range(stored))


def test_two_producers_that_start_together_never_share_a_group(tmp_path):
    producers = [start_producer(tmp_path / "s.sqlite", owner, 100) for owner in "ab"]
    made = [[int(line) for line in producer.communicate()[0].split()] for producer in producers]
    assert [len(groups) for groups in made] == [100, 100]
    assert sorted(made[0] + made[1]) == list(range(200))
    assert len(EpisodeStore(tmp_path / "s.sqlite").take(200, 1)) == 200
