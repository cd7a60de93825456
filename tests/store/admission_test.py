"""Admission: a group is begun only if its weights are young enough when it is trained on."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpo_jax.store.admission import Admission
from mpo_jax.store.sqlite import EpisodeStore


def test_the_first_batch_is_admitted_without_staleness_bug_141():
    """K = 0, n = 2, P = 2, v = s = 0, nothing under way: min(2, (0 + 0 + 1 − 0)·2) − 0 = 2, whoever takes both."""
    bound = Admission(max_pending=2, max_staleness=0, groups_per_step=2)
    assert bound.capacity(next_step=0, ahead=0) == 2
    assert dataclasses.replace(bound, max_pending=1).capacity(next_step=0, ahead=0) == 1
    assert Admission().capacity(next_step=9, ahead=9) == math.inf


@pytest.mark.parametrize(
    ("staleness", "version", "next_step", "ahead", "capacity"),
    [
        (0, 3, 3, 1, 1),  # (3 + 0 + 1 − 3)·2 − 1
        (0, 3, 4, 0, 0),  # step 3 is under way with version 3: what begins now would be trained on at 4, a lag of 1
        (1, 3, 4, 0, 2),
        (2, 3, 4, 3, 1),  # (3 + 2 + 1 − 4)·2 − 3
        (2, 3, 9, 0, 0),  # weights that are long out of date
    ],
)
def test_capacity(staleness, version, next_step, ahead, capacity):
    assert Admission(max_staleness=staleness, groups_per_step=2, version=version).capacity(next_step, ahead) == capacity


@given(st.integers(0, 3), st.integers(1, 4), st.lists(st.sampled_from(["begin", "finish", "train", "publish"])))
def test_no_group_is_ever_too_old_and_the_bound_is_reached(staleness, size, events):
    """Any order of events: the lag of every group trained on is at most K, and nothing ever stands still."""
    admission = Admission(max_staleness=staleness, groups_per_step=size)
    begun, finished, trained, version = [], 0, 0, 0  # versions in order of index; groups trained on = trained·size
    for event in events:
        ahead = len(begun) - trained * size
        if event == "begin" and dataclasses.replace(admission, version=version).capacity(trained, ahead):
            begun.append(version)
        if event == "finish":
            finished = min(finished + 1, len(begun))
        if event == "publish":
            version = trained
        if event == "train" and version == trained and finished >= (trained + 1) * size:
            batch = begun[trained * size : (trained + 1) * size]
            assert trained - min(batch) <= staleness
            trained += 1
    if version == trained and finished == len(begun) and finished < (trained + 1) * size:  # the learner waits
        assert dataclasses.replace(admission, version=version).capacity(trained, len(begun) - trained * size)


@pytest.mark.parametrize(
    "bad", [{"max_staleness": -1}, {"groups_per_step": 0}, {"max_pending": 0}, {"straggler_seconds": -1.0}]
)
def test_bad_bounds_are_named(bad):
    with pytest.raises(ValueError, match=rf"{next(iter(bad))}={next(iter(bad.values()))}"):
        Admission(**bad)


def test_the_store_admits_by_what_waits_and_what_is_in_the_making(tmp_path):
    store = EpisodeStore(tmp_path / "episodes.sqlite")
    bound = Admission(max_staleness=1, groups_per_step=2)
    reserved = [store.reserve("a", 60.0, bound) for _ in range(5)]
    assert reserved == [0, 1, 2, 3, None]  # (0 + 1 + 1 − 0)·2 = 4 of them, BUG-143
    assert store.reserve("b", 60.0, dataclasses.replace(bound, version=1)) == 4
    store.release("a")
    assert store.reserve("b", 60.0, bound) == 0
    assert store.next_step() == 0
