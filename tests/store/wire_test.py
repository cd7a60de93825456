"""Hostile records: whatever bytes arrive, there is a valid episode or one clear error, and no other exception."""

import json
import math
import os
import sqlite3
import struct
import zlib

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpo_jax.store import episode as wire
from mpo_jax.store.episode import Episode, InvalidEpisode, decode, encode, validate
from mpo_jax.store.export import from_plain, parse_json
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.verifiers_results import from_row, to_row

VOCAB = 50
FUZZ = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "80")), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
VALID = Episode(
    episode_id="e0",
    group_id=3,
    task_id="capital",
    tokens=[9, 9, 5, 6, 9, 7, 2],
    action_mask=[False, False, True, True, False, True, True],
    executable_mask=[False, False, False, True, False, True, True],
    turn_ids=[0, 0, 0, 0, 1, 1, 1],
    logprobs=[0.0, 0.0, -0.5, -1.5, 0.0, -2.0, 0.0],
    rewards=[0.0, 1.0],
    state_ids=[4, 4],
    versions=[1, 2],
    end_reason="terminated",
    metadata={"success": True, "actions": ["a", "b"]},
)
RECORD = encode(VALID, VOCAB)
PLAIN = msgspec.to_builtins(VALID)
numbers = st.one_of(
    st.integers(-3, 60),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63)]),
    st.floats(),
    st.booleans(),
    st.none(),
)
values = st.recursive(
    st.one_of(numbers, st.text(max_size=5), st.binary(max_size=5)),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.sampled_from(["tokens", "info", "a"]), inner),
    max_leaves=6,
)


def valid_or_refused(read, *arguments):
    """Calls a reader; what it returns must hold together by rules written here once more."""
    try:
        found = read(*arguments)
    except InvalidEpisode as error:
        assert len(str(error)) > 20
        return None
    n, m = len(found.tokens), len(found.rewards)
    assert n == len(found.action_mask) == len(found.executable_mask) == len(found.turn_ids) == len(found.logprobs)
    assert m == len(found.state_ids) == len(found.versions)
    assert all(0 <= token < VOCAB for token in found.tokens) and all(version >= 0 for version in found.versions)
    assert all(-3.5e38 < logprob <= wire.LOGPROB_TOLERANCE for logprob in found.logprobs)
    assert sorted(set(found.turn_ids)) == list(range(m)) and found.turn_ids == sorted(found.turn_ids)
    return found


@FUZZ
@given(st.binary(max_size=200))
def test_any_bytes(record):
    assert valid_or_refused(decode, record, VOCAB) is None  # no 200 random bytes are an episode


@FUZZ
@given(st.integers(0, len(RECORD) - 1), st.integers(0, len(RECORD)), st.binary(max_size=9))
def test_a_record_of_which_a_part_was_replaced(begin, length, inserted):
    valid_or_refused(decode, RECORD[:begin] + inserted + RECORD[begin + length :], VOCAB)


@FUZZ
@given(st.sampled_from([*PLAIN, "record", "reward"]), values)
def test_a_field_that_holds_anything(field, value):
    valid_or_refused(decode, msgspec.msgpack.encode(PLAIN | {field: value}), VOCAB)


@FUZZ
@given(st.sampled_from([name for name, value in PLAIN.items() if isinstance(value, list)]), st.integers(0, 8), numbers)
def test_a_number_of_a_list_that_is_anything(field, index, value):
    changed = list(PLAIN[field])
    changed[index : index + 1] = [value]
    fields = PLAIN | {field: changed}
    found = valid_or_refused(decode, msgspec.msgpack.encode(fields), VOCAB)
    if found is not None:
        assert decode(encode(found, VOCAB), VOCAB).tokens == found.tokens


@FUZZ
@given(st.sampled_from([*PLAIN, "record", "reward"]), values)
def test_the_same_in_json(field, value):
    line = json.dumps(PLAIN | {field: value}, default=repr).encode()
    valid_or_refused(lambda: from_plain(parse_json(line), VOCAB))


@FUZZ
@given(st.sampled_from(["example_id", "reward", "info", "trajectory", "is_truncated"]), values, st.booleans())
def test_the_same_in_results(field, value, own):
    row = json.loads(json.dumps(to_row(VALID)))
    row = row if own else row | {"info": {}}
    valid_or_refused(from_row, row | {field: value}, 0, VOCAB)


@FUZZ
@given(st.sampled_from(["prompt_ids", "completion_ids", "completion_mask", "completion_logprobs"]), values)
def test_tokens_of_results_that_are_anything(field, value):
    row = json.loads(json.dumps(to_row(VALID)))
    row["trajectory"][1]["tokens"][field] = value
    valid_or_refused(from_row, row, 0, VOCAB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [9, -9, 5, 6, 9, 7, 2]}, "'e0': tokens of length 7 is wrong at index 1: expected ids in 0..49"),
        ({"tokens": [9, 9, 50, 6, 9, 7, 2]}, "'e0': tokens of length 7 is wrong at index 2: expected ids in 0..49"),
        ({"tokens": [9] * 6}, "'e0': action_mask has length 7, expected 6"),
        ({"logprobs": [0, 0, math.nan, -1, 0, -1, -1]}, "'e0': logprobs .*index 2: expected finite"),
        ({"logprobs": [0, 0, -1e39, -1, 0, -1, -1]}, "'e0': logprobs .*index 2: expected finite"),  # -inf in float32
        ({"group_id": -1}, "'e0': group_id is -1"),
        ({"group_id": 2**63}, "'e0': group_id is 9223372036854775808"),
        ({"record": 2}, "no episode of record version 1: Invalid value 2"),
        ({"record": "x"}, "no episode of record version 1"),
        ({"end_reason": "bored"}, "no episode of record version 1: Invalid enum value 'bored'"),
    ],
)
def test_each_kind_of_damage_has_its_message(changes, message):
    with pytest.raises(InvalidEpisode, match=message):
        decode(msgspec.msgpack.encode(PLAIN | changes), VOCAB)


def test_a_record_without_a_version_is_of_the_first():
    assert "record" in PLAIN
    assert decode(msgspec.msgpack.encode({k: v for k, v in PLAIN.items() if k != "record"})) == VALID


def test_oversized_records_are_refused_before_they_are_parsed(monkeypatch):
    monkeypatch.setattr(wire, "MAX_RECORD_BYTES", len(RECORD) - 1)
    with pytest.raises(InvalidEpisode, match=f"a record of {len(RECORD)} bytes .* at most {len(RECORD) - 1}"):
        decode(RECORD)
    with pytest.raises(InvalidEpisode, match=f"a record of {len(RECORD)} bytes .* at most {len(RECORD) - 1}"):
        encode(VALID)


@pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"])  # array, map, string, bytes of 2^32 - 1
def test_a_length_that_lies_takes_no_memory(header):
    tracemalloc = pytest.importorskip("tracemalloc")
    tracemalloc.start()
    with pytest.raises(InvalidEpisode):
        decode(b"\x81\xa6tokens" + header + struct.pack(">I", 2**32 - 1) + b"\x01" * 20)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_text_that_is_no_unicode_is_refused_when_written():
    with pytest.raises(InvalidEpisode, match=r"'e0': .*surrogates"):
        encode(msgspec.structs.replace(VALID, metadata={"observations": ["\ud800"]}))


def test_a_store_that_knows_the_vocabulary_refuses_and_quarantines(tmp_path):
    foreign = msgspec.structs.replace(VALID, tokens=[9, 9, 5, 6, 9, 7, 50])
    validate(foreign)
    store = EpisodeStore(tmp_path / "s.sqlite", vocab_size=VOCAB)
    with pytest.raises(InvalidEpisode, match=r"expected ids in 0\.\.49"):
        store.add(3, [foreign])
    for group_id in range(4):
        store.add(group_id, [msgspec.structs.replace(VALID, group_id=group_id)])
    record = encode(msgspec.structs.replace(foreign, group_id=1))
    swapped = encode(VALID)  # of group 3, in the place of group 2
    with sqlite3.connect(store.path) as db:
        update = "UPDATE episodes SET record = ?, checksum = ? WHERE group_id = ?"
        db.execute(update, (record, zlib.crc32(record), 1))
        db.execute(update, (swapped, zlib.crc32(swapped), 2))
    assert [group[0].group_id for group in store.take(2, 0)] == [0, 3]
    (first, _, ids), (second, _, group) = store.quarantined()
    assert (first, second) == (1, 2)
    assert "index 6: expected ids in 0..49" in ids and "group_id is 3, expected 2" in group
