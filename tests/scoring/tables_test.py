"""Tables come back as they were written, whole or not at all."""

import pytest

from mpo_jax.scoring import tables

COLUMNS = {"level": str, "episode": str, "step": int, "score": float}
ROWS = [
    {"level": "step", "episode": "007", "step": 2, "score": 0.1},
    {"level": "episode", "episode": "007", "score": -1.5},
    {"level": "episode", "episode": "1e3", "score": None},
]


def plain(rows):
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_round_trip(tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    path = tmp_path / f"x.{ending}"
    assert tables.write_table(path, COLUMNS, iter(ROWS)) == 3
    assert plain(tables.read_table(path)) == plain(ROWS)
    assert tables.episode_scores(path) == {"007": {"score": -1.5}, "1e3": {}}
    assert tables.step_scores(path, "score") == {"007": {2: 0.1}}
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_interrupted_write_leaves_the_old_table(tmp_path):
    path = tmp_path / "x.csv"
    tables.write_table(path, COLUMNS, ROWS)

    def broken():
        yield ROWS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tables.write_table(path, COLUMNS, broken())
    assert len(list(tables.read_table(path))) == 3


def test_other_endings_and_damaged_lines_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"x\.txt: a table ends in one of"):
        tables.check_ending(tmp_path / "x.txt")
    with pytest.raises(ValueError, match="no such file"):
        list(tables.read_table(tmp_path / "x.csv"))
    (tmp_path / "x.csv").write_text("episode,score\na,1\nb,high\n")
    with pytest.raises(ValueError, match=r"x\.csv:3: score is 'high'"):
        list(tables.read_table(tmp_path / "x.csv"))
    (tmp_path / "x.jsonl").write_text('{"episode": "a"}\n[1]\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:2: a JSON list"):
        list(tables.read_table(tmp_path / "x.jsonl"))
    (tmp_path / "y.csv").write_text("episode,score\na,1\na,2\n")
    with pytest.raises(ValueError, match="'a' has two rows"):
        tables.episode_scores(tmp_path / "y.csv")
