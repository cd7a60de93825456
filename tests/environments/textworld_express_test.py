"""TextWorldExpress: the gold path reaches score 1 in every kind of game."""

import shutil

import pytest

from mpo_jax.environments.textworld_express import TextWorldExpress

pytest.importorskip("textworld_express", reason="needs textworld-express, of requirements-envs.txt")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")]


@pytest.mark.parametrize("game", ["coin", "mapreader", "arithmetic", "cookingworld"])
def test_the_gold_path_succeeds(game):
    environment = TextWorldExpress(game)
    try:
        prompt, info = environment.reset(options={"task": 3})
        assert "Actions: " in prompt and info["success"] is False
        number = int(info["task_id"].rsplit("/", 1)[1])
        environment.game.reset(seed=number, gameFold="train", generateGoldPath=True)
        gold = environment.game.getGoldActionSequence()
        assert environment.reset(options={"task": 3})[0] == prompt
        results = [environment.step(action) for action in gold]
        assert sum(reward for _, reward, *_ in results) == pytest.approx(1.0)
        assert results[-1][2:4] == (True, False) and results[-1][4]["success"] is True
        assert all(terminated is truncated is False for _, _, terminated, truncated, _ in results[:-1])
    finally:
        environment.close()


def test_the_turn_limit_truncates_and_nonsense_is_answered():
    environment = TextWorldExpress("coin", turn_limit=2)
    try:
        environment.reset(seed=0)
        assert environment.step("☃ dance")[1:4] == (0.0, False, False)
        assert environment.step("look around")[2:4] == (False, True)
    finally:
        environment.close()
