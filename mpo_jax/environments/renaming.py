"""The search environment with names that nobody has seen: what an agent learns there, it learns to read."""

import random
from typing import Any

import gymnasium

from mpo_jax.environments.demonstrations import made_up_name, renamed
from mpo_jax.environments.questions import Question


class RenamedEnvironment(gymnasium.Wrapper):
    """Shows made-up names in the place of a question's entities, and reads them back in actions.

    `reset(options={"question": …, "rename": {old: new}})` sets the names of an episode; without "rename" it changes
    nothing.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begins an episode, under the names given."""
        options = dict(options or {})
        self._shown = options.pop("rename", {})
        self._meant = {new: old for old, new in self._shown.items()}
        observation, info = self.env.reset(seed=seed, options=options)
        return renamed(observation, self._shown), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Acts in the real names; shows the result in the made-up ones."""
        observation, reward, terminated, truncated, info = self.env.step(renamed(action, self._meant))
        return renamed(observation, self._shown), reward, terminated, truncated, info


def new_names(question: Question, rng: random.Random) -> dict[str, str]:
    """A made-up name for each entity of a question, no two alike."""
    names: dict[str, str] = {}
    for entity in question.entities:
        name = made_up_name(rng)
        while name in names.values():
            name = made_up_name(rng)
        names[entity] = name
    return names
