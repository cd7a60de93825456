r"""Scores the episodes of a file: Progress Advantage under a policy and its reference, and confidence baselines.

    python -m experiments.score --episodes=runs/quickstart/episodes.sqlite --format=store --output=scores.parquet \
        --reference=search_tiny
    python -m experiments.score --episodes=results.json --format=tau_bench --output=scores.csv \
        --policy=tuned --reference=base

A model is a folder or GGUF file, a folder of adapters as PEFT saves them (beside --base, or the model that the folder
names), or a server as `http://host:port/v1#model` (then --tokenizer too). "recorded" stands for the log-probs that the
file has itself. Interrupted, the same command goes on.
"""

import functools

from absl import flags, logging

from experiments import programs
from mpo_jax.scoring import pipeline, readers, sources
from mpo_jax.scoring.episode_scores import LEVELS, REDUCTIONS, Aggregation

EPISODES = flags.DEFINE_string("episodes", None, "File of episodes.", required=True)
FORMAT = flags.DEFINE_enum("format", "messages", list(readers.FORMATS), "Of that file.")
OUTPUT = flags.DEFINE_string("output", None, "Table to write (.parquet, .csv, .jsonl).", required=True)
POLICY = flags.DEFINE_string("policy", "recorded", "Model that acted.")
REFERENCE = flags.DEFINE_string("reference", None, "Its reference; without one there are baselines only.")
BASE = flags.DEFINE_string("base", "", "Model that adapters stand beside; the one that their folder names by default.")
TOKENIZER = flags.DEFINE_string("tokenizer", None, "Model whose tokenizer is used; the policy's by default.")
TOKENS = flags.DEFINE_enum("tokens", "mean", list(REDUCTIONS), "Tokens to a step.")
STEPS = flags.DEFINE_enum("steps", "mean", list(REDUCTIONS), "Steps to an episode.")
BETA = flags.DEFINE_float("beta", 1.0, "Scale of the scores.")
SUBTRACT_FIRST = flags.DEFINE_bool("subtract_first", False, "Subtract the models' log-probs, then aggregate.")
TOP_K_FORM = flags.DEFINE_bool("top_k_form", False, "Compare means of the highest log-probs, not the tokens' own.")
TOP_K = flags.DEFINE_integer("top_k", 20, "How many highest log-probs; 0 saves time and leaves their baselines out.")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 4096, "Longer episodes keep their last tokens.", lower_bound=2)
WHOLE = flags.DEFINE_bool("whole", False, "Longer episodes are passed over, not cut.")
LEVEL = flags.DEFINE_multi_enum("level", list(LEVELS), list(LEVELS), "Rows to write; may be repeated.")


def main(_):
    logging.set_verbosity(logging.WARNING)
    names = {"recorded": None, None: ""}
    policy, reference = (names.get(flag.value, flag.value) for flag in (POLICY, REFERENCE))
    job = pipeline.Job(
        episodes=EPISODES.value,
        kind=FORMAT.value,
        output=OUTPUT.value,
        policy=policy,
        reference=reference,
        base=BASE.value,
        max_tokens=MAX_TOKENS.value,
        whole=WHOLE.value,
        top_k=TOP_K.value,
        aggregation=Aggregation(TOKENS.value, STEPS.value, BETA.value, SUBTRACT_FIRST.value, TOP_K_FORM.value),
        levels=tuple(LEVEL.value),
    )
    named = TOKENIZER.value or policy or reference
    tokenizer = functools.cache(lambda: sources.load_tokenizer(named, job.base)) if named else None
    found = pipeline.score(
        job,
        lambda name: sources.load_source(name, tokenizer(), top_k=job.top_k, max_tokens=job.max_tokens, base=job.base),
        tokenizer,
    )
    passed_over = len(found["unreadable"])
    print(f"{job.output}: {found['rows']} rows on {found['episodes']} episodes; {passed_over} were passed over")


if __name__ == "__main__":
    programs.run(main)
