"""What the agent loop asks of an engine and a tokenizer, and a worker of where its groups go and its weights come from.

Token-in, token-out: engine and tokenizer speak ids, appended only.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from mpo_jax.store.admission import Admission
from mpo_jax.store.episode import Episode


@dataclasses.dataclass(frozen=True)
class Generation:
    """One sampled turn.

    Attributes:
      tokens: the sampled ids, at least one; the last is a stop id where `finish_reason` is "stop".
      logprobs: the policy's own log-probability of each sampled id, over the whole vocabulary at temperature 1.
      finish_reason: "stop" = the policy ended its turn, by any stop id; "length" = cut by a limit, nothing appended.
      progress: score of the turn by a monitor; None without one.
      flagged: whether the monitor flags the episode as of this turn.
      experts: of the tokens since those of the turn before, this turn's last left out, which nothing has read yet: what
        is appended to `Episode.experts`. Empty where the engine keeps none.

    Raises:
      ValueError: no tokens, or not one log-probability a token.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    progress: float | None = None
    flagged: bool = False
    experts: bytes = b""

    def __post_init__(self):
        if not self.tokens or len(self.tokens) != len(self.logprobs):
            raise ValueError(
                f"a generation of {len(self.tokens)} tokens and {len(self.logprobs)} logprobs: "
                "expected at least one token and one logprob each"
            )


@runtime_checkable
class Engine(Protocol):
    """Samples turns in slots, each with a context that only grows and a KV cache that is kept between turns.

    Attributes:
      num_slots: contexts side by side.
      context_length: the most ids that one context holds.
      version: of the weights that sample.
      exact: turns are drawn from the policy's own distribution, the one that their log-probabilities are of.
    """

    num_slots: int
    context_length: int
    version: int
    exact: bool

    def generate(self, new_tokens: dict[int, list[int]], seeds: dict[int, int]) -> dict[int, Generation]:
        """Appends ids to the context of each named slot and begins a turn there, which joins the context too.

        Returns the turns that have ended, of all that are under way; the others go on at the next call, in which they
        are not named. What a slot samples depends on its own context and seed alone, never on the other slots.
        """

    def free(self, slot: int) -> None:
        """Forgets the slot's context."""

    def load(self, params: Any, version: int) -> None:
        """Replaces the weights, between calls; nothing computed with the old ones is used again."""


@runtime_checkable
class Tokenizer(Protocol):
    """Turns the environment's text into ids and the policy's ids into text; no id is ever made from sampled text."""

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""

    def render_prompt(self, text: str, limit: int | None = None) -> list[int]:
        """Ids before the first action: the template's own, at most `limit` of the text's, the next turn's header."""

    def render_observation(self, text: str, limit: int | None = None) -> list[int]:
        """Ids between two actions: what the template adds after an end of turn, the text's as above, a header."""


@runtime_checkable
class GroupStore(Protocol):
    """What a producer asks of the episode store, in this process or another; see `store.sqlite.EpisodeStore`."""

    def reserve(self, owner: str, lease: float, admission: Admission = Admission()) -> int | None:
        """The index of a group to make, or None for none now."""

    def renew(self, owner: str, lease: float) -> None:
        """Extends what the producer has reserved."""

    def release(self, owner: str) -> None:
        """Gives up what the producer has reserved."""

    def add(self, group_id: int, episodes: Sequence[Episode]) -> None:
        """Stores a whole group; one that is stored already is left as it is."""


@runtime_checkable
class WeightSource(Protocol):
    """Where a worker finds the newest weights; see `store.weights.PublishedWeights`."""

    def latest_version(self) -> int | None:
        """The newest version; None while there is none. Cheap enough to ask before every turn."""

    def load(self) -> tuple[dict[str, np.ndarray], int]:
        """The newest parameters, by flat names, and their version."""
