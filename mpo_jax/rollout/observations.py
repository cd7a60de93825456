"""What an environment says, checked before any of it is kept: a tool may answer anything at all."""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpo_jax.environments.text import MAXIMAL_TEXT, cut

CHARACTERS_A_TOKEN = 64  # more than any text has on average: what is cut off after so many would not be read either
_MAXIMAL_ID, _MAXIMAL_INTEGER = 2**31 - 1, 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Observation:
    """What an environment said at one step.

    Attributes:
      text: what the policy is to read, or more of it.
      task_id: the environment's name of the task, where it told one.
      state_id: what it told, or a checksum of the whole text: equal for equal states.
      notes: the entries of its info that a record's metadata can hold.
    """

    text: str
    task_id: str | None
    state_id: int
    notes: dict[str, Any]


def observe(text: Any, info: Any, tokens: int) -> Observation:
    """Checks what an environment has returned, and cuts megabytes before anyone tokenises them.

    Args:
      text: the observation.
      info: its info.
      tokens: the most that will be read of the text.

    Raises:
      ValueError: the text is none or holds half a surrogate pair, which is no character; or the info is no mapping, or
        its `state_id` no id.
    """
    if not isinstance(text, str):
        raise ValueError(f"the observation is a {type(text).__name__}, expected a text")
    if not isinstance(info, Mapping):
        raise ValueError(f"the info is a {type(info).__name__}, expected a mapping")
    try:
        checksum = zlib.crc32(text.encode()) >> 1
    except UnicodeEncodeError as error:
        raise ValueError(f"the observation of {len(text)} characters is not all text: {error}") from error
    state_id = int(info.get("state_id", checksum))
    if not 0 <= state_id <= _MAXIMAL_ID:
        raise ValueError(f"the info's state_id is {state_id}, expected 0..{_MAXIMAL_ID}")
    task_id = None if "task_id" not in info else legible(str(info["task_id"]))
    return Observation(text[: CHARACTERS_A_TOKEN * tokens], task_id, state_id, _notes(info))


def legible(text: str) -> str:
    """A text for a record: what is no character is spelt out, and megabytes are cut."""
    return cut(text.encode(errors="backslashreplace").decode())


def _notes(info: Mapping[Any, Any]) -> dict[str, Any]:
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in info.items()}
    notes = {}
    for key, value in plain.items():
        if not isinstance(key, str) or key in ("task_id", "state_id"):
            continue
        if isinstance(value, str):
            notes[legible(key)] = legible(value)
        elif isinstance(value, float) or (isinstance(value, int) and abs(value) <= _MAXIMAL_INTEGER):
            notes[legible(key)] = value
        elif _texts(value) and sum(map(len, value)) <= MAXIMAL_TEXT:
            notes[legible(key)] = [legible(item) for item in value]
    return notes


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
