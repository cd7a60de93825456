r"""Trains low-rank adapters of a language model to imitate the actions of a file's successful episodes.

    python -m experiments.imitate --model=smollm2 --episodes=results.json --format=tau_bench --output=runs/imitation

Adapters and model are then a pair for `experiments.score`. Of episodes that the model played itself this is a step of
rejection sampling, towards the optimum of their reward under a KL penalty; of another agent's episodes it teaches as
much of that agent's manner as of the reward. They are rendered as they are scored; the folder is one of PEFT.
"""

import dataclasses
from pathlib import Path

from absl import flags, logging
from flax import nnx
from tqdm import tqdm

from experiments import parts, programs
from mpo_jax import evaluation
from mpo_jax.models import lora, weights
from mpo_jax.models.config import TransformerConfig
from mpo_jax.scoring import readers, rendering, sources
from mpo_jax.training import imitation

MODEL = flags.DEFINE_string("model", None, "A folder, a GGUF file or a packaged model.", required=True)
EPISODES = flags.DEFINE_string("episodes", None, "File of episodes.", required=True)
FORMAT = flags.DEFINE_enum("format", "messages", list(readers.FORMATS), "Of that file.")
OUTPUT = flags.DEFINE_string("output", None, "Folder to write the adapters to.", required=True)
THRESHOLD = flags.DEFINE_float("threshold", None, "Lowest reward that is a success; |reward - 1| <= 1e-6 without it.")
STEPS = flags.DEFINE_integer(
    "num_steps", 16, "Gradient steps, of one row each; the rate of the first is 0.", lower_bound=2
)
ROW_TOKENS = flags.DEFINE_integer("row_tokens", 1024, "Of a row; longer episodes keep their last.", lower_bound=2)
RATE = flags.DEFINE_float("learning_rate", 2e-4, "The highest.")
RANK = flags.DEFINE_integer("rank", 16, "Of the adapters; alpha is twice that.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Of the adapters, and of the order of the episodes.")


def scanned(config: TransformerConfig, params: nnx.State) -> tuple[TransformerConfig, nnx.State]:
    """The same with one compiled block for all layers, where they are alike: a deep model compiles in seconds."""
    if len(set(config.windows)) > 1 or config.dense_layers:
        return config, params
    return dataclasses.replace(config, scan_layers=True), weights.stacked(params)


def main(_):
    logging.set_verbosity(logging.WARNING)
    parts.keep_freed_memory()
    tokenizer, errors = sources.load_tokenizer(MODEL.value), []
    read = [one for one in readers.read(EPISODES.value, FORMAT.value, errors) if one.reward is not None]
    good = [one for one in read if evaluation.success(one.reward, THRESHOLD.value)]
    kept = [rendering.keep_last(rendering.render(one, tokenizer), ROW_TOKENS.value) for one in good]
    sequences = [(one.ids, one.mask) for one in map(rendering.without_first, kept) if any(one.mask)]
    if not sequences:
        raise ValueError(f"{EPISODES.value}: not one success to imitate among {len(read)} episodes with a reward")
    Path(OUTPUT.value).mkdir(parents=True, exist_ok=True)  # what cannot be written is told before the work
    print(f"{len(sequences)} of {len(read)} episodes are imitated; {len(errors)} could not be read")
    config, params = scanned(*sources.load_params(MODEL.value))
    settings = lora.LoraConfig(rank=RANK.value, alpha=2.0 * RANK.value)
    with tqdm(total=STEPS.value) as bar:

        def report(step: int, loss) -> None:
            bar.set_postfix(loss=f"{float(loss):.3f}")
            bar.update()

        adapters = imitation.imitate_by_adapters(
            config,
            params,
            settings,
            sequences,
            num_steps=STEPS.value,
            row_tokens=ROW_TOKENS.value,
            learning_rate=RATE.value,
            seed=SEED.value,
            report=report,
        )
    lora.save(Path(OUTPUT.value), settings, config, adapters, MODEL.value)


if __name__ == "__main__":
    programs.run(main)
