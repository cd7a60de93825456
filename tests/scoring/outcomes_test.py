"""Numbers of a file of episodes: by hand, by enumeration, and the published ones of a real file."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpo_jax import evaluation
from mpo_jax.scoring import outcomes, readers, report
from mpo_jax.scoring.outcomes import Outcome
from scoring import files

TAU_BENCH = files.DATA / "tau_bench" / "gpt-4o-airline.json"


def attempts(*rows):
    """Outcomes of (task, reward, score or None) rows."""
    return [
        Outcome(str(index), task, reward, None, {} if score is None else {"s": score})
        for index, (task, reward, score) in enumerate(rows)
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=6))
def test_expected_best_is_the_mean_over_all_subsets(rows):
    scores, rewards = zip(*rows, strict=True)
    for k in range(1, len(rows) + 1):
        chosen = [
            rewards[max(subset, key=lambda i: (scores[i], -i))]
            for subset in itertools.combinations(range(len(rows)), k)
        ]
        np.testing.assert_allclose(outcomes.expected_best(scores, rewards, k), np.mean(chosen))
    whole = outcomes.expected_best(scores, rewards, len(rows))
    np.testing.assert_allclose(whole, evaluation.best_of_n(scores, rewards).best_of_n)


def test_expected_best_refuses_more_attempts_than_there_are():
    with pytest.raises(ValueError, match="k is 3"):
        outcomes.expected_best([1.0, 2.0], [0, 1], 3)


def test_summary_by_hand():
    rows = [("a", 1, 0.9), ("a", 0, 0.1), ("b", 0, 0.8), ("b", 1, 0.3), ("c", 0, 0.2), ("c", float("nan"), None)]
    found = outcomes.summarise(attempts(*rows), num_samples=50)
    assert (found["tasks"], found["episodes"], found["episodes_without_reward"]) == (3, 6, 1)
    # One success of two at a and b, none at c: pass@1 = (1/2 + 1/2 + 0)/3, pass@2 = 2/3, pass^2 = 0.
    for name, value in {"pass@1": 1 / 3, "pass@2": 2 / 3, "pass^1": 1 / 3, "pass^2": 0}.items():
        assert found[name] == pytest.approx(value)
    assert found["best_of_n"] == pytest.approx({"mean": 1 / 3, "oracle": 2 / 3})
    score = found["scores"]["s"]
    # Successes .9 and .3 against failures .1, .8, .2: they win 3 and 2 of 6 pairs. Highest: a's 1, b's 0, c's 0.
    assert score["auroc"] == pytest.approx(5 / 6)
    assert score["best_of_n"] == pytest.approx(1 / 3)
    assert score["scored"] == 5
    # Accepting .9, .8, .3, .2, .1 in turn, 0 1 1 2 3 fail: risks 0, 1/2, 1/3, 2/4, 3/5, each a fifth of coverage.
    assert score["risk_coverage"]["area"] == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4 + 3 / 5) / 5)
    assert json.loads(json.dumps(found, allow_nan=False))["pass@1"] == found["pass@1"]


def test_one_class_leaves_auroc_undefined():
    found = outcomes.summarise(attempts(("a", 1, 0.5), ("b", 1, 0.7)), num_samples=5)["scores"]["s"]
    assert found["auroc"] is None
    assert found["auroc_interval"] is None


def test_majority_takes_the_first_attempt_with_the_answer():
    rows = [("x", 0.0), ("y", 1.0), ("y", 0.25), (None, 0.0)]
    given_ = [Outcome(str(i), "t", reward, answer, {}) for i, (answer, reward) in enumerate(rows)]
    assert outcomes.summarise(given_, num_samples=5)["best_of_n"]["majority"] == 1.0


def test_calibration_by_hand():
    labels, scores = np.array([0, 1, 1, 1], bool), np.array([0.2, 0.4, 0.9, 0.9])
    found = outcomes.calibration(labels, scores, bins=2)
    # Bins {.2, .4} and {.9, .9}: success .5 and 1 against .3 and .9, so ECE = (.2 + .1)/2.
    assert found["episodes"] == [2, 2]
    np.testing.assert_allclose([*found["score"], *found["success"]], [0.3, 0.9, 0.5, 1.0])
    assert found["expected_calibration_error"] == pytest.approx(0.15)
    assert outcomes.calibration(labels, scores - 1, bins=2)["expected_calibration_error"] is None
    assert outcomes.calibration(labels, np.full(4, 0.5), bins=3)["episodes"] == [4]  # equal scores stay together


def test_intervals_redraw_tasks_not_episodes():
    groups = [np.array([0, 1, 2]), np.array([3])]
    seen = []

    def statistic(index):
        seen.append(tuple(index))
        return float("nan") if len(index) == 2 else float(len(index))

    low, high = outcomes.resampled_interval(groups, statistic, num_samples=40, seed=0)
    assert set(seen) == {(0, 1, 2, 0, 1, 2), (0, 1, 2, 3), (3, 0, 1, 2), (3, 3)}
    assert (low, high) == (4.0, 6.0)  # the redraw of lengths 2 is undefined and left out


def test_scores_of_other_episodes_are_refused():
    with pytest.raises(ValueError, match="none such as '0'"):
        outcomes.with_scores(attempts(("a", 1, None)), {"zzz": {"s": 1.0}})


def test_scores_that_the_file_gives(tmp_path):
    messages = files.chat("a", "b")
    messages[2] |= {"logprobs": [-1.0, -2.0], "score": 0.5}
    messages[4] |= {"logprobs": [-3.0], "score": 1.0}
    path = files.write_lines(tmp_path / "x.jsonl", [{"messages": messages, "reward": 1, "scores": {"prm": 0.25}}])
    (one,) = map(outcomes.outcome, readers.read(path, "messages", []))
    assert one.scores == {
        "negative_message_count": -5,
        "negative_action_count": -2,
        "prm": 0.25,
        "sequence_logprob": -6,
        "mean_logprob": -2,
        "message_score": 0.75,
    }


def test_a_report_is_numbers_a_table_and_a_picture(tmp_path):
    items = [files.tau_bench_item(task, trial, float(trial > task)) for task in range(2) for trial in range(3)]
    path = files.write_json(tmp_path / "x.json", [*items, {"task_id": 1}])
    (tmp_path / "scores.csv").write_text("episode,prm\n0-0,0.1\n0-1,0.7\n1-2,0.9\n")
    found = report.evaluate(path, "tau_bench", scores=tmp_path / "scores.csv", output=tmp_path / "out", num_samples=10)
    assert found["scores"]["prm"]["scored"] == 3
    assert "x.json[6]: Object missing required field" in found["unreadable"][0]
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["pass@1"] == found["pass@1"]
    assert (tmp_path / "out" / "evaluation.png").read_bytes()[:4] == b"\x89PNG"
    assert "pass^3" in report.table(found)


def test_a_file_without_one_readable_episode_is_an_error(tmp_path):
    path = files.write_json(tmp_path / "x.json", [{"task_id": 1}])
    with pytest.raises(ValueError, match="not one of 1 episodes"):
        report.evaluate(path, "tau_bench")


@pytest.mark.skipif(not TAU_BENCH.is_file(), reason="the tau-bench file is not beside the checkout")
def test_golden_numbers_of_a_real_file():
    found = report.evaluate(TAU_BENCH, "tau_bench", num_samples=10)
    assert (found["tasks"], found["episodes"], found["unreadable"]) == (50, 200, [])
    published = {"pass^": (0.420, 0.273, 0.220, 0.200), "pass@": (0.420, 0.567, 0.660, 0.720)}
    for name, values in published.items():
        assert [round(found[f"{name}{k}"], 3) for k in range(1, 5)] == list(values)
    assert round(found["scores"]["negative_message_count"]["auroc"], 3) == 0.683
