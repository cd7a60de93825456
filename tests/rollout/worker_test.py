"""Groups made in the learner's process and by the worker."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
import types

import msgspec
import numpy as np
import pytest
from fakes import END, Counting, Letters, ScriptedEngine

from mpo_jax.rollout import conversation, worker
from mpo_jax.rollout.conversation import Limits
from mpo_jax.rollout.worker import Rollout, Terms, run_groups, run_worker, stop_on_signals
from mpo_jax.store import sqlite
from mpo_jax.store.admission import Admission
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights


def random_words(context, seed):
    return [97 + (seed + n) % 26 for n in range(1 + seed % 5)] + [END]


def rollout(**changes):
    parts = {
        "engine": ScriptedEngine(random_words, num_slots=4),
        "tokenizer": Letters(),
        "make_environment": Counting,
        "task_stream": lambda group_id: {"task": f"task {group_id}", "turns": 1 + group_id % 3},
        "group_size": 3,
        "seed": 5,
    }
    return Rollout(**(parts | changes))


def calls_until(count):
    """A should_stop that turns true at the count-th question."""
    left = iter(range(count))
    return lambda: next(left, None) is None


@pytest.fixture
def store(tmp_path):
    return EpisodeStore(tmp_path / "episodes.sqlite")


@pytest.fixture
def weights(tmp_path):
    return PublishedWeights(tmp_path / "weights")


def test_groups_are_whole_share_their_task_and_differ_in_what_was_sampled(store):
    assert run_groups(rollout(), store, 5) == 5
    groups = store.take(5, 1)
    assert [[e.episode_id for e in group] for group in groups[:1]] == [["00000000-000", "00000000-001", "00000000-002"]]
    assert [{e.task_id for e in group} for group in groups] == [{f"task {index}"} for index in range(5)]
    assert len({tuple(e.tokens) for group in groups for e in group}) > 10


def test_the_inline_run_repeats_bit_for_bit_whatever_the_slots_and_the_rounds(store, tmp_path):
    run_groups(rollout(), store, 6)
    other = EpisodeStore(tmp_path / "other.sqlite")
    for _ in range(3):
        run_groups(rollout(engine=ScriptedEngine(random_words, num_slots=1)), other, 2)
    assert list(store.episodes()) == list(other.episodes())
    assert store.take(6, 1) == other.take(6, 1)


def test_BUG_148_a_resumed_run_makes_the_groups_that_the_interrupted_one_would_have(store, tmp_path):
    run_groups(rollout(), store, 4, should_stop=calls_until(5))  # killed in the middle
    assert store.pending() < 4
    run_groups(rollout(), store, 4 - store.pending())
    whole = EpisodeStore(tmp_path / "whole.sqlite")
    run_groups(rollout(), whole, 4)
    assert store.take(4, 1) == whole.take(4, 1)


def test_BUG_138_a_task_that_always_fails_leaves_no_gap(store):
    def tasks(group_id):
        return {"fail": "reset"} if group_id == 2 else {}

    assert run_groups(rollout(task_stream=tasks), store, 4) == 4
    groups = store.take(4, 1)
    assert [e.metadata["error"] for e in groups[2]] == ["OSError: no documents"] * 3


def test_worker_waits_for_weights_then_takes_each_newer_version(store, weights):
    parts = rollout()
    run_worker(parts, store, weights, Terms(admission=Admission(max_pending=9), poll=0.01), should_stop=calls_until(3))
    assert (parts.engine.loaded, store.count()) == ([], 0)
    restored = []
    for version in (1, 2):
        weights.publish({"w": np.ones(2)}, version)
        run_worker(
            parts,
            store,
            weights,
            Terms(admission=Admission(max_pending=99), poll=0.01),
            should_stop=calls_until(20),
            restore=restored.append,
        )
    assert parts.engine.loaded == [1, 2]
    assert [params["w"].tolist() for params in restored] == [[1, 1]] * 2
    versions = [e.versions[0] for e in store.episodes()]
    assert versions == sorted(versions) and set(versions) == {1, 2}


def test_BUG_143_worker_stops_making_groups_when_enough_wait(store, weights):
    weights.publish({"w": np.ones(2)}, 0)
    run_worker(
        rollout(), store, weights, Terms(admission=Admission(max_pending=3), poll=0.001), should_stop=calls_until(200)
    )
    assert store.pending() == 3
    assert len(store.take(3, 1)) == 3


def test_worker_goes_back_to_the_weights_of_a_resumed_learner(store, weights):
    parts = rollout()
    for version in (5, 2):
        weights.publish({"w": np.ones(2)}, version)
        run_worker(
            parts, store, weights, Terms(admission=Admission(max_pending=1), poll=0.001), should_stop=calls_until(3)
        )
    assert parts.engine.loaded == [5, 2]


def test_BUG_144_a_stopped_worker_gives_its_groups_back(store, weights):
    weights.publish({"w": np.ones(2)}, 0)
    parts = rollout(task_stream=lambda group_id: {"turns": 10**9})
    run_worker(
        parts, store, weights, Terms(admission=Admission(max_pending=9), poll=0.001), should_stop=calls_until(10)
    )
    assert parts.engine.contexts == {}
    assert store.reserve("other", 60.0) == 0


def test_worker_stops_when_its_parent_is_gone(store, weights):
    started = time.monotonic()
    run_worker(rollout(), store, weights, Terms(), should_stop=lambda: False, parent=os.getppid() + 1)
    assert time.monotonic() - started < 1


WORKER = """
import sys
sys.path.insert(0, {tests!r})
from worker_test import *
with stop_on_signals() as should_stop:
    run_worker(rollout(), EpisodeStore({folder!r} + "/episodes.sqlite"), PublishedWeights({folder!r} + "/weights"),
               Terms(admission=Admission(max_pending={limit}), poll=0.01), should_stop=should_stop)
print("clean")
"""


def start_worker(folder, limit):
    code = WORKER.format(tests=os.path.dirname(__file__), folder=os.fspath(folder), limit=limit)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def wait_for_groups(store, number):
    deadline = time.monotonic() + 60
    while store.pending() < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_BUG_139_a_killed_worker_is_replaced_by_its_next_life_and_a_signal_ends_it_cleanly(store, weights, tmp_path):
    weights.publish({"w": np.ones(2)}, 0)
    first = start_worker(tmp_path, 10**6)
    wait_for_groups(store, 10)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    made = store.pending()
    second = start_worker(tmp_path, made + 5)
    wait_for_groups(store, made + 5)
    second.send_signal(signal.SIGTERM)
    assert (second.communicate(timeout=30)[0], second.returncode) == ("clean\n", 0)
    groups = store.take(made + 5, 1)
    assert [group[0].group_id for group in groups] == list(range(made + 5))
    assert {len(group) for group in groups} == {3}


def test_signals_are_restored_after_the_first():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals() as should_stop:
        assert not should_stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert should_stop()
        assert signal.getsignal(signal.SIGINT) is before


def test_a_group_is_begun_with_the_weights_of_its_moment_and_never_too_old(store):
    """Without staleness the rollout stops after a batch until new weights are there, however often it is asked."""
    made = rollout(group_size=1)
    bound = Admission(max_staleness=0, groups_per_step=3)
    assert run_groups(made, store, 10, Terms(admission=bound)) == 3
    assert run_groups(made, store, 10, Terms(admission=bound)) == 0
    assert len(store.take(3, 0)) == 3
    assert run_groups(made, store, 10, Terms(admission=bound)) == 0  # step 0 is under way, version 1 not there yet
    made.engine.load(None, 1)
    assert run_groups(made, store, 10, Terms(admission=bound)) == 3
    assert [set(group[0].versions) for group in store.take(3, 1, min_version=1)] == [{1}] * 3


def test_new_weights_are_taken_while_episodes_run_and_the_oldest_counts(store):
    made = rollout(group_size=1, task_stream=lambda group_id: {"task": "t", "turns": 3})
    ticks = iter(range(100))

    def refresh():
        made.engine.load(None, next(ticks))

    run_groups(made, store, 4, refresh=refresh)
    versions = [episode.versions for episode in store.episodes()]
    assert all(v == sorted(v) and len(set(v)) == 3 for v in versions)
    assert store._number("SELECT MAX(oldest_version - ?) FROM groups", min(v[0] for v in versions)) == 0


def test_a_free_slot_waits_for_no_other(store):
    """Two slots, a long episode beside short ones: it takes as many calls as the long one has turns."""
    turns = [6, 1, 1, 1, 1, 1]
    made = rollout(
        engine=ScriptedEngine(random_words, num_slots=2),
        group_size=1,
        task_stream=lambda group_id: {"task": "t", "turns": turns[group_id]},
    )
    assert run_groups(made, store, 6) == 6
    assert len(made.engine.calls) == 6


def test_a_group_that_must_wait_is_asked_for_again_while_others_run(store):
    """Back-pressure of two groups: the third is begun once the learner has taken the first, in the same round."""
    made = rollout(group_size=1, task_stream=lambda group_id: {"task": "t", "turns": 1 if group_id == 0 else 2})
    asked = []

    def refresh():
        asked.append(store.take(1, len(asked)))  # a learner that is fast

    assert run_groups(made, store, 3, Terms(admission=Admission(max_pending=2)), refresh=refresh) == 3


def test_a_group_of_its_own_that_lapsed_during_a_long_turn_is_not_made_twice_at_once(store):
    made = rollout(engine=ScriptedEngine(random_words, num_slots=9))
    task = {"task": "t", "turns": 2}

    def refresh():  # another producer's call finds the reservations lapsed
        store._db.execute("DELETE FROM reservations")

    assert run_groups(dataclasses.replace(made, task_stream=lambda _: task), store, 4, refresh=refresh) == 4
    groups = store.take(4, 0)
    assert [len({e.episode_id for e in group}) for group in groups] == [3] * 4


def test_a_group_past_its_deadline_is_whole_and_its_task_is_asked_as_often_as_any(store, monkeypatch):
    """Every third task never ends by itself: its groups are neither rarer nor smaller, and they hold nobody up."""
    engine = ScriptedEngine(random_words, num_slots=9)
    clock = types.SimpleNamespace(monotonic=lambda: len(engine.calls))
    monkeypatch.setattr(conversation, "time", clock)
    monkeypatch.setattr(worker, "time", clock)
    made = rollout(
        engine=engine,
        task_stream=lambda group_id: {"task": f"task {group_id % 3}", "turns": 10**9 if group_id % 3 == 1 else 1},
        limits=Limits(group_seconds=2.5),
    )
    assert run_groups(made, store, 9) == 9
    groups = store.take(9, 0)
    assert [group[0].task_id for group in groups] == ["task 0", "task 1", "task 2"] * 3
    for index, group in enumerate(groups):
        ends = {(e.end_reason, e.metadata.get("deadline_passed", False)) for e in group}
        assert ends == ({("truncated", True)} if index % 3 == 1 else {("terminated", False)}) and len(group) == 3


def test_environments_are_made_once_for_all_rounds_and_closed_at_the_end(store, weights):
    made, closed = [], []

    class Costly(Counting):
        def __init__(self):
            made.append(self)

        def close(self):
            closed.append(self)

    parts = rollout(make_environment=Costly)
    for _ in range(3):
        run_groups(parts, store, 2)
    assert len(made) == 4 and not closed  # one a slot
    weights.publish({"w": np.ones(2)}, 0)
    run_worker(parts, store, weights, Terms(poll=0.001), should_stop=calls_until(20))
    assert len(made) == 4 and sorted(map(id, closed)) == sorted(map(id, made))


def test_a_slow_worker_holds_nobody_up(store, tmp_path, monkeypatch):
    """One has begun group 0 and is asleep in it; the other makes all, group 0 too, and the sleeper's comes too late."""
    now = 1000.0
    monkeypatch.setattr(sqlite, "time", types.SimpleNamespace(time=lambda: now))
    assert store.reserve("slow", 60.0) == 0
    fast = EpisodeStore(tmp_path / "episodes.sqlite")
    terms = Terms(owner="fast", admission=Admission(max_pending=3, straggler_seconds=20.0))
    assert run_groups(rollout(), fast, 10, terms) == 2
    assert store.take(3, 0) is None
    now += 21
    assert run_groups(rollout(), fast, 10, terms) == 1
    expected = [e for group in store.take(3, 0) for e in group]
    store.add(0, [msgspec.structs.replace(e, versions=[9]) for e in expected[:3]])
    assert list(store.episodes()) == expected
