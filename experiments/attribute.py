r"""Names the step that made each failed episode of Who&When fail, and says how often that is the labelled one.

    python -m experiments.attribute --data=who_and_when --split=Hand-Crafted --rule=first
    python -m experiments.attribute --data=who_and_when --split=Hand-Crafted --rule=min_cumulative --scores=hand.csv

The second one takes the steps' scores from a table of `experiments.score --format=who_and_when`.
"""

import json

from absl import flags, logging

from experiments import programs
from mpo_jax.scoring.attribution import RULES, SPLITS, attribute

DATA = flags.DEFINE_string("data", None, "Folder that holds a folder for each split.", required=True)
SPLIT = flags.DEFINE_enum("split", None, SPLITS, "Which episodes.", required=True)
RULE = flags.DEFINE_enum("rule", None, list(RULES), "How the step is chosen.", required=True)
SCORES = flags.DEFINE_string("scores", None, "Table of the steps' scores (.parquet, .csv, .jsonl).")
COLUMN = flags.DEFINE_string("column", None, "Of that table; the rule's own (score, mean_logprob) without it.")
ONLY_SCORED = flags.DEFINE_bool("only_scored", False, "Files that are not in the table do not count.")
SEED = flags.DEFINE_integer("seed", 0, "Of the rule `random`.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")


def main(_):
    logging.set_verbosity(logging.WARNING)
    found = attribute(
        DATA.value,
        SPLIT.value,
        RULE.value,
        scores=SCORES.value,
        column=COLUMN.value,
        only_scored=ONLY_SCORED.value,
        seed=SEED.value,
    )
    if JSON.value:
        print(json.dumps(found))
        return
    print(f"{found['split']}, {found['rule']}: {found['files']} files")
    for kind in ("unreadable", "unscored"):
        for line in found[kind]:
            print(f"{kind}, counted as wrong: {line}")
    print(f"{'matching':12}{'agent':24}{'step':24}".rstrip())
    for matching in ("exact", "benchmark"):
        cells = []
        for kind, (low, high) in found["intervals"][matching].items():
            cells.append(f"{found[matching][kind]:.3f} [{low:.3f}, {high:.3f}]")
        print(f"{matching:12}" + "".join(f"{cell:24}" for cell in cells).rstrip())


if __name__ == "__main__":
    programs.run(main)
