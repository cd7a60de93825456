"""The programs that score, evaluate and attribute hand on to each other; their parts are tested in tests/scoring."""

import json
import subprocess
import sys

import numpy as np
import pytest
from models import tiny
from scoring import files

from mpo_jax.models import huggingface, pretrained


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


@pytest.mark.slow
def test_adapters_that_imitate_are_scored_beside_their_base(tmp_path):
    tokenizer = pretrained.load("search_tiny").tokenizer.tokenizer
    config = tiny.config(vocab_size=tokenizer.get_vocab_size())
    base, adapter, table = tmp_path / "base", tmp_path / "adapter", tmp_path / "scores.jsonl"
    huggingface.save(base, config, tiny.params(config), dtype=np.float32)
    tokenizer.save(str(base / "tokenizer.json"))
    rows = [{"messages": files.chat("a b", "c"), "reward": reward} for reward in (1, 0)]
    where = [f"--episodes={files.write_lines(tmp_path / 'x.jsonl', rows)}", "--format=messages"]
    steps = ["--num_steps=3", "--row_tokens=64", "--rank=2", "--learning_rate=0.05"]
    done = run("imitate", *where, f"--model={base}", f"--output={adapter}", *steps)
    assert "1 of 2 episodes are imitated" in done.stdout, done.stderr
    done = run("score", *where, f"--output={table}", f"--policy={adapter}", f"--reference={base}", "--level=episode")
    assert done.returncode == 0, done.stderr
    scores = [json.loads(line)["score"] for line in table.read_text().splitlines()]
    assert min(scores) > 0.01  # what was imitated has become likelier
