"""Games of TextWorldExpress: coin, mapreader, arithmetic, cookingworld and more; needs Java."""

import shutil
from typing import Any

import gymnasium

from mpo_jax.environments.adapting import require
from mpo_jax.environments.text import AnyText


class TextWorldExpress(gymnasium.Env):
    """One kind of game of *TextWorldExpress* (arXiv:2208.01174), from the package `textworld-express`."""

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own convention

    def __init__(self, game: str = "coin", parameters: str = "", fold: str = "train", turn_limit: int = 50):
        """Starts the Java virtual machine.

        Args:
          game: a name that the package knows.
          parameters: of the game's generator, as in "numLocations=5,numDistractorItems=0".
          fold: "train", "dev" or "test".
          turn_limit: turns after which an episode is truncated.

        Raises:
          ImportError: the package or Java is not installed.
        """
        require("textworld_express", "textworld-express")
        if shutil.which("java") is None:
            raise ImportError("this environment needs Java")
        from textworld_express import TextWorldExpressEnv

        self.game = TextWorldExpressEnv(envStepLimit=turn_limit + 1)
        self.game.load(game, parameters)
        self._name, self._fold, self._turn_limit = f"{game}/{fold}", fold, turn_limit
        self.observation_space, self.action_space = AnyText(), AnyText()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict[str, Any]]:
        """Starts a game; `options={"task": n}` is the n-th of the fold's seeds, else `seed` is n.

        Returns:
          Task and first observation with the valid actions, and info: task_id, success.
        """
        super().reset(seed=seed)
        valid = {"train": self.game.getValidSeedsTrain, "dev": self.game.getValidSeedsDev}
        seeds = list(valid.get(self._fold, self.game.getValidSeedsTest)())
        task = (options or {}).get("task", seed)
        number = seeds[(0 if task is None else task) % len(seeds)]
        _, state = self.game.reset(seed=number, gameFold=self._fold)
        self._turns, self._task_id = 0, f"{self._name}/{number}"
        text = f"{state['taskDescription']}\n{self._show(state)}"
        return text, {"task_id": self._task_id, "success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes one turn; the reward is the change of the game's score, which is 1 on success."""
        self._turns += 1
        text, reward, _, state = self.game.step(action.strip())
        success = bool(state["tasksuccess"])
        terminated = success or bool(state["taskfailure"])
        truncated = not terminated and self._turns >= self._turn_limit
        text = text if terminated else self._show(state)
        return text, float(reward), terminated, truncated, {"task_id": self._task_id, "success": success}

    def close(self) -> None:
        """Ends the virtual machine."""
        self.game.close()

    def _show(self, state: dict[str, Any]) -> str:
        actions = "; ".join(sorted(state["validActions"]))
        return f"{state['observation']}\n{state['inventory']}\nActions: {actions}"
