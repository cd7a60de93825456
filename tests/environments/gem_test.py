"""Games of gem-llm: bisection guesses the number; what ends an episode is told apart."""

import importlib.util

import pytest

from mpo_jax.environments.gem import Gem

if importlib.util.find_spec("gem") is None:
    pytest.skip("needs gem-llm, see requirements-envs.txt", allow_module_level=True)


def bisect(environment, seed):
    environment.reset(options={"task": seed})
    low, high = 1, 50
    while True:
        guess = (low + high) // 2
        text, reward, terminated, truncated, info = environment.step(rf"I say \boxed{{{guess}}}")
        if terminated or truncated:
            return reward, terminated, truncated, info["success"]
        low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)


def test_bisection_succeeds():
    environment = Gem("game:GuessTheNumber-v0-hard")  # 50 numbers in 7 turns, of which bisection needs 6
    assert {bisect(environment, seed) for seed in range(20)} == {(1.0, True, False, True)}


def test_the_turn_limit_is_truncation():
    environment = Gem("game:GuessTheNumber-v0-hard")
    environment.reset(options={"task": 3})
    hidden = environment.game.unwrapped.game_number
    wrong = [n for n in range(1, 51) if n != hidden][:7]
    results = [environment.step(rf"\boxed{{{n}}}") for n in wrong]
    assert results[-1][2:4] == (False, True) and results[-1][4]["success"] is False


@pytest.mark.parametrize("game", ["game:Mastermind-v0-hard", "game:Minesweeper-v0-hard"])
def test_others_start_alike_from_equal_seeds(game):
    environment = Gem(game)
    first, info = environment.reset(options={"task": 1})
    assert environment.reset(options={"task": 1})[0] == first and info["task_id"] == f"{game}/1"
    text, reward, *_ = environment.step("no action at all")
    assert isinstance(text, str) and reward <= 0
