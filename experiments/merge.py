r"""Merges policies into a reference, for scores against references that are nearer to the policy.

    python -m experiments.merge --reference=base --policy=tuned --output=runs/merged --alpha=0.5
    python -m experiments.merge --reference=base --policy=one,two --output=runs/sweep --method=ties --alpha=0,0.25,0.5

Models are Hugging Face folders of safetensors, sharded or not. One α writes the output folder itself, several write
folders `alpha-0.25` in it.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments import programs
from mpo_jax.scoring.merging import METHODS, Recipe, merge_folders

REFERENCE = flags.DEFINE_string("reference", None, "Folder of the model that task vectors start from.", required=True)
POLICY = flags.DEFINE_list("policy", None, "Folders of the models that they lead to.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "Folder to write; it must not exist.", required=True)
METHOD = flags.DEFINE_enum("method", "linear", list(METHODS), "How task vectors are merged.")
ALPHA = flags.DEFINE_list("alpha", ["0.5"], "How far to go: 0 is the reference. Several numbers are a sweep.")
DENSITY = flags.DEFINE_float("density", 0.2, "Share of entries that ties and dare keep.", lower_bound=0, upper_bound=1)
WEIGHTS = flags.DEFINE_list("weights", None, "One number a policy; all alike by default. Not for emr.")
SEED = flags.DEFINE_integer("seed", 0, "Of what dare drops.")


def numbers(flag: str, texts: Sequence[str]) -> list[float]:
    """What a flag lists."""
    try:
        return [float(text) for text in texts]
    except ValueError as error:
        raise ValueError(f"{flag}={','.join(texts)}, expected numbers: {error}") from error


def main(_):
    weights = None if WEIGHTS.value is None else tuple(numbers("weights", WEIGHTS.value))
    recipe = Recipe(method=METHOD.value, density=DENSITY.value, weights=weights, seed=SEED.value)
    alphas, output = numbers("alpha", ALPHA.value), Path(OUTPUT.value)
    outputs = {output: alphas[0]} if len(alphas) == 1 else {output / f"alpha-{alpha:g}": alpha for alpha in alphas}
    merge_folders(recipe, REFERENCE.value, POLICY.value, outputs)
    print("\n".join(map(str, outputs)))


if __name__ == "__main__":
    programs.run(main)
