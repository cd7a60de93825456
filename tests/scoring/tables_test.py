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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"level,episode,step,score\nstep,a,1,0,9\n", r"x\.csv:2: more cells than the 4 columns"),
        ("x.csv", b"level,episode,step,score\nstep,\xff,1,0\n", r"x\.csv: cannot be read: 'utf-8' codec"),
        (
            "x.csv",
            b"level,episode,step,score\nstep," + b"a" * 200_000 + b",1,0\n",
            r"x\.csv: cannot be read: field larger",
        ),
        ("x.csv", b"level,episode,step,score\nstep,a,1,0\nstep,a,1,5\n", r"x\.csv: step 1 of episode 'a' has two rows"),
        ("x.jsonl", b'{"level": "step", "episode": "a", "score": 1}', r"x\.jsonl: step is no number"),
        ("x.jsonl", b'{"level": "step", "step": 1, "score": 1}', r"x\.jsonl: a step without an `episode`"),
        (
            "x.jsonl",
            b'{"level": "step", "episode": "a", "step": 1.5, "score": 1}',
            r"x\.jsonl: .* whole number .* 1\.5",
        ),
        ("x.jsonl", b'{"level": "step", "episode": "a", "step": 1, "score": "high"}', r"x\.jsonl: score is no number"),
        ("x.parquet", b"hello", r"x\.parquet: no readable Parquet file"),
    ],
)
def test_what_is_wrong_with_a_table_of_steps_is_named(tmp_path, name, content, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tables.step_scores(tmp_path / name, "score")


def test_a_number_beyond_all_floats_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text(f'{{"episode": "a", "score": 1{"0" * 400}}}')
    with pytest.raises(ValueError, match=r"x\.jsonl: score is no number"):
        tables.episode_scores(tmp_path / "x.jsonl")


def test_a_table_of_other_episodes_is_known_by_their_tasks(tmp_path):
    tables.write_table(
        tmp_path / "x.csv", {"episode": str, "task": str}, [{"episode": "1", "task": "t"}, {"episode": "2"}]
    )
    tables.check_tasks(tmp_path / "x.csv", {"1": "t", "2": "any", "3": "not there"})
    with pytest.raises(ValueError, match=r"x\.csv: episode '1' is of task 't', but here of 'u': scores of other"):
        tables.check_tasks(tmp_path / "x.csv", {"1": "u"})


def test_a_step_scored_nan_is_not_scored(tmp_path):
    """The lowest of scores with a NaN among them would be the NaN."""
    (tmp_path / "x.csv").write_text("level,episode,step,score\nstep,a,1,nan\nstep,a,2,-1\n")
    assert tables.step_scores(tmp_path / "x.csv", "score") == {"a": {2: -1.0}}
