"""Measures models beside `transformers` and torch on one pinned core, and writes tables to benchmarks/results/.

.venv/bin/python -m benchmarks.models                  # a tiny model: decoding, episodes, the train step; minutes
.venv/bin/python -m benchmarks.models --only=smollm2   # decoding with SmolLM2-135M-Instruct
"""

import os
import pathlib

import numpy as np
from absl import app, flags

_ONLY = flags.DEFINE_list("only", ["decode", "episodes", "train_step"], "What to measure; also smollm2.")
_BATCHES = flags.DEFINE_list("batches", ["1", "16", "64"], "Slots of decode.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Runs of each contestant.")
_CORE = flags.DEFINE_integer("core", 0, "The core that everything is pinned to.")
_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "Folder of the tables, one file for each of --only.")


def main(_) -> None:
    os.sched_setaffinity(0, {_CORE.value})  # before the libraries start their threads
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    import torch

    from benchmarks import decode, measure, train_step
    from experiments.parts import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(1)
    rng, repeats = np.random.default_rng(0), _REPEATS.value

    def prompts(models, *shape: int) -> np.ndarray:
        return rng.integers(0, models[1].vocab_size, (*shape, 32))

    def turns(name: str, models, batches: list[int], tokens: int):
        return (decode.turn(name, models, prompts(models, batch), tokens, repeats) for batch in batches)

    cases = {
        "decode": lambda tiny: turns("tiny", tiny, list(map(int, _BATCHES.value)), 64),
        "episodes": lambda tiny: [decode.episodes("tiny", tiny, prompts(tiny, 6, 16), 64, repeats)],
        "train_step": lambda tiny: [train_step.case(tiny, 16, 256, repeats)],
        "smollm2": lambda _: turns("SmolLM2-135M", decode.smollm2(), [8], 32),
    }
    output = pathlib.Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    for name in _ONLY.value:
        before = measure.machine()
        rows = [row for case in cases[name](decode.tiny()) for row in measure.run(case)]
        text = "\n\n".join([measure.table(rows), f"Before: {before}.", f"After: {measure.machine()}."]) + "\n"
        print(text, flush=True)
        (output / f"{name}.md").write_text(text)


if __name__ == "__main__":
    app.run(main)
