"""A whole run over a user's own documents, from files to run files; and the config's faults, each named."""

import json
import pathlib
import subprocess
import sys

import pytest
from training import runs

from experiments import environments, workdirs
from mpo_jax.environments.judge import Judge
from mpo_jax.models import weights
from mpo_jax.store.weights import PublishedWeights

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def files(tmp_path):
    """Three documents, eight queries on one fact each, and judgements, as a user would bring them."""
    names = ["freedonia", "sylvania", "marxia"]
    rows = {
        "corpus": [{"docid": f"d{i}", "text": f"{name} has the capital {name} city"} for i, name in enumerate(names)],
        "queries": [
            {"query_id": str(i), "query": f"capital of {names[i % 3]}?", "answer": f"{names[i % 3]} city"}
            for i in range(8)
        ],
    }
    paths = {name: tmp_path / f"{name}.jsonl" for name in rows}
    for name, path in paths.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    paths["qrels"] = tmp_path / "qrels.txt"
    paths["qrels"].write_text("".join(f"{i} 0 d{i % 3} 1\n" for i in range(8)))
    return {name: str(path) for name, path in paths.items()}


def config(files, **section):
    made = runs.config(environment="documents", value_pretraining_steps=0, num_steps=1)
    made.documents.update(files | section)
    return made


@pytest.mark.slow
def test_evaluation_over_own_documents(files, tmp_path):
    """From files to episodes, recall and run files, with the model that a run has published."""
    made, workdir = config(files, index=str(tmp_path / "index"), snippet_tokens=8), tmp_path / "run"
    workdirs.claim(workdir, made)
    PublishedWeights(workdir / "weights").publish(weights.flatten(runs.model().params), 1)
    command = [sys.executable, "-m", "experiments.evaluate", f"--workdir={workdir}", "--questions=2", "--samples=2"]
    command += [f"--run_files={tmp_path / 'runs'}", f"--set=documents.held_out={files['queries']}", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert list(table) == ["step 1", "warm start"] and all(
        set(row) == {"pass@1", "pass@2", "recall"} for row in table.values()
    )
    assert 0.0 <= table["step 1"]["recall"][0] <= 1.0
    written = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").glob("run_*.json"))]
    asked = {row["query_id"] for row in written}
    assert (
        len(written) == 4
        and len(asked) == 2
        and asked < {str(i) for i in range(8)}
        and {"query_id", "tool_call_counts", "status", "retrieved_docids", "result"} < set(written[0])
    )


def test_tasks_cover_the_training_queries_and_no_others(files):
    made = config(files)
    tasks = environments.read_tasks(made.documents)
    assert {t.task_id for split in tasks.values() for t in split} == {str(i) for i in range(8)}
    setting = environments.build(made, runs.model().tokenizer)
    environment = setting.make()
    asked = [environment.reset(options=setting.training_task(i))[1]["task_id"] for i in range(len(tasks["train"]))]
    assert sorted(asked) == sorted(t.task_id for t in tasks["train"])
    held_out = [environment.reset(options=t)[1]["task_id"] for t in setting.fixed_tasks("held_out", 99)]
    assert sorted(held_out) == sorted(t.task_id for t in tasks["held_out"]) and not set(held_out) & set(asked)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"queries": ""}, "name the files: --config.documents.corpus"),
        ({"format": "csv"}, "documents.format is 'csv', expected one of: queries, gaia, hle"),
        ({"actions": "shout"}, "documents.actions is 'shout', expected one of: words, tool_calls"),
        ({"grader": "me"}, "documents.grader is 'me', expected one of: exact, gaia"),
        ({"grader": "judge"}, "the judge's url is '', expected http"),
    ],
)
def test_faults_are_named(files, section, message):
    with pytest.raises(ValueError, match=message):
        environments.build(config(files, **section), runs.model().tokenizer)


def test_an_unknown_environment_is_named():
    with pytest.raises(ValueError, match="environment is 'chess', expected one of: search, documents, adapter"):
        environments.build(runs.config(environment="chess"), runs.model().tokenizer)


def test_one_query_cannot_be_split(files, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"query_id": 1, "query": "q", "answer": "a"}\n')
    with pytest.raises(ValueError, match=r"one\.jsonl: \d of its 1 queries would be held out"):
        environments.build(config(files, queries=str(path)), runs.model().tokenizer)


def test_the_judges_key_comes_from_the_environment(files, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    made = config(files, grader="judge", judge_url="http://x/v1", judge_model="m", judge_key_variable="MY_KEY")
    judge = environments.make_grader(made.documents)
    assert isinstance(judge, Judge) and judge._key == "secret" and "secret" not in made.to_json()


def test_keys_are_changed_in_their_type():
    made = runs.config()
    workdirs.change(made, ["documents.hits=7", "documents.format=gaia", "renaming=0.5", "seed=3"])
    assert (made.documents.hits, made.documents.format, made.renaming, made.seed) == (7, "gaia", 0.5, 3)
    for bad in ("documents.hits=x", "documents.htis=3", "nothing", "mpo.bootstrap_truncated=yes"):
        with pytest.raises(ValueError, match=rf"'{bad}' does not fit the run's config"):
            workdirs.change(made, [bad])
