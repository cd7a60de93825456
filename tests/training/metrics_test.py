"""The file of metrics: valid lines whatever the numbers, and one line a step whatever happened."""

import json

import pytest

from mpo_jax.training.metrics import MetricsLog, read_metrics


def strict(line):
    """Parses standard JSON only: no NaN, no Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def written(folder, *rows, first_step=0):
    log = MetricsLog(folder, total_steps=10, first_step=first_step, quiet=True)
    for step, metrics in rows:
        log.write(step, metrics)
    log.close()
    return [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_is_not_finite_becomes_null(tmp_path):
    numbers = {"loss": float("nan"), "return": float("inf"), "explained_variance": -float("inf"), "success": 0.25}
    assert written(tmp_path, (0, numbers)) == [
        {"step": 0, "loss": None, "return": None, "explained_variance": None, "success": 0.25}
    ]


def test_each_line_is_there_at_once(tmp_path):
    log = MetricsLog(tmp_path, total_steps=2, quiet=True)
    log.write(0, {"loss": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 1.0}]
    log.close()


def test_a_resumed_run_takes_its_repeated_steps_out(tmp_path):
    written(tmp_path, *((step, {"loss": float(step)}) for step in range(4)))
    rows = written(tmp_path, *((step, {"loss": 10.0 + step}) for step in (2, 3, 4)), first_step=2)
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]


def test_a_new_run_in_an_old_folder_starts_from_nothing(tmp_path):
    written(tmp_path, (0, {"loss": 0.0}), (1, {"loss": 0.0}))
    assert written(tmp_path, (0, {"loss": 5.0})) == [{"step": 0, "loss": 5.0}]


@pytest.mark.parametrize("tail", ['{"step": 2, "lo', '{"step"', "{", '{"step": 2, "loss": 1.0'])
def test_a_last_line_that_was_cut_is_left_out(tmp_path, tail):
    written(tmp_path, (0, {"loss": 0.5}), (1, {"loss": 0.25}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
    rows = written(tmp_path, (2, {"loss": 0.1}), first_step=2)  # and the next line does not join it
    assert [row["step"] for row in rows] == [0, 1, 2]


def test_no_file_is_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_tensorboard_gets_the_same_numbers(tmp_path):
    written(tmp_path, (0, {"loss": 0.5}))
    files = list((tmp_path / "tensorboard").glob("events.*"))
    assert len(files) == 1 and b"loss" in files[0].read_bytes()


def test_the_bar_shows_what_a_person_watches(tmp_path, capsys):
    log = MetricsLog(tmp_path, total_steps=2)
    log.write(0, {"success": 0.5, "return": 0.25, "entropy": 1.5, "tokens_per_second": 1234.0, "grad_norm": 77.0})
    log.close()
    shown = capsys.readouterr().err
    assert all(text in shown for text in ("1/2", "success=0.5", "return=0.25", "entropy=1.5", "tokens_per_second="))
    assert "grad_norm" not in shown
