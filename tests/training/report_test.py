"""What a run leaves for a person."""

import json

import pytest

from mpo_jax.training.metrics import MetricsLog
from mpo_jax.training.report import write_report


def make_run(folder, *rows):
    log = MetricsLog(folder, total_steps=4, quiet=True)
    for step, row in enumerate(rows):
        log.write(step, row)
    log.close()


TRAINED = {"episodes": 8.0, "seconds": 1.5, "success": 0.5}
MEASURED = [{"success_train": s, "success_held_out": h} for s, h in ((0.125, 0.0625), (0.5, 0.25), (0.75, 0.375))]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_the_summary(tmp_path):
    make_run(tmp_path, TRAINED | MEASURED[0], TRAINED, TRAINED | MEASURED[1], MEASURED[2])
    table = write_report(tmp_path, finished=True)
    assert summary(tmp_path) == {
        "finished": True,
        "steps": 3,
        "episodes": 24,
        "wall_seconds": 4.5,
        "success_train": [0.125, 0.75],
        "success_held_out": [0.0625, 0.375],
    }
    lines = table.splitlines()
    assert lines[0].split() == ["before", "after"]
    assert lines[1].split() == ["training", "questions", "0.125", "0.750"]
    assert lines[2].split() == ["held-out", "countries", "0.062", "0.375"]
    assert "finished: 3 steps, 24 episodes, 4 s" in table or "finished: 3 steps, 24 episodes, 5 s" in table
    for name in ("curve.png", "summary.json", "metrics.jsonl", "tensorboard", "episodes.sqlite", "weights"):
        assert str(tmp_path / name) in table


def test_the_curve_is_a_picture(tmp_path):
    make_run(tmp_path, TRAINED | MEASURED[0], MEASURED[2])
    write_report(tmp_path, finished=True)
    data = (tmp_path / "curve.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width == 900 and height == pytest.approx(540, abs=1)  # 6 by 3.6 inches at 150 dots


def test_the_curve_is_drawn_against_episodes_trained_on(tmp_path, monkeypatch):
    from mpo_jax.training import report

    drawn = []
    monkeypatch.setattr(report, "_draw", lambda points, path: drawn.extend(points))
    make_run(tmp_path, TRAINED | MEASURED[0], TRAINED, TRAINED | MEASURED[1], MEASURED[2])
    write_report(tmp_path, finished=True)
    assert drawn == [(0, 0.125, 0.0625), (16, 0.5, 0.25), (24, 0.75, 0.375)]


def test_a_stopped_run_says_how_to_go_on(tmp_path):
    make_run(tmp_path, TRAINED | MEASURED[0])
    table = write_report(tmp_path, finished=False)
    assert summary(tmp_path)["finished"] is False
    assert summary(tmp_path)["success_train"] == [0.125, 0.125]
    assert "the same command goes on" in table


def test_a_run_stopped_before_its_first_step_has_a_report_too(tmp_path):
    make_run(tmp_path)
    table = write_report(tmp_path, finished=False)
    assert summary(tmp_path) == {"finished": False, "steps": 0, "episodes": 0, "wall_seconds": 0}
    assert (tmp_path / "curve.png").exists() and "0 steps" in table
