"""An episode as a scorer sees it: messages, which of them are actions, and what else its file says."""

from collections.abc import Sequence

import msgspec
import numpy as np

from mpo_jax.store.episode import LOGPROB_TOLERANCE


class InvalidTranscript(ValueError):
    """An episode that cannot be scored; the message names the file, the place in it and the field."""


class Message(msgspec.Struct, frozen=True):
    """One message of an episode. Steps are the messages that are actions.

    Attributes:
      role: who speaks, as in the file ("assistant", "user", "tool", "Orchestrator (-> WebSurfer)").
      text: what was said, tool calls written out.
      action: the message is one of the agent's own; the others are context and have no score.
      agent: the name in that, where several agents work together.
      logprobs: of its sampled tokens, where the file has them.
      ref_logprobs: of the same tokens under the reference, where the file has them.
      score: that somebody else gave the message, a process reward model for example.
    """

    role: str
    text: str
    action: bool
    agent: str = ""
    logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    score: float | None = None


class Tokens(msgspec.Struct, frozen=True):
    """The n ids of an episode, where its file has them; they are scored as they are, never tokenised again.

    Attributes:
      ids: n ids.
      messages: n indices of the message that each belongs to.
      mask: n flags, sampled by the agent; true in actions only.
    """

    ids: list[int]
    messages: list[int]
    mask: list[bool]


class Mistake(msgspec.Struct, frozen=True):
    """The decisive error of a failed episode, as people labelled it: the agent, and the message's index from 0."""

    agent: str
    step: int


class Transcript(msgspec.Struct, frozen=True):
    """One episode.

    Attributes:
      episode_id: unique in its file.
      task_id: equal for the attempts at one task.
      messages: in order.
      reward: None where the file has none.
      answer: the final answer, for majority voting; None where the file has none.
      scores: other numbers that the file gives the episode, by name.
      tokens: None where the file has text only.
      mistake: None where nobody labelled one.
    """

    episode_id: str
    task_id: str
    messages: list[Message]
    reward: float | None = None
    answer: str | None = None
    scores: dict[str, float] = {}
    tokens: Tokens | None = None
    mistake: Mistake | None = None


def validate(transcript: Transcript) -> None:
    """Checks what the types cannot say.

    Raises:
      InvalidTranscript: naming the field, and what was expected.
    """
    if not transcript.messages:
        raise InvalidTranscript("no messages, expected at least one")
    _check_number("reward", transcript.reward)
    _check_text("the episode's id or task", f"{transcript.episode_id} {transcript.task_id}")
    for index, message in enumerate(transcript.messages):
        _check_text(f"messages[{index}]", f"{message.role} {message.agent} {message.text}")
        _check_number(f"messages[{index}].score", message.score)
        for field in ("logprobs", "ref_logprobs"):
            _check_logprobs(f"messages[{index}].{field}", getattr(message, field))
        if None not in (message.logprobs, message.ref_logprobs) and len(message.logprobs) != len(message.ref_logprobs):
            raise InvalidTranscript(
                f"messages[{index}].ref_logprobs has length {len(message.ref_logprobs)}, "
                f"expected {len(message.logprobs)} as logprobs"
            )
    if (tokens := transcript.tokens) is not None:
        n = len(tokens.ids)
        for field in ("messages", "mask"):
            if len(getattr(tokens, field)) != n:
                raise InvalidTranscript(f"tokens.{field} has length {len(getattr(tokens, field))}, expected {n}")
        for index in {index for index, sampled in zip(tokens.messages, tokens.mask, strict=True) if sampled}:
            if not transcript.messages[index].action:
                raise InvalidTranscript(f"tokens.mask is true in messages[{index}], which is no action")
    if (mistake := transcript.mistake) is not None and not 0 <= mistake.step < len(transcript.messages):
        raise InvalidTranscript(f"mistake_step is {mistake.step}, expected 0..{len(transcript.messages) - 1}")


def _check_number(field: str, value: float | None) -> None:
    if value is not None and not np.isfinite(value):
        raise InvalidTranscript(f"{field} is {value}, expected a finite number")


def _check_text(field: str, text: str) -> None:
    """JSON can spell half of a character, which no tokenizer and no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidTranscript(f"{field} holds the lone surrogate {text[error.start]!a}") from error


def _check_logprobs(field: str, values: Sequence[float] | None) -> None:
    if values is None:
        return
    wrong = ~np.isfinite(values) | (np.asarray(values, np.float64) > LOGPROB_TOLERANCE)
    if wrong.any():
        first = int(wrong.argmax())
        raise InvalidTranscript(f"{field}[{first}] is {values[first]}, expected a finite log-probability, at most 0")
