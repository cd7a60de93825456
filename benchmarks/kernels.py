"""Measures the kernels beside their peers on one pinned core, prints one table and writes it to benchmarks/results/.

make bench                                        # everything; an hour on a busy machine
.venv/bin/python -m benchmarks.kernels --only=advantages,turn_loss
"""

import os
import pathlib

from absl import app, flags

_ONLY = flags.DEFINE_list("only", ["advantages", "turn_loss", "linear_logprobs", "packing"], "What to measure.")
_SHAPES = flags.DEFINE_list("shapes", ["64x4096", "256x8192"], "Rows × tokens of advantages and losses.")
_WIDTHS = flags.DEFINE_list("widths", ["256", "1024"], "Widths D of the hidden states.")
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "Of hidden states and head.")
_TOKENS = flags.DEFINE_integer("tokens", 1024, "N.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 151_936, "V.")
_EPISODES = flags.DEFINE_integer("episodes", 64, "Of the search environment, packed and one a row.")
_REPEATS = flags.DEFINE_integer(
    "repeats", 21, "Runs of each contestant; verl's GAE and log-probs get a third and a seventh."
)
_CORE = flags.DEFINE_integer("core", 0, "The core that everything is pinned to; -1 for all cores.")
_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "Folder of the tables, one file for each of --only.")


def main(_) -> None:
    if _CORE.value >= 0:
        os.sched_setaffinity(0, {_CORE.value})  # before the libraries start their threads
    from benchmarks import advantages, linear_logprobs, measure, packing, turn_loss

    shapes = [tuple(map(int, shape.split("x"))) for shape in _SHAPES.value]
    heads = [
        (_TOKENS.value, int(width), _VOCABULARY.value, dtype) for dtype in _DTYPES.value for width in _WIDTHS.value
    ]
    cases = {
        "advantages": lambda: (advantages.case(*shape, -(-_REPEATS.value // 3)) for shape in shapes),
        "turn_loss": lambda: (turn_loss.case(*shape, _REPEATS.value) for shape in shapes),
        "linear_logprobs": lambda: (linear_logprobs.case(*head, -(-_REPEATS.value // 7)) for head in heads),
        "packing": lambda: [packing.case(_EPISODES.value, -(-_REPEATS.value // 3))],
    }
    output = pathlib.Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    for name in _ONLY.value:
        before = measure.machine()
        rows = [row for case in cases[name]() for row in measure.run(case)]
        notes = [f"Before: {before}.", f"After: {measure.machine()}."]
        if name == "linear_logprobs":
            notes += map(linear_logprobs.temporaries, heads)
        if name == "packing":
            notes.append(packing.ideal(_EPISODES.value))
        text = "\n\n".join([measure.table(rows), *notes]) + "\n"
        print(text, flush=True)
        (output / f"{name}.md").write_text(text)


if __name__ == "__main__":
    app.run(main)
