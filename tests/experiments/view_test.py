"""The viewer's program: a run's episodes and their credit in one file."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
from training import runs

from experiments import workdirs
from mpo_jax.models.tokenizer import pieces
from mpo_jax.store.sqlite import EpisodeStore

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def show(tmp_path):
    """Writes the page of a run of two groups and returns its data."""
    config = runs.config(row_tokens=64, row_sequences=4, context_length=64)
    workdirs.claim(tmp_path, config)
    store = EpisodeStore(tmp_path / "episodes.sqlite")
    for group in runs.make_groups():
        store.add(group[0].group_id, group)
    store.take(1, 0)
    store.close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "success": 0.0}\n{"step": 1, "success": 1.0}\n')

    def main(*flags):
        command = [
            sys.executable,
            "-m",
            "experiments.view",
            f"--workdir={tmp_path}",
            f"--output={tmp_path / 'page.html'}",
        ]
        result = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        text = (tmp_path / "page.html").read_text()
        return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])

    return main


def test_episodes_without_credit(show):
    data = show("--nocredit", "--groups=1")
    assert [row["group"] for row in data["episodes"]] == [1] * 4
    assert {tuple(row["credit"]) for row in data["episodes"]} == {("logprob",)}
    assert data["curves"][0]["name"] == "success"
    episode = runs.flat(runs.make_groups())[4]
    assert data["episodes"][0]["pieces"] == pieces(runs.model().tokenizer.tokenizer, episode.tokens)


@pytest.mark.slow
def test_episodes_with_the_credit_of_the_runs_algorithm(show):
    data = show()
    assert [(row["group"], row["step"]) for row in data["episodes"]] == [(0, 0)] * 4 + [(1, None)] * 4
    for row in data["episodes"]:
        assert row["credit"].keys() == {"logprob", "advantage", "ratio", "gap", "progress", "entropy", "value"}
        assert all(len(x) == row["sampled"].count("1") for x in row["credit"].values())
        assert not any(row["credit"]["progress"])  # no checkpoint: the warm start is compared with itself
