"""One episode under way: an append-only list of ids, from the environment's reset to the record that is stored.

What the engine sampled is stored as it came, so the record is what the policy saw and did, and no sampled text is ever
made into ids again.
"""

import dataclasses
import logging
import math
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any

import gymnasium
import numpy as np

from mpo_jax.rollout.observations import Observation, legible, observe
from mpo_jax.rollout.protocol import Generation, Tokenizer
from mpo_jax.store.episode import Episode

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Job:
    """One episode to run.

    Attributes:
      episode_id: of the record.
      group_id: of the record; the episodes of one group share `options` and `environment_seed`.
      options: passed to the environment's reset; they name the task.
      environment_seed: passed to the environment's reset.
      seed: of the policy's sampling; with the turn's index it gives every turn its own.
      deadline: on `time.monotonic`'s clock; see `Limits.group_seconds`.
    """

    episode_id: str
    group_id: int
    options: Mapping[str, Any]
    environment_seed: int
    seed: int
    deadline: float = math.inf


@dataclasses.dataclass(frozen=True)
class Limits:
    """Where episodes are cut.

    Attributes:
      observation_tokens: the longest observation, in ids of its text without the template; the rest is cut off.
      turns: the most turns; None leaves it to the environment.
      action_tokens: the fewest ids that must be left in the context for a turn to begin.
      flagged: end an episode that a monitor flags.
      group_seconds: from when a group is begun until its unfinished episodes are cut, between two turns, with what they
        have earned by then: "truncated", and the group is whole. They are kept, because a group that waited for ever
        would hold up all others, one that was dropped would take its task with it, most often a slow task, and one
        without its slow members would compare the quick ones among themselves. None for no deadline.
    """

    observation_tokens: int = 256
    turns: int | None = None
    action_tokens: int = 1
    flagged: bool = False
    group_seconds: float | None = None

    def __post_init__(self):
        for field in ("observation_tokens", "turns", "action_tokens"):
            if (limit := getattr(self, field)) is not None and limit < 1:
                raise ValueError(f"limits: {field} is {limit}, expected at least 1")
        if self.group_seconds is not None and not self.group_seconds > 0:
            raise ValueError(f"limits: group_seconds is {self.group_seconds}, expected a positive number")


def whole_action(tokens: list[int]) -> list[bool]:
    """The executable part of an action whose policy writes no reasoning: all of it."""
    return [True] * len(tokens)


def derive_seed(*path: int) -> int:
    """A seed in 0..2^31-1 of its own for each path of numbers (run, group, member, turn)."""
    return int(np.random.SeedSequence(path).generate_state(1)[0] >> 1)


class Conversation:
    """A running episode: the append-only lists of its record, and the ids that the policy has yet to read.

    Policy and environment take turns: while `answer` is there, it is the environment's, which `hear` ends.

    - Its end by the environment is "terminated" or "truncated", by `limits.turns` "turn_limit".
    - A turn that the engine cuts still reaches the environment and earns its reward, but has no end: the episode ends
      there as "token_limit". So does one whose next observation leaves no room for an action; that observation is
      dropped, and the engine not asked.
    - One that a monitor flags (`rollout.monitor`) has its first such turn as `metadata["flagged_turn"]`, and ends there
      as "truncated" where `limits.flagged` says so. The turns' scores are `metadata["progress"]`.
    - One whose deadline has passed is cut before its next turn, or its first: it ends as "truncated", with
      `metadata["deadline_passed"]`.
    - One whose environment raises, or says what is no observation or cannot be framed by the template, ends as
      "truncated" with `metadata["error"]` and NaN as its last reward (no turns at all if it failed before the first):
      the learner masks and counts it.
    """

    def __init__(
        self,
        job: Job,
        environment: gymnasium.Env,
        tokenizer: Tokenizer,
        context_length: int,
        limits: Limits,
        executable: Callable[[list[int]], list[bool]],
    ):
        self.job, self.environment, self.tokenizer = job, environment, tokenizer
        self.context_length, self.limits, self.executable = context_length, limits, executable
        self.task_id, self.end_reason, self.error = str(job.group_id), "", ""
        self.unread: list[int] = []
        self.answer: Future | None = None
        self.last: Generation | None = None  # the newest turn
        self.next_state_id = 0
        self.tokens, self.action_mask, self.executable_mask, self.turn_ids, self.logprobs = [], [], [], [], []
        self.rewards, self.state_ids, self.versions = [], [], []
        self.observations, self.actions, self.progress, self.notes = [], [], [], {}
        self.experts = b""

    def start(self, executor: Executor) -> None:
        """Has the environment reset there."""
        self.watch_the_clock()
        if not self.end_reason:
            seed, options = self.job.environment_seed, dict(self.job.options)
            self.answer = executor.submit(self.environment.reset, seed=seed, options=options)

    def watch_the_clock(self) -> None:
        """Cuts an episode that has not ended by its deadline; a turn that is being sampled is dropped."""
        if not (self.end_reason or self.answer) and time.monotonic() > self.job.deadline:
            self.end_reason, self.notes["deadline_passed"] = "truncated", True

    def act(self, generation: Generation, version: int, executor: Executor) -> None:
        """Appends what the policy has read and sampled, and has the environment take the action there."""
        self._append(self.unread, [0.0] * len(self.unread), sampled=False)
        self._append(generation.tokens, generation.logprobs, sampled=True)
        self.experts += generation.experts
        self.state_ids.append(self.next_state_id)
        self.versions.append(version)
        stopped = generation.finish_reason == "stop"
        action = self.tokenizer.decode(generation.tokens[:-1] if stopped else generation.tokens)
        self.actions.append(action)
        self.progress += [] if generation.progress is None else [generation.progress]
        if generation.flagged:
            self.notes.setdefault("flagged_turn", len(self.rewards))
        self.last = generation
        self.answer = executor.submit(self.environment.step, action)

    def hear(self) -> None:
        """Reads what the environment answers, waiting for it if need be."""
        answer, self.answer = self.answer, None
        try:
            if self.last is None:
                text, info = answer.result()
            else:
                text, reward, terminated, truncated, info = answer.result()
                reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
            observation = observe(text, info, self.limits.observation_tokens)
        except Exception as error:
            self.rewards += [] if self.last is None else [math.nan]
            self._fail(error)
            return
        if self.last is None:
            self.task_id = observation.task_id or self.task_id
            self._read(observation, self.tokenizer.render_prompt)
        else:
            self.rewards.append(reward)
            self.end_reason = self._end(terminated, truncated)
            self._read(observation, self.tokenizer.render_observation)

    def _end(self, terminated: bool, truncated: bool) -> str:
        """Why the episode ends with its last turn; empty if it goes on."""
        if self.last.finish_reason == "length":
            return "token_limit"
        if terminated or truncated:
            return "terminated" if terminated else "truncated"
        if len(self.rewards) == self.limits.turns:
            return "turn_limit"
        return "truncated" if self.last.flagged and self.limits.flagged else ""

    def _append(self, ids: list[int], logprobs: list[float], *, sampled: bool) -> None:
        self.tokens += ids
        self.logprobs += logprobs
        self.action_mask += [sampled] * len(ids)
        self.executable_mask += self.executable(ids) if sampled else [False] * len(ids)
        self.turn_ids += [len(self.rewards)] * len(ids)

    def _read(self, observation: Observation, render: Callable[[str, int], list[int]]) -> None:
        """Keeps what the environment says; the ids wait in `unread` and are stored with the turn that they lead to."""
        self.observations.append(observation.text)
        self.notes |= observation.notes
        self.next_state_id = observation.state_id
        if self.end_reason:
            return
        try:
            self.unread = render(observation.text, self.limits.observation_tokens)
        except ValueError as error:  # the template does not take the text
            self.rewards[-1:] = [math.nan] * bool(self.rewards)
            self._fail(error)
            return
        if len(self.tokens) + len(self.unread) + self.limits.action_tokens > self.context_length:
            self.end_reason = "token_limit"

    def _fail(self, error: Exception) -> None:
        trace = legible("".join(traceback.format_exception(error)))  # whatever bytes the error holds
        log.warning("episode %s: the environment failed\n%s", self.job.episode_id, trace)
        self.error = legible(f"{type(error).__name__}: {error}")
        self.end_reason = "truncated"

    def next_seed(self) -> int:
        """Of the sampling of its next turn."""
        return derive_seed(self.job.seed, len(self.rewards))

    def record(self) -> Episode:
        """The finished episode; texts, the environment's notes and its error, if it failed, are the metadata."""
        failure = {"error": self.error} if self.error else {}
        progress = {"progress": self.progress} if self.progress else {}
        return Episode(
            episode_id=self.job.episode_id,
            group_id=self.job.group_id,
            task_id=self.task_id,
            tokens=self.tokens,
            action_mask=self.action_mask,
            executable_mask=self.executable_mask,
            turn_ids=self.turn_ids,
            logprobs=self.logprobs,
            rewards=self.rewards,
            state_ids=self.state_ids,
            versions=self.versions,
            end_reason=self.end_reason,
            metadata=self.notes | {"observations": self.observations, "actions": self.actions} | progress | failure,
            experts=self.experts,
        )
