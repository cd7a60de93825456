"""ALFWorld's published format, in a kitchen of five things made by hand: a scripted policy does the task."""

import importlib.util
import json
from pathlib import Path

import pytest

from mpo_jax.environments.alfworld import AlfWorld, find_games

ENGINE = all(importlib.util.find_spec(name) for name in ("textworld", "fast_downward", "alfworld"))
needs_engine = pytest.mark.skipif(not ENGINE, reason="needs textworld, fast-downward-textworld and alfworld")

APPLES = (
    "Apple_bar__plus_00_dot_10_bar__plus_00_dot_90_bar__minus_00_dot_50",
    "Apple_bar__minus_01_dot_00_bar_0_bar_0",
)
TABLE = "DiningTable_bar__plus_00_dot_00_bar__plus_00_dot_00_bar__plus_01_dot_00"
FRIDGE = "Fridge_bar__minus_02_dot_00_bar__plus_00_dot_00_bar__plus_01_dot_00"
PLACES = {TABLE: "loc_bar_0_bar_0_bar_0_bar_45", FRIDGE: "loc_bar_4_bar_4_bar_1_bar_45"}
START = "loc_bar__minus_4_bar_0_bar_0_bar_30"

PROBLEM = f"""
(define (problem plan_trial_T20190907)
  (:domain alfred)
  (:objects
    agent1 - agent
    {APPLES[0]} {APPLES[1]} - object
    AppleType - otype
    DiningTableType FridgeType SinkBasinType MicrowaveType - rtype
    KnifeType ButterKnifeType - otype
    {START} {" ".join(PLACES.values())} - location
    {TABLE} {FRIDGE} - receptacle)
  (:init
    (= (total-cost) 0)
    (atLocation agent1 {START})
    (receptacleAtLocation {TABLE} {PLACES[TABLE]}) (receptacleAtLocation {FRIDGE} {PLACES[FRIDGE]})
    (receptacleType {TABLE} DiningTableType) (receptacleType {FRIDGE} FridgeType)
    (canContain DiningTableType AppleType) (canContain FridgeType AppleType)
    (openable {FRIDGE})
    (objectType {APPLES[0]} AppleType) (objectType {APPLES[1]} AppleType)
    (pickupable {APPLES[0]}) (pickupable {APPLES[1]}) (coolable {APPLES[0]}) (coolable {APPLES[1]})
    (inReceptacle {APPLES[0]} {TABLE}) (inReceptacle {APPLES[1]} {FRIDGE})
    (objectAtLocation {APPLES[0]} {PLACES[TABLE]}) (objectAtLocation {APPLES[1]} {PLACES[FRIDGE]}))
  (:goal (and (exists (?r - receptacle) (exists (?o - object) (and
    (isCool ?o) (objectType ?o AppleType) (receptacleType ?r DiningTableType) (inReceptacle ?o ?r))))))
)
"""


def write(folder, name, *, task_type="pick_cool_then_place_in_recep", domain="d", grammar="g", **changes):
    path = folder / name
    path.mkdir(parents=True)
    game = {"pddl_domain": domain, "grammar": grammar, "pddl_problem": PROBLEM, "solvable": True, "walkthrough": []}
    (path / "game.tw-pddl").write_text(json.dumps(game | changes))
    (path / "traj_data.json").write_text(json.dumps({"task_type": task_type, "turk_annotations": {"anns": []}}))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "pick_cool_then_place_in_recep-Apple-None-DiningTable-1/trial_T1")
    write(tmp_path, "look_at_obj_in_light-Apple-None-DeskLamp-2/trial_T2", task_type="look_at_obj_in_light")
    write(tmp_path, "pick_and_place_simple-AppleSliced-None-Fridge-1/trial_T3")
    write(tmp_path, "pick_and_place_with_movable_recep-Apple-Bowl-Fridge-1/trial_T4")
    write(tmp_path, "pick_and_place_simple-Egg-None-Fridge-1/trial_T5", solvable=False)
    return tmp_path


def test_the_games_that_the_authors_play_are_found(folder):
    assert [path.name for path in find_games(folder)] == ["trial_T2", "trial_T1"]  # in order of the folders' names
    assert [path.name for path in find_games(folder, ("look_at_obj_in_light",))] == ["trial_T2"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("game.tw-pddl", "{", r"game\.tw-pddl: cannot be read"),
        ("game.tw-pddl", "[]", "holds a list, expected an object"),
        ("game.tw-pddl", '{"pddl_domain": ""}', "game.tw-pddl: lacks 'grammar'"),
        ("traj_data.json", "{}", "traj_data.json: lacks 'task_type'"),
    ],
)
def test_damaged_games_are_named(folder, file, content, message):
    (folder / "pick_cool_then_place_in_recep-Apple-None-DiningTable-1/trial_T1" / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        find_games(folder)


def test_a_folder_without_games_is_named(tmp_path):
    with pytest.raises(ValueError, match="0 games, none of them solvable and of any type"):
        find_games(tmp_path)


def test_a_missing_engine_is_named(folder, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "textworld" else found(name))
    with pytest.raises(ImportError, match="needs the package textworld"):
        AlfWorld(str(folder))


@pytest.fixture
def kitchen(tmp_path):
    data = Path(importlib.util.find_spec("alfworld").origin).parent / "data"
    grammar = (data / "alfred.twl2").read_text().replace("UNKNOWN GOAL", "cool some apple and put it in diningtable")
    write(tmp_path, "kitchen/trial_T1", domain=(data / "alfred.pddl").read_text(), grammar=grammar)
    return tmp_path


@needs_engine
def test_a_scripted_policy_does_the_task(kitchen):
    environment = AlfWorld(str(kitchen), commands=True)
    text, info = environment.reset(options={"task": 0})
    assert "you see a diningtable 1, and a fridge 1" in text or "you see a fridge 1, and a diningtable 1" in text
    assert "Your task is to: cool some apple and put it in diningtable." in text and "go to fridge 1" in text
    assert info["task_id"] == "alfworld/kitchen/trial_T1" and info["success"] is False
    plan = ["go to diningtable 1", "take apple 1 from diningtable 1", "go to fridge 1", "cool apple 1 with fridge 1",
            "go to diningtable 1", "I think.\n> move apple 1 to diningtable 1"]  # fmt: skip
    first = environment.step("fly to the moon")
    assert first[0].startswith("Nothing happens.") and first[1:4] == (0.0, False, False)
    steps = [environment.step(action) for action in plan]
    assert "you see a apple" in steps[0][0]
    assert [step[1] for step in steps] == [0.0] * 5 + [1.0] and steps[-1][2:4] == (True, False)
    assert steps[-1][4]["success"] is True


@needs_engine
def test_an_episode_is_truncated_at_its_limit(kitchen):
    environment = AlfWorld(str(kitchen), turn_limit=2)
    environment.reset(seed=0)
    assert environment.step("look")[2:4] == (False, False)
    assert environment.step("")[2:4] == (False, True)
