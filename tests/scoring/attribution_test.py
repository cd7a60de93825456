"""Rules on scores worked by hand, both matchings, and what counts as wrong."""

import json

import pytest

from mpo_jax.scoring import attribution
from mpo_jax.scoring.attribution import Prediction
from mpo_jax.scoring.transcripts import Mistake
from scoring import files


@pytest.mark.parametrize(
    ("scores", "cumulative", "drop", "fall"),
    [
        ([0.5, -1.0, 2.0, -0.75], 1, 1, 3),  # sums .5, -.5, 1.5, .75; falls -1.5, +3, -2.75
        ([-1.0, -0.5, -0.25], 2, 0, 2),  # sums -1, -1.5, -1.75; it only rises, by .5 and .25: the least rise
        ([0.0, 0.0], 0, 0, 1),  # ties: the first
        ([3.0], 0, 0, 0),
    ],
)
def test_rules_by_hand(scores, cumulative, drop, fall):
    assert attribution.min_cumulative(scores) == cumulative
    assert attribution.sharpest_drop(scores) == drop
    assert attribution.sharpest_abs_drop(scores) == fall


def test_the_benchmarks_matching_is_by_substring():
    predicted = Prediction(12, "Orchestrator", "Orchestrator (-> WebSurfer)")
    assert attribution.exact(predicted, Mistake("Orchestrator", 12)) == (True, True)
    assert attribution.exact(predicted, Mistake("WebSurfer", 1)) == (False, False)
    assert attribution.benchmark(predicted, Mistake("WebSurfer", 1)) == (True, True)
    assert attribution.benchmark(predicted, Mistake("FileSurfer", 3)) == (False, False)
    assert attribution.benchmark(Prediction(1, "Web", "Web"), Mistake("WebSurfer", 12)) == (
        False,
        False,
    )  # one way only


@pytest.fixture
def folder(tmp_path):
    split = tmp_path / "Hand-Crafted"
    split.mkdir()
    files.write_json(split / "1.json", files.hand_crafted(step="3", agent="WebSurfer"))
    files.write_json(split / "2.json", files.hand_crafted(step="1", agent="WebSurfer"))
    files.write_json(split / "3.json", files.hand_crafted(step="99"))
    return tmp_path


def test_rules_without_scores_act_on_actions_only(folder):
    last, first = (attribution.attribute(folder, "Hand-Crafted", rule) for rule in ("last", "first"))
    # The file that points nowhere is the third of three, and wrong.
    assert (last["files"], len(last["unreadable"])) == (3, 1)
    assert last["exact"] == pytest.approx({"agent": 2 / 3, "step": 1 / 3})
    assert first["exact"] == pytest.approx({"agent": 0, "step": 1 / 3})
    # Three files redrawn, one of them a hit: its share is 0 in (2/3)³ = .30 of the draws and 1 in (1/3)³ = .04.
    assert first["intervals"]["exact"] == {"agent": (0.0, 0.0), "step": (0.0, 1.0)}
    assert first["predictions"]["1"] == {"agent": "Orchestrator", "step": 1}  # step 0 is a person's question
    assert last["mean_distance"] == 1  # 3 against 3 and 1


def test_rules_with_scores(folder):
    table = folder / "scores.jsonl"
    rows = [{"level": "step", "episode": "1", "step": step, "score": -step, "other": step} for step in (1, 2, 3)]
    rows += [{"level": "step", "episode": "2", "step": step, "score": 0.0} for step in (1, 2)]  # 3 has none
    rows += [{"level": "episode", "episode": "1", "score": 0.0}]
    files.write_lines(table, rows)
    found = attribution.attribute(folder, "Hand-Crafted", "sharpest_drop", scores=table)
    assert found["unscored"] == ["2"]
    assert found["exact"] == pytest.approx({"agent": 1 / 3, "step": 1 / 3})
    other = attribution.attribute(folder, "Hand-Crafted", "sharpest_drop", scores=table, column="other")
    assert other["predictions"]["1"]["step"] == 1
    with pytest.raises(ValueError, match="no steps with a column 'missing'"):
        attribution.attribute(folder, "Hand-Crafted", "sharpest_drop", scores=table, column="missing")


def test_scores_of_the_other_split_are_refused(folder):
    """Both number their files from 1."""
    rows = [{"level": "step", "episode": "1", "task": "elsewhere", "step": step, "score": 0.0} for step in (1, 2, 3)]
    files.write_lines(folder / "scores.jsonl", rows)
    with pytest.raises(ValueError, match=r"scores\.jsonl: episode '1' is of task 'elsewhere', but here of 'q3'"):
        attribution.attribute(folder, "Hand-Crafted", "sharpest_drop", scores=folder / "scores.jsonl")


def test_files_that_were_not_scored_can_be_left_out(folder):
    table = folder / "scores.jsonl"
    files.write_lines(
        table,
        [{"level": "step", "episode": "1", "step": step, "score": 0.0, "mean_logprob": -step} for step in (1, 2, 3)],
    )
    for rule, step in (("lowest_logprob", 3), ("last", 3), ("first", 1)):
        found = attribution.attribute(folder, "Hand-Crafted", rule, scores=table, only_scored=True)
        assert (found["files"], found["predictions"]["1"]["step"]) == (1, step)
        assert found["exact"]["step"] == float(step == 3)
    with pytest.raises(ValueError, match="needs --scores"):
        attribution.attribute(folder, "Hand-Crafted", "first", only_scored=True)
    files.write_lines(table, [{"level": "step", "episode": "elsewhere", "step": 1, "mean_logprob": 0.0}])
    with pytest.raises(ValueError, match=r"scores of \['elsewhere'\]…, of none of the files in .*Hand-Crafted"):
        attribution.attribute(folder, "Hand-Crafted", "first", scores=table, only_scored=True)


def test_rules_over_scores_say_where_to_get_them(folder):
    with pytest.raises(ValueError, match="needs --scores"):
        attribution.attribute(folder, "Hand-Crafted", "min_cumulative")


def test_random_is_seeded(folder):
    one, two = (attribution.attribute(folder, "Hand-Crafted", "random", seed=3) for _ in range(2))
    assert one == two


@pytest.mark.skipif(not (files.DATA / "who_and_when").is_dir(), reason="the Who&When files are not beside the checkout")
@pytest.mark.parametrize("split", attribution.SPLITS)
def test_first_and_last_on_the_real_files(split):
    paths = sorted((files.DATA / "who_and_when" / split).glob("*.json"))
    labels = [(json.loads(p.read_text())["mistake_step"], json.loads(p.read_text())["history"]) for p in paths]
    first = "1" if split == "Hand-Crafted" else "0"
    found = attribution.attribute(files.DATA / "who_and_when", split, "first")
    assert found["exact"]["step"] == pytest.approx(sum(step == first for step, _ in labels) / len(paths))
    found = attribution.attribute(files.DATA / "who_and_when", split, "last")
    ends = [(step, str(len(history) - 1)) for step, history in labels]
    assert found["exact"]["step"] == pytest.approx(sum(step == end for step, end in ends) / len(paths))
    assert found["benchmark"]["step"] == pytest.approx(sum(step in end for step, end in ends) / len(paths))
