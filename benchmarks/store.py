"""Episodes a second into the SQLite store and out of it again, at 4 KB an episode.

    python -m benchmarks.store

Every episode is checked and committed in a group of its own (the worst case), then taken by the learner in batches,
checksum and fields checked again. Beside them, the same records through SQLite alone, without any check, a commit
each: the ratio is what the checks cost. All on one core, best of some repeats; where other processes share the core,
the rate by the CPU's own time says what a quiet one would give.
"""

import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from absl import app, flags

from mpo_jax.store.episode import Episode, encode
from mpo_jax.store.sqlite import EpisodeStore

EPISODES = flags.DEFINE_integer("episodes", 4000, "How many.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 3, "How often; the best counts.", lower_bound=1)
OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "Folder of the table.")
BATCH = flags.DEFINE_integer("batch", 100, "Groups that the learner takes at once.", lower_bound=1)


def make_episodes(number: int) -> list[Episode]:
    """Episodes of 4 turns with 40 ids read and 16 sampled each: about 4 KB as records."""
    rng, turns, read, sampled = np.random.default_rng(0), 4, 40, 16
    mask = ([False] * read + [True] * sampled) * turns
    return [
        Episode(
            episode_id=f"{group_id:08d}-000",
            group_id=group_id,
            task_id=str(group_id),
            tokens=rng.integers(0, 150_000, len(mask)).tolist(),
            action_mask=mask,
            executable_mask=mask,
            turn_ids=[index // (read + sampled) for index in range(len(mask))],
            logprobs=[-float(x) if flag else 0.0 for x, flag in zip(rng.random(len(mask)), mask, strict=True)],
            rewards=[0.0] * (turns - 1) + [1.0],
            state_ids=list(range(turns)),
            versions=[group_id] * turns,
            end_reason="terminated",
            metadata={"observations": ["text " * 20] * turns},
        )
        for group_id in range(number)
    ]


def rate(work: Callable[[], None], number: int) -> np.ndarray:
    """Episodes a second of some work: by the clock, and by the time that the CPU spent on it."""
    start = np.array([time.perf_counter(), time.process_time()])
    work()
    return number / (np.array([time.perf_counter(), time.process_time()]) - start)


def through_the_store(path: Path, episodes: list[Episode]) -> dict[str, np.ndarray]:
    """In one by one, out in batches."""
    store = EpisodeStore(path, vocab_size=150_000)

    def put() -> None:
        for episode in episodes:
            store.add(episode.group_id, [episode])

    def take() -> None:
        for step in range(len(episodes) // BATCH.value):
            store.take(BATCH.value, step)

    found = {"store in": rate(put, len(episodes)), "store out": rate(take, len(episodes) // BATCH.value * BATCH.value)}
    store.close()
    return found


def through_sqlite(path: Path, records: list[bytes]) -> dict[str, np.ndarray]:
    """The same bytes, unchecked."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("CREATE TABLE records (id INTEGER PRIMARY KEY, record BLOB)")

    def put() -> None:
        for number, record in enumerate(records):
            db.execute("INSERT INTO records VALUES (?, ?)", (number, record))

    def take() -> None:
        for _ in db.execute("SELECT record FROM records ORDER BY id"):
            pass

    found = {"sqlite in": rate(put, len(records)), "sqlite out": rate(take, len(records))}
    db.close()
    return found


def main(_):
    episodes = make_episodes(EPISODES.value)
    records = [encode(episode) for episode in episodes]
    best: dict[str, np.ndarray] = {}
    for _ in range(REPEATS.value):
        with tempfile.TemporaryDirectory() as folder:
            found = through_the_store(Path(folder) / "s.sqlite", episodes)
            found |= through_sqlite(Path(folder) / "plain.sqlite", records)
        best = {name: np.maximum(value, best.get(name, 0.0)) for name, value in found.items()}
    size = np.mean([len(record) for record in records])
    lines = [
        f"{len(episodes)} episodes of {size:.0f} bytes, best of {REPEATS.value} runs. Episodes a second, by the clock "
        "and by the CPU's time.",
        "",
        "| way | store | by CPU | SQLite alone | by CPU | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for way in ("in", "out"):
        store, plain = best[f"store {way}"], best[f"sqlite {way}"]
        rates = " | ".join(f"{rate:,.0f}" for rate in (*store, *plain))
        lines.append(f"| {way} | {rates} | {store[1] / plain[1]:.2f} |")
    lines += ["", f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end."]
    print("\n".join(lines))
    output = Path(OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    (output / "store.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    app.run(main)
