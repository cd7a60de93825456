r"""Takes episodes out of a run's store, or puts them into one, as JSON lines, Parquet or the results of `verifiers`.

    python -m experiments.episodes --workdir=runs/search --output=episodes.jsonl
    python -m experiments.episodes --workdir=runs/search --output=results --format=verifiers
    python -m experiments.episodes --store=copy.sqlite --input=episodes.jsonl

The store is only read when episodes are taken out. What cannot be read of a file goes to the store's quarantine.
"""

from pathlib import Path

from absl import app, flags

from experiments import programs
from mpo_jax.store.export import import_episodes, read_jsonl, write_jsonl
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.verifiers_results import read_results, write_results

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run whose store is meant.")
STORE = flags.DEFINE_string("store", None, "The store itself, where it is not a run's.")
INPUT = flags.DEFINE_string("input", None, "File or folder to put into the store, which is made if absent.")
OUTPUT = flags.DEFINE_string("output", None, "File or folder to write.")
FORMAT = flags.DEFINE_enum("format", "jsonl", ["jsonl", "parquet", "verifiers"], "Of the input or output.")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", None, "Refuse episodes with ids from it on.", lower_bound=1)


def formats() -> dict:
    """How each format is read and written."""
    if FORMAT.value == "parquet":  # an optional package
        from mpo_jax.store import parquet

        return {"parquet": (parquet.read_parquet, parquet.write_parquet)}
    name = Path(WORKDIR.value or STORE.value).stem
    return {
        "jsonl": (read_jsonl, write_jsonl),
        "verifiers": (
            read_results,
            lambda episodes, folder: write_results(episodes, folder, environment="mpo_jax", model=name),
        ),
    }


def main(_):
    if (WORKDIR.value is None) == (STORE.value is None) or (INPUT.value is None) == (OUTPUT.value is None):
        raise app.UsageError("expected one of --workdir and --store, and one of --input and --output")
    path = STORE.value or Path(WORKDIR.value) / "episodes.sqlite"
    read, write = formats()[FORMAT.value]
    if INPUT.value is not None and not Path(INPUT.value).exists():
        raise ValueError(f"{INPUT.value}: no such file or folder")
    store = EpisodeStore(path, read_only=INPUT.value is None, vocab_size=VOCAB_SIZE.value)
    if INPUT.value is None:
        print(f"{write(store.episodes(), OUTPUT.value)} episodes written to {OUTPUT.value}")
    else:
        before = store.count()
        number, damaged = import_episodes(store, read(INPUT.value, VOCAB_SIZE.value))
        known = number - (store.count() - before)
        print(
            f"{number} episodes read into {path}, {damaged} rows quarantined"
            + (f"; {known} were of groups that it has already" if known else "")
        )
    store.close()


if __name__ == "__main__":
    programs.run(main)
