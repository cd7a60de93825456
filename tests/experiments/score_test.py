"""The programs that score, evaluate and attribute hand on to each other; their parts are tested in tests/scoring."""

import json
import subprocess
import sys

import pytest
from scoring import files


def run(program, *arguments):
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{program}", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_recorded_log_probs_to_scores_to_an_evaluation(tmp_path):
    rows = []
    for task in range(2):
        for good in (True, False):
            messages = files.chat("x", prompt=f"question {task}")
            messages[-1] |= {"logprobs": [-0.5], "ref_logprobs": [-1.5 if good else -0.25]}
            rows.append({"messages": messages, "reward": float(good), "answer": "x"})
    where = [f"--episodes={files.write_lines(tmp_path / 'x.jsonl', rows)}", "--format=messages"]
    table = tmp_path / "scores.csv"
    done = run("score", *where, f"--output={table}", "--reference=recorded")
    assert done.returncode == 0, done.stderr
    assert "12 rows on 4 episodes" in done.stdout  # a token, a step and an episode each
    done = run("evaluate", *where, f"--scores={table}", "--json", f"--output={tmp_path / 'out'}")
    found = json.loads(done.stdout)
    # Advantages are 1 for the good ones and -.25 for the others.
    assert found["scores"]["score"]["auroc"] == 1.0
    assert found["scores"]["score"]["best_of_n"] == 1.0
    assert (found["pass@1"], found["pass@2"], found["pass^2"]) == (0.5, 1.0, 0.0)
    assert (tmp_path / "out" / "evaluation.png").exists()


@pytest.mark.slow
def test_attribution_prints_json(tmp_path):
    (tmp_path / "Hand-Crafted").mkdir()
    files.write_json(tmp_path / "Hand-Crafted" / "1.json", files.hand_crafted(step="1"))
    done = run("attribute", f"--data={tmp_path}", "--split=Hand-Crafted", "--rule=first", "--json")
    assert json.loads(done.stdout)["exact"] == {"agent": 1.0, "step": 1.0}
