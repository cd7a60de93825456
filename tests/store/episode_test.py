"""The record: what is refused, what passes, and the way through bytes."""

import math

import msgspec
import numpy as np
import pytest

from mpo_jax.store.episode import Episode, InvalidEpisode, decode, encode, validate

EPISODE = Episode(
    episode_id="e0",
    group_id=3,
    task_id="capital",
    tokens=[9, 9, 5, 6, 9, 7, 2],  # prompt, action, observation, action
    action_mask=[False, False, True, True, False, True, True],
    executable_mask=[False, False, False, True, False, True, True],
    turn_ids=[0, 0, 0, 0, 1, 1, 1],
    logprobs=[0.0, 0.0, -0.5, -1.5, 0.0, -2.0, 0.00005],
    rewards=[0.0, 1.0],
    state_ids=[4, 4],
    versions=[1, 2],
    end_reason="terminated",
    metadata={"success": True, "actions": ["a", "b"]},
)


def changed(field, index, value):
    values = list(getattr(EPISODE, field))
    values[index] = value
    return msgspec.structs.replace(EPISODE, **{field: values})


def test_round_trip():
    assert decode(encode(EPISODE)) == EPISODE


def test_an_episode_that_failed_before_it_acted_is_valid():
    empty = {field: [] for field in ("tokens", "action_mask", "executable_mask", "turn_ids", "logprobs")}
    turns = {field: [] for field in ("rewards", "state_ids", "versions")}
    validate(msgspec.structs.replace(EPISODE, **empty, **turns))


def test_nan_reward_is_not_refused():
    assert math.isnan(decode(encode(changed("rewards", 0, math.nan))).rewards[0])


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_BUG_099_non_finite_logprob_of_a_sampled_token_is_refused(value):
    with pytest.raises(InvalidEpisode, match=r"'e0'.*logprobs of length 7.*index 3.*finite"):
        encode(changed("logprobs", 3, value))


@pytest.mark.parametrize("field", ["action_mask", "executable_mask", "turn_ids", "logprobs", "state_ids", "versions"])
def test_BUG_015_lists_of_different_lengths_are_refused(field):
    with pytest.raises(InvalidEpisode, match=rf"{field} has length \d, expected \d"):
        validate(msgspec.structs.replace(EPISODE, **{field: getattr(EPISODE, field)[:-1]}))


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("tokens", 0, -1, "tokens .*index 0"),
        ("tokens", 0, 2**31, "tokens .*index 0"),
        ("turn_ids", 0, -1, "turn_ids .*index 0"),
        ("turn_ids", 4, 0, None),
        ("turn_ids", 4, 2, "turn_ids .*index 4.*gap"),
        ("turn_ids", 6, 0, "turn_ids .*index 6.*decreasing"),
        ("turn_ids", 6, 2, "turn_ids .*below 2"),
        ("executable_mask", 4, True, "executable_mask .*index 4"),
        ("logprobs", 2, 0.001, "logprobs .*index 2.*at most 0"),
        ("logprobs", 4, -0.1, "logprobs .*index 4.*0 off"),
        ("logprobs", 4, math.nan, "logprobs .*index 4.*0 off"),
        ("state_ids", 1, -1, "state_ids .*index 1"),
        ("versions", 1, -1, "versions .*index 1"),
        ("tokens", 1, 10**30, "too large"),
    ],
)
def test_values_that_break_a_rule_are_refused(field, index, value, message):
    episode = changed(field, index, value)
    if message is None:
        validate(episode)
    else:
        with pytest.raises(InvalidEpisode, match=message):
            validate(episode)


def test_bug_013_a_turn_without_a_sampled_token_is_refused():
    mask = [False, False, True, True, False, False, False]
    logprobs = [0.0, 0.0, -0.5, -1.5, 0.0, 0.0, 0.0]
    with pytest.raises(InvalidEpisode, match=r"rewards of length 2 .*index 1.*sampled token"):
        validate(msgspec.structs.replace(EPISODE, action_mask=mask, executable_mask=mask, logprobs=logprobs))


@pytest.mark.parametrize("value", [np.int32(5), 5.5, "5"])
def test_values_of_another_type_are_refused_before_they_are_stored(value):
    with pytest.raises(InvalidEpisode, match="'e0'"):
        encode(changed("tokens", 0, value))


def test_damaged_bytes_are_refused():
    record = encode(EPISODE)
    unknown = msgspec.msgpack.encode(msgspec.to_builtins(EPISODE) | {"reward": 1.0})
    for damaged in (b"", record[:-3], b"\xff" + record, msgspec.msgpack.encode({"tokens": "x"}), unknown):
        with pytest.raises(InvalidEpisode, match=f"{len(damaged)} bytes is no episode"):
            decode(damaged)
