"""Games of ALFWorld: household tasks in text, from the folders of games that its authors publish."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gymnasium

from mpo_jax.environments.adapting import choose, require, stand_in
from mpo_jax.environments.text import AnyText

GAME, TRAJECTORY = "game.tw-pddl", "traj_data.json"
ENGINES = {"textworld": "textworld", "fast_downward": "fast-downward-textworld", "alfworld": "alfworld"}
LEFT_OUT = ("movable", "Sliced")  # in a folder's name; the authors leave these out too


@dataclasses.dataclass(frozen=True)
class Game:
    """A published game.

    Attributes:
      name: its folder's, below the one that was searched.
      task_type: one of the authors' six.
      data: domain, grammar, problem, and a walkthrough where there is one.
    """

    name: str
    task_type: str
    data: dict[str, Any]


def find_games(folder: Path | str, task_types: tuple[str, ...] = ()) -> list[Path]:
    """The solvable games below a folder, such as `json_2.1.1/train`, in order of their names.

    Args:
      folder: where to look; a game is a folder with `game.tw-pddl` and `traj_data.json`.
      task_types: leave others out; all if empty.

    Raises:
      ValueError: there is none, or a file of one is damaged.
    """
    paths = [path.parent for path in sorted(Path(folder).rglob(GAME)) if (path.parent / TRAJECTORY).exists()]
    paths = [path for path in paths if not any(word in str(path.relative_to(folder)) for word in LEFT_OUT)]
    found = [path for path in paths if _fits(read_game(path, folder), task_types)]
    if not found:
        raise ValueError(f"{folder}: {len(paths)} games, none of them solvable and of {task_types or 'any type'}")
    return found


def read_game(path: Path, folder: Path | str) -> Game:
    """One game.

    Raises:
      ValueError: a file cannot be read or lacks what it must have; the message names it.
    """
    data, trajectory = _read(path / GAME), _read(path / TRAJECTORY)
    for file, content, keys in (
        (GAME, data, ("pddl_domain", "grammar", "pddl_problem", "solvable")),
        (TRAJECTORY, trajectory, ("task_type",)),
    ):
        if missing := [key for key in keys if key not in content]:
            raise ValueError(f"{path / file}: lacks {missing[0]!r}")
    return Game(str(path.relative_to(folder)), str(trajectory["task_type"]), data)


class AlfWorld(gymnasium.Env):
    """A household of *ALFWorld* (arXiv:2010.03768), played by the engine of the package `textworld`.

    Actions are commands such as `go to desk 1`, `take mug 1 from desk 1`, `help`; the last line of a turn counts. The
    task that is done earns 1.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own convention

    def __init__(self, folder: str, task_types: tuple[str, ...] = (), *, turn_limit: int = 50, commands: bool = False):
        """Finds the games.

        Args:
          folder: of published games; `alfworld-download` fetches them.
          task_types: see `find_games`.
          turn_limit: turns after which an episode is truncated; the authors' is 50.
          commands: every observation ends with the commands that are possible.

        Raises:
          ImportError: an engine is not installed.
          ValueError: there are no games, or one is damaged.
        """
        for module, package in ENGINES.items():
            require(module, package)
        self._folder, self._games = folder, find_games(folder, tuple(task_types))
        self._turn_limit, self._commands = turn_limit, commands
        self.observation_space, self.action_space = AnyText(), AnyText()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict[str, Any]]:
        """Opens a game; `options={"task": n}` is the n-th, else one is drawn.

        Returns:
          The room with the task, and info: task_id, success, task_type.
        """
        super().reset(seed=seed)
        self._game, self._turns = read_game(choose(self._games, options, self.np_random), self._folder), 0
        self._play = _load(self._game.data)
        return self._show(self._play.reset()), self._info(False)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carries out a command; one that is not possible changes nothing."""
        self._turns += 1
        lines = action.strip().splitlines() or [""]
        state, _, _ = self._play.step(lines[-1].removeprefix(">").strip())
        won = bool(state["won"])
        return self._show(state), float(won), won, not won and self._turns >= self._turn_limit, self._info(won)

    def _show(self, state: Any) -> str:
        possible = f"\nPossible: {', '.join(state['admissible_commands'])}" if self._commands else ""
        return state.feedback + possible

    def _info(self, success: bool) -> dict[str, Any]:
        return {"task_id": f"alfworld/{self._game.name}", "success": success, "task_type": self._game.task_type}


def _load(data: dict[str, Any]) -> Any:
    """The engine with a game in it, whose things are called as in ALFWorld (`apple 1`)."""
    # An interpreter of Z-code, to be compiled from source; no game of ALFWorld is in it.
    stand_in("jericho", ["UnsupportedGameWarning", "TruncatedInputActionWarning"])
    from alfworld.agents.utils.misc import Demangler
    from textworld.envs.pddl import PddlEnv

    engine = PddlEnv()
    engine.load(data)
    names = Demangler(game_infos=engine._entity_infos)
    for entity in engine._entity_infos.values():
        entity.name = names.demangle_alfred_name(entity.id)
    return engine


def _fits(game: Game, task_types: tuple[str, ...]) -> bool:
    return bool(game.data["solvable"]) and (not task_types or game.task_type in task_types)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, expected an object")
    return content
