"""The record of one episode: what crosses from a rollout process to the learner. No pickle, no text re-tokenised."""

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

LOGPROB_TOLERANCE = 1e-4  # engines round: a log-probability may come out a little above 0
MAX_RECORD_BYTES = 2**26  # 64 MiB: some four million tokens; no episode is that long, but a hostile record may be
RECORD_VERSION = 1  # another number is another meaning of the fields, and is refused
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)  # what is finite in a record must be so in a batch


EndReason = Literal["terminated", "truncated", "turn_limit", "token_limit"]


class InvalidEpisode(ValueError):
    """A record that no learner may train on; the message names the field, its size and what was expected."""


class Episode(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="record",
    tag=RECORD_VERSION,
):
    """One finished episode of n tokens and m turns, token-in token-out. One that failed before it acted has none.

    Encoded, it also has a `record`, the version of this layout; a record without one is of version 1.

    Attributes:
      episode_id: unique in its store.
      group_id: index of the group (the episodes of one prompt).
      task_id: the environment's name of the task.
      tokens: n ids: prompt, actions, observations, in the order that the engine saw them.
      action_mask: n flags, true on tokens that the policy sampled.
      executable_mask: n flags, the part of each action that the environment executed.
      turn_ids: n ids 0..m-1; an observation belongs to the turn that it precedes, a trailing one to the turn before.
      logprobs: n numbers, log-probabilities of sampled tokens under the engine; 0 elsewhere.
      rewards: m numbers, one a turn; NaN where the environment failed (the learner masks and counts that episode).
      state_ids: m ids; equal ids mean the same environment state of the same task.
      versions: m numbers, the weights' version that sampled each turn (the oldest, if they changed within it).
      end_reason: "terminated" by the environment, or cut by the "turn_limit", the "token_limit" or the environment's
        own limit ("truncated").
      metadata: anything printable that a person or a scorer may want (question, answer, texts).
      experts: of a policy with experts whose engine keeps them, those that read each token but the last: n−1 times
        L·k numbers, by layer, of one byte each, or two where there are more than 256. Empty otherwise, and not written.
        Of Qwen3-30B-A3B, 48 layers of 8, that is 384 bytes a token beside some 20 of all the rest.
    """

    episode_id: str
    group_id: int
    task_id: str
    tokens: list[int]
    action_mask: list[bool]
    executable_mask: list[bool]
    turn_ids: list[int]
    logprobs: list[float]
    rewards: list[float]
    state_ids: list[int]
    versions: list[int]
    end_reason: EndReason
    metadata: dict[str, str | int | float | bool | list[str | float]] = {}
    experts: bytes = b""


def validate(episode: Episode, vocab_size: int | None = None) -> None:
    """Checks that the record's lists agree with each other and hold what their names say.

    A NaN reward passes: it masks its own episode and is counted later. A non-finite log-probability of a sampled
    token does not: the engine was broken, and no clamp may hide that.

    Args:
      episode: of n tokens and m turns.
      vocab_size: ids from it on are refused; None where the model is not known.

    Raises:
      InvalidEpisode: naming the first field that is wrong, its length, where, and what was expected.
    """
    if not 0 <= episode.group_id <= _INT32_MAX:
        raise InvalidEpisode(f"episode {episode.episode_id!r}: group_id is {episode.group_id}, expected an index")
    n, m = len(episode.tokens), len(episode.rewards)
    sizes = {
        "action_mask": (episode.action_mask, n, "token"),
        "executable_mask": (episode.executable_mask, n, "token"),
        "turn_ids": (episode.turn_ids, n, "token"),
        "logprobs": (episode.logprobs, n, "token"),
        "state_ids": (episode.state_ids, m, "reward"),
        "versions": (episode.versions, m, "reward"),
    }
    for field, (values, size, unit) in sizes.items():
        if len(values) != size:
            raise InvalidEpisode(
                f"episode {episode.episode_id!r}: {field} has length {len(values)}, expected {size} (one a {unit})"
            )
    if episode.experts and (n < 2 or len(episode.experts) % (n - 1)):
        raise InvalidEpisode(
            f"episode {episode.episode_id!r}: experts has {len(episode.experts)} bytes, expected as many for each of "
            f"{max(n - 1, 0)} tokens"
        )
    try:
        for field, wrong, expected in _rules(episode, vocab_size or _INT32_MAX + 1):
            if wrong.any():
                raise InvalidEpisode(
                    f"episode {episode.episode_id!r}: {field} of length {len(wrong)} is wrong at index "
                    f"{int(wrong.argmax())}: expected {expected}"
                )
    except (OverflowError, TypeError) as error:
        raise InvalidEpisode(f"episode {episode.episode_id!r}: {error}") from error


def _rules(episode: Episode, vocab_size: int) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yields (field, where it is broken, what was expected); each rule may rely on the ones before it."""
    tokens, turn_ids = (np.asarray(ids, np.int64) for ids in (episode.tokens, episode.turn_ids))
    state_ids, versions = (np.asarray(ids, np.int64) for ids in (episode.state_ids, episode.versions))
    sampled, executed = (np.asarray(mask, bool) for mask in (episode.action_mask, episode.executable_mask))
    logprobs, num_turns = np.asarray(episode.logprobs, np.float64), len(episode.rewards)

    yield "tokens", (tokens < 0) | (tokens >= vocab_size), f"ids in 0..{vocab_size - 1}"
    for field, ids in (("state_ids", state_ids), ("versions", versions)):
        yield field, (ids < 0) | (ids > _INT32_MAX), f"ids in 0..{_INT32_MAX}"
    step = np.diff(turn_ids, prepend=-1)
    yield "turn_ids", (step < 0) | (step > 1) | (turn_ids < 0), "0, 1, 2, … without a gap, never decreasing"
    yield "turn_ids", turn_ids >= num_turns, f"ids below {num_turns}, the number of rewards"
    actions = np.bincount(turn_ids[sampled], minlength=num_turns)
    yield "rewards", actions == 0, "a turn with at least one sampled token for each"
    yield "executable_mask", executed & ~sampled, "true on sampled tokens (action_mask) only"
    yield "logprobs", sampled & ~(np.abs(logprobs) < _FLOAT32_MAX), "finite numbers on sampled tokens"
    yield "logprobs", sampled & (logprobs > LOGPROB_TOLERANCE), "log-probabilities, at most 0, on sampled tokens"
    yield "logprobs", ~sampled & (logprobs != 0), "0 off the sampled tokens"


def read_experts(episode: Episode, shape: tuple[int, int], num_experts: int, id_type: str) -> np.ndarray:
    """The experts that read each token of an episode; −1 for the last, and everywhere where the record has none.

    Args:
      episode: of n tokens.
      shape: (L, k), layers with experts and experts a token.
      num_experts: E, of each layer.
      id_type: numpy's name of the type that they are written in.

    Returns:
      int16[n,L,k].

    Raises:
      InvalidEpisode: another number of bytes, or an expert that there is not: they are another model's.
    """
    experts = np.full((len(episode.tokens), *shape), -1, np.int16)
    if not episode.experts:
        return experts
    expected = experts[:-1].size * np.dtype(id_type).itemsize
    if len(episode.experts) != expected:
        raise InvalidEpisode(
            f"episode {episode.episode_id!r}: experts has {len(episode.experts)} bytes, expected {expected}: "
            f"{shape[1]} experts of each of {shape[0]} layers for each of {len(experts) - 1} tokens"
        )
    experts[:-1] = np.frombuffer(episode.experts, id_type).reshape(-1, *shape)
    if (found := experts.max()) >= num_experts:
        raise InvalidEpisode(f"episode {episode.episode_id!r}: experts has {found}, expected 0..{num_experts - 1}")
    return experts


_decoder = msgspec.msgpack.Decoder(Episode)


def encode(episode: Episode, vocab_size: int | None = None) -> bytes:
    """Packs a valid episode as msgpack.

    Raises:
      InvalidEpisode: the record does not hold together, a field has another type (a numpy scalar, say), or it is
        longer than `MAX_RECORD_BYTES`.
    """
    try:
        record = msgspec.msgpack.encode(episode)
        _decoder.decode(record)  # structs do not check types when built: better refused here than by the reader
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
        raise InvalidEpisode(f"episode {episode.episode_id!r}: {error}") from error
    _check_size(record)
    validate(episode, vocab_size)
    return record


def decode(record: bytes, vocab_size: int | None = None) -> Episode:
    """Unpacks what `encode` packed, checking types and values.

    Raises:
      InvalidEpisode: the bytes are damaged, too many, of another schema or version, or the record does not hold
        together.
    """
    _check_size(record)
    try:
        episode = _decoder.decode(record)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidEpisode(
            f"a record of {len(record)} bytes is no episode of record version {RECORD_VERSION}: {error}"
        ) from error
    validate(episode, vocab_size)
    return episode


def _check_size(record: bytes) -> None:
    if len(record) > MAX_RECORD_BYTES:
        raise InvalidEpisode(f"a record of {len(record)} bytes is no episode: expected at most {MAX_RECORD_BYTES}")
