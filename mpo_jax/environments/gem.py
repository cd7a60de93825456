"""Games of gem-llm: GuessTheNumber, Mastermind, Minesweeper and more, answered in `\\boxed{}`."""

from typing import Any

import gymnasium

from mpo_jax.environments.adapting import require, stand_in
from mpo_jax.environments.text import AnyText


class Gem(gymnasium.Env):
    """One game of *GEM: A Gym for Agentic LLMs* (arXiv:2510.01051), from the package `gem-llm`.

    The games draw from Python's global random numbers: two of them in one process disturb each other, so run each
    isolated (`mpo_jax.environments.isolated`), as the programs do.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own convention

    def __init__(self, game: str = "game:GuessTheNumber-v0-hard"):
        """Makes the game.

        Args:
          game: a name of the package's registry.

        Raises:
          ImportError: the package is not installed.
        """
        require("gem", "gem-llm")
        stand_in("pycosat")  # a solver, to be compiled from source; one puzzle of reasoning-gym needs it, no game
        import gem
        import gem.envs  # fills the registry
        from gem.utils.constants import LanguageGameReward

        self.game, self._success = gem.make(game), LanguageGameReward.success_reward
        self._name = game
        self.observation_space, self.action_space = AnyText(), AnyText()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict[str, Any]]:
        """Starts a game; `options={"task": n}` is game number n, else `seed` is its number.

        Returns:
          The rules, and info: task_id, success.
        """
        super().reset(seed=seed)
        task = (options or {}).get("task", seed)
        self._task_id = f"{self._name}/{task}"
        text, info = self.game.reset(seed=task)
        return f"{text}\n{info.get('suffix', '')}".strip(), {"task_id": self._task_id, "success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes one turn.

        Returns:
          The game's observation and reward; it reports its turn limit as both ends at once, here it is truncation
          alone; and info as `reset`.
        """
        text, reward, ended, truncated, info = self.game.step(action)
        terminated = bool(ended and not truncated)
        success = terminated and reward >= self._success
        if not (ended or truncated):
            text = f"{text}\n{info.get('suffix', '')}".strip()
        return text, float(reward), terminated, bool(truncated), {"task_id": self._task_id, "success": success}
