"""Out of a store and back: three formats, damaged rows, and a store that reading leaves as it was."""

import importlib.util
import json
import math
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from mpo_jax.store.episode import Episode, InvalidEpisode
from mpo_jax.store.export import Damaged, from_plain, import_episodes, read_jsonl, write_jsonl
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.verifiers_results import from_row, read_results, to_row, write_results

ROOT = Path(__file__).parents[2]


def episode(group_id, member=0, **changes):
    """Two turns: ids 9 9 | 5 6 | 9 | 7 2, of which 5 6 and 7 2 were sampled."""
    fields = {
        "episode_id": f"{group_id}-{member}",
        "group_id": group_id,
        "task_id": f"task {group_id}",
        "tokens": [9, 9, 5, 6, 9, 7, 2],
        "action_mask": [False, False, True, True, False, True, True],
        "executable_mask": [False, False, False, True, False, True, True],
        "turn_ids": [0, 0, 0, 0, 1, 1, 1],
        "logprobs": [0.0, 0.0, -0.1, -1.5, 0.0, -2.0, -1e-30],
        "rewards": [0.25, 1.0],
        "state_ids": [4, 2**31 - 1],
        "versions": [1, 2],
        "end_reason": "terminated",
        "metadata": {"observations": ["</script>é\n", "b"], "actions": ["c", "d"], "answer": "d", "success": True},
    }
    return Episode(**fields | changes)


FAILED = {
    name: []
    for name in (
        "tokens", "action_mask", "executable_mask", "turn_ids", "logprobs", "rewards", "state_ids", "versions",
    )
}  # fmt: skip
EPISODES = [
    episode(0),
    episode(0, 1, rewards=[math.nan, math.nan], metadata={"error": "x"}),
    episode(2, **FAILED, end_reason="truncated", metadata={"error": "ValueError: no"}),
    episode(3, end_reason="token_limit", metadata={}),
]


def read_parquet(path, vocab_size=None):
    from mpo_jax.store import parquet

    return parquet.read_parquet(path, vocab_size)


def write_parquet(episodes, path):
    from mpo_jax.store import parquet

    return parquet.write_parquet(episodes, path)


def write_verifiers(episodes, folder):
    return write_results(episodes, folder, environment="search", model="tiny")


needs_pyarrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
FORMATS = [
    pytest.param(write_jsonl, read_jsonl, id="jsonl"),
    pytest.param(write_parquet, read_parquet, id="parquet", marks=needs_pyarrow),
    pytest.param(write_verifiers, read_results, id="verifiers"),
]


def same(a, b):
    """Equal, NaN included."""
    return msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


@pytest.mark.parametrize(("write", "read"), FORMATS)
def test_episodes_come_back_as_they_were(write, read, tmp_path):
    assert write(iter(EPISODES), tmp_path / "out") == 4
    found = list(read(tmp_path / "out", 10))
    assert len(found) == 4 and all(same(a, b) for a, b in zip(found, EPISODES, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("write", "read"), FORMATS)
def test_the_experts_of_tokens_come_back_too_and_damaged_ones_are_damage(write, read, tmp_path):
    routed = [episode(0, experts=bytes(range(250, 256)) * 2), episode(1, experts=b"12345")]  # 6 tokens; 5 bytes for 6
    write(routed, tmp_path / "out")
    good, bad = read(tmp_path / "out")
    assert good == routed[0]
    assert isinstance(bad, Damaged) and "experts has 5 bytes, expected as many for each of 6 tokens" in bad.reason


@needs_pyarrow
def test_parquet_from_before_there_were_experts_is_read(tmp_path):
    import pyarrow as pa

    from mpo_jax.store import parquet

    fields = msgspec.structs.asdict(EPISODES[0]) | {"metadata": json.dumps(EPISODES[0].metadata)}
    del fields["experts"]
    schema = parquet.SCHEMA.remove(parquet.SCHEMA.get_field_index("experts"))
    table = pa.Table.from_pylist([fields | {"checksum": parquet._checksum(fields)}], schema)
    pa.parquet.write_table(table, tmp_path / "out")
    assert list(read_parquet(tmp_path / "out")) == EPISODES[:1]


@pytest.mark.parametrize(("write", "read"), FORMATS)
def test_an_id_outside_the_vocabulary_is_damage(write, read, tmp_path):
    write(EPISODES, tmp_path / "out")
    assert [isinstance(row, Damaged) for row in read(tmp_path / "out", 9)] == [True, True, False, True]
    assert "tokens of length 7 is wrong at index 0: expected ids in 0..8" in next(read(tmp_path / "out", 9)).reason


@pytest.mark.parametrize(("write", "read"), FORMATS)
def test_a_store_goes_out_and_into_another(write, read, tmp_path):
    first, second = EpisodeStore(tmp_path / "a.sqlite"), EpisodeStore(tmp_path / "b.sqlite")
    for group_id in (0, 2, 3):
        first.add(group_id, [e for e in EPISODES if e.group_id == group_id])
    write(first.episodes(), tmp_path / "out")
    assert import_episodes(second, read(tmp_path / "out")) == (4, 0)
    assert import_episodes(second, read(tmp_path / "out")) == (4, 0)  # nothing twice
    assert same(list(second.episodes()), list(first.episodes())) and second.count() == 4


def test_reading_changes_nothing_in_the_file(tmp_path):
    path = tmp_path / "a.sqlite"
    store = EpisodeStore(path)
    store.add(0, EPISODES[:2])
    store.close()
    before = path.read_bytes()
    reader = EpisodeStore(path, read_only=True)
    assert len(list(reader.episodes())) == 2
    with pytest.raises(Exception, match="readonly"):
        reader.add(1, [episode(1)])
    reader.close()
    assert path.read_bytes() == before


def test_damaged_lines_are_quarantined_with_their_reason(tmp_path):
    good = msgspec.json.encode(EPISODES[0])
    wrong = json.loads(good) | {"tokens": [-1] * 7}
    foreign = json.loads(good) | {"record": 2}
    unknown = json.loads(good) | {"reward": 1.0}
    lines = [b"{", json.dumps(wrong).encode(), b"", json.dumps(foreign).encode(), json.dumps(unknown).encode(), good]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([*lines, b"[" * 10_000, good[:-9]]))
    store = EpisodeStore(tmp_path / "s.sqlite")
    assert import_episodes(store, read_jsonl(tmp_path / "in.jsonl")) == (1, 6)
    rows = store.quarantined()
    assert [row[:2] for row in rows] == [(-1, 0), (-1, 1), (-1, 3), (-1, 4), (-1, 6), (-1, 7)]
    expected = (
        "line 1: 1 bytes that are no JSON",
        r"line 2: .*tokens .* index 0",
        r"line 4: .*version 1.*2.*record",
        r"line 5: .*unknown field `reward`",
        "line 7: 10000 bytes that are no JSON",
        r"line 8: .* no JSON",
    )
    for (_, _, reason), pattern in zip(rows, expected, strict=True):
        assert re.search(pattern, reason), reason
    with sqlite3.connect(store.path) as db:
        assert db.execute("SELECT record FROM quarantined WHERE member = 7").fetchone()[0] == good[:-9]


def test_damage_of_another_file_at_the_same_line_is_kept_too_and_the_same_once(tmp_path):
    store = EpisodeStore(tmp_path / "s.sqlite")
    for name, text in (("a", "{"), ("b", "["), ("b", "[")):
        (tmp_path / name).write_text(text)
        assert import_episodes(store, read_jsonl(tmp_path / name)) == (0, 1)
    (first, second) = store.quarantined()
    assert (first[:2], second[:2]) == ((-1, 0), (-1, 1))
    assert "a line 1: " in first[2] and "b line 1: " in second[2]


def test_an_episode_that_occurs_twice_in_a_file_counts_once(tmp_path):
    line = msgspec.json.encode(EPISODES[0])
    (tmp_path / "in.jsonl").write_bytes(line + b"\n" + line + b"\n")
    store = EpisodeStore(tmp_path / "s.sqlite")
    assert import_episodes(store, read_jsonl(tmp_path / "in.jsonl")) == (1, 1)
    assert (store.count(), len(list(store.episodes()))) == (1, 1)
    assert "occurs a second time" in store.quarantined()[0][2]


@needs_pyarrow
def test_parquet_of_another_kind_or_damaged_is_refused(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(InvalidEpisode, match=r"a\.parquet: columns \['x'\], expected \['episode_id'"):
        list(read_parquet(path))
    write_parquet(EPISODES, path)
    table = parquet.read_table(path)
    tokens = table.column_names.index("tokens")
    changed = pa.array([[1] * 7, [1] * 7, [], [9, 9, 5, 6, 9, 7, 2]], table.schema.field(tokens).type)
    parquet.write_table(table.set_column(tokens, table.schema.field(tokens), changed), path)
    found = list(read_parquet(path))
    assert [isinstance(row, Damaged) for row in found] == [True, True, False, False]
    assert "a.parquet row 1: damaged: its checksum is wrong" in found[0].reason
    parquet.write_table(table.replace_schema_metadata({"record": "7"}), path)
    with pytest.raises(InvalidEpisode, match="record version 7, expected 1"):
        list(read_parquet(path))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidEpisode, match=r"a\.parquet: no readable Parquet file"):
        list(read_parquet(path))


def test_rows_of_results_have_the_fields_that_verifiers_writes():
    row = to_row(EPISODES[0])
    assert row["example_id"] == 0 and row["reward"] == 1.25 and row["is_completed"] and not row["is_truncated"]
    assert [m["role"] for m in row["prompt"] + row["completion"]] == ["user", "assistant", "user", "assistant"]
    first, second = (step["tokens"] for step in row["trajectory"])
    assert (first["prompt_ids"], first["completion_ids"]) == ([9, 9], [5, 6])
    assert (second["prompt_ids"], second["completion_ids"]) == ([9, 9, 5, 6, 9], [7, 2])
    assert first["completion_logprobs"] == [-0.1, -1.5] and second["completion_mask"] == [1, 1]
    assert [step["reward"] for step in row["trajectory"]] == [0.25, 1.0]


def foreign_row(**tokens):
    """A row as another program would write it: no word of ours."""
    steps = [
        {"tokens": {"prompt_ids": [9, 9], "completion_ids": [5, 6], "completion_mask": [1, 1],
                    "completion_logprobs": [-0.5, -1.0]}, "reward": None},
        {"tokens": {"prompt_ids": [9, 9, 5, 6, 9], "completion_ids": [7], "completion_mask": [1],
                    "completion_logprobs": [-2.0]} | tokens, "reward": None},
    ]  # fmt: skip
    return {"example_id": 5, "reward": 0.5, "is_truncated": True, "answer": "x", "trajectory": steps}


def test_rows_of_others_become_episodes():
    found = from_row(foreign_row(), number=7)
    assert found.tokens == [9, 9, 5, 6, 9, 7] and found.turn_ids == [0, 0, 0, 0, 1, 1]
    assert found.logprobs == [0.0, 0.0, -0.5, -1.0, 0.0, -2.0] and found.rewards == [0.0, 0.5]
    assert (found.group_id, found.episode_id, found.end_reason) == (5, "5-7", "truncated")


@pytest.mark.parametrize("field", ["completion_mask", "completion_logprobs"])
def test_rows_whose_lists_differ_in_length_are_refused(field):
    """A log-prob too many was cut off, so that each may have belonged to another token."""
    with pytest.raises(InvalidEpisode, match=r"turn 1: ids, mask and log-probs of its completion have lengths \[1, "):
        from_row(foreign_row(**{field: [1, -0.5]}), number=0)


def test_BUG_109_a_prompt_that_does_not_go_on_from_the_turns_before_it_is_refused():
    with pytest.raises(InvalidEpisode, match="turn 1: its prompt of 5 ids does not begin with the 4 ids before it"):
        from_row(foreign_row(prompt_ids=[9, 9, 5, 8, 9]), number=0)


@pytest.mark.parametrize("row", [{}, [], None, {"trajectory": [{"tokens": None}], "example_id": 0, "reward": 1.0}])
def test_rows_without_token_ids_are_refused(row):
    with pytest.raises(InvalidEpisode, match="token ids"):
        from_row(row, number=0)


@pytest.mark.parametrize("fields", [None, [], 3, "x", {}, {"record": 9}])
def test_what_is_no_record_is_refused(fields):
    with pytest.raises(InvalidEpisode, match="no episode of record version 1"):
        from_plain(fields)


def test_the_program_goes_both_ways(tmp_path):
    store = EpisodeStore(tmp_path / "a.sqlite")
    store.add(0, EPISODES[:2])
    store.close()

    def run(*arguments):
        command = [sys.executable, "-m", "experiments.episodes", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    out, copy = tmp_path / "results", tmp_path / "b.sqlite"
    done = run(f"--store={store.path}", f"--output={out}", "--format=verifiers")
    assert done.stdout == f"2 episodes written to {out}\n", done.stderr
    done = run(f"--store={copy}", f"--input={out}", "--format=verifiers")
    assert done.stdout == f"2 episodes read into {copy}, 0 rows quarantined\n", done.stderr
    assert same(list(EpisodeStore(copy).episodes()), EPISODES[:2])
    assert run(f"--store={copy}").returncode != 0
