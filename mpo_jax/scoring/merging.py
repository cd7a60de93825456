"""Reference policies merged in weight space: θ_ref + α · consensus_k sparsify(τ_k), τ_k = θ_k − θ_ref.

α = 0 is the reference; with one policy and no sparsification α = 1 is the policy. A method is two stages: what is kept
of each task vector, and what is made of all of them. See *Progress Advantage* (arXiv:2606.26080) for the use.
"""

import contextlib
import dataclasses
import json
import math
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mpo_jax.scoring.shards import Shards, check_same_tensors, is_float


def keep(vector: np.ndarray, density: float, rng: np.random.Generator) -> np.ndarray:
    """The task vector as it is."""
    return vector


def trim(vector: np.ndarray, density: float, rng: np.random.Generator) -> np.ndarray:
    """The ⌊density · n⌋ entries of largest magnitude; the others become 0.

    See *TIES-Merging* (arXiv:2306.01708), section 4. Here n is the tensor's size, as in peft and mergekit, where the
    paper ranks the entries of the whole model; which of equal entries stay is not defined.
    """
    kept = np.zeros(vector.size, bool)
    if number := int(density * vector.size):
        kept[np.argpartition(np.abs(vector), -number)[-number:]] = True
    return np.where(kept, vector, 0)


def drop(vector: np.ndarray, density: float, rng: np.random.Generator) -> np.ndarray:
    """Each entry survives with probability `density` and is divided by it, so that the expectation stays.

    See *Language Models are Super Mario* (DARE, arXiv:2311.03099), section 3; its drop rate is 1 − density.
    """
    survives = rng.random(vector.shape, np.float32) < density
    return np.where(survives, vector / (density or 1.0), 0)


def mean(vectors: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Σ_k w_k τ_k / Σ_k w_k."""
    return weights @ vectors / weights.sum()


def elect(vectors: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted mean of the τ_k whose sign is s = sgn Σ_k τ_k; 0 where s is 0 or nobody agrees.

    See *TIES-Merging* (arXiv:2306.01708), section 4. Signs are elected without weights, as there; peft takes s = +1
    for a sum of 0.
    """
    sign = np.sign(vectors.sum(axis=0))
    share = weights[:, None] * ((np.sign(vectors) == sign) & (sign != 0))
    total = share.sum(axis=0)
    return (share * vectors).sum(axis=0) / np.where(total > 0, total, 1)


def unify(vectors: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """M_1 ⊙ τ_uni: the largest entry of the elected sign s = sgn Σ_k τ_k, where the first vector has that sign too.

    See *EMR-Merging* (arXiv:2405.17461), section 3.2. It knows no weights.
    """
    sign = np.sign(vectors.sum(axis=0))
    return sign * np.maximum(vectors * sign, 0).max(axis=0) * (vectors[0] * sign > 0)


@dataclasses.dataclass(frozen=True)
class Method:
    """A merging method.

    Attributes:
      sparsify: (task vector [n], density, generator) -> what is kept of it [n].
      consensus: (task vectors [K,n], weights [K]) -> one vector [n].
      rescale: multiply by λ = Σ|τ_1| / Σ|merged| over the whole model, which takes a pass of its own.
    """

    sparsify: Callable[[np.ndarray, float, np.random.Generator], np.ndarray]
    consensus: Callable[[np.ndarray, np.ndarray], np.ndarray]
    rescale: bool = False


METHODS = {
    "linear": Method(keep, mean),
    "wise_ft": Method(keep, mean),  # *Robust fine-tuning of zero-shot models* (arXiv:2109.01903): with one policy
    "ties": Method(trim, elect),
    "dare_linear": Method(drop, mean),
    "dare_ties": Method(drop, elect),
    "emr": Method(keep, unify, rescale=True),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How task vectors are merged.

    With one policy `ties` is trimming alone, `dare_ties` is `dare_linear` and `emr` is `linear`.

    Attributes:
      method: a name of `METHODS`; `wise_ft` is `linear`.
      density: share of entries that `ties` and `dare_*` keep.
      weights: one a policy, relative to each other, for all methods but `emr`; None weighs all alike.
      seed: of what `dare_*` drop; a tensor's own depends on its name, not on its place in the files.

    Raises:
      ValueError: an unknown method, a density outside [0, 1], or weights that are negative or all 0.
    """

    method: str = "linear"
    density: float = 0.2
    weights: tuple[float, ...] | None = None
    seed: int = 0

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"method {self.method!r}, expected one of {', '.join(METHODS)}")
        if not 0 <= self.density <= 1:
            raise ValueError(f"density is {self.density}, expected 0 to 1")
        if self.weights is not None and not (min(self.weights) >= 0 and 0 < sum(self.weights) < math.inf):
            raise ValueError(f"weights are {self.weights}, expected numbers of at least 0 that are not all 0")


def merge_tensor(recipe: Recipe, name: str, reference: np.ndarray, policies: Sequence[np.ndarray]) -> np.ndarray:
    """What α multiplies, for one tensor, without λ: consensus_k sparsify(θ_k − θ_ref), in float32 at least.

    Args:
      recipe: how.
      name: of the tensor; it seeds what is dropped.
      reference: of any shape and float dtype.
      policies: as many as there are weights, of the same shape.
    """
    method, rng = METHODS[recipe.method], np.random.default_rng([recipe.seed, zlib.crc32(name.encode())])
    dtype = np.promote_types(np.float32, reference.dtype)
    base, *others = (x.reshape(-1).astype(dtype) for x in (reference, *policies))
    vectors = np.stack([method.sparsify(other - base, recipe.density, rng) for other in others])
    weights = np.asarray(recipe.weights or [1] * len(policies), dtype)
    return method.consensus(vectors, weights).reshape(reference.shape)


def merge_folders(
    recipe: Recipe, reference: Path | str, policies: Sequence[Path | str], outputs: Mapping[Path, float]
) -> None:
    """Writes one merged model for each α of a sweep, reading every tensor once (twice for `emr`).

    A tensor of each model is in memory at a time, whatever their number. Files, dtypes, config and tokenizer are the
    reference's; `merge.json` holds the recipe. Tensors of integers must be equal and are copied. A folder appears
    whole or not at all.

    Args:
      recipe: how the task vectors are merged.
      reference: a folder of safetensors, sharded or not.
      policies: folders with tensors of the same names and shapes; `emr` reconstructs the first.
      outputs: folder to write -> its α, usually in [0, 1].

    Raises:
      ValueError: a folder that exists already, an unreadable file, tensors that do not fit, or a merged tensor that
        is not finite; the message names the folder and the tensor.
    """
    base, members = Shards(reference), [Shards(policy) for policy in policies]
    _check(recipe, base, members, outputs)
    scale = _rescaling(recipe, base, members) if METHODS[recipe.method].rescale else 1.0
    unfinished = {folder.with_name(folder.name + ".unfinished"): alpha for folder, alpha in outputs.items()}
    try:
        for folder, alpha in unfinished.items():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            base.copy_rest(folder)
            about = {"reference": str(reference), "policies": [str(policy) for policy in policies], "alpha": alpha}
            (folder / "merge.json").write_text(json.dumps(dataclasses.asdict(recipe) | about, indent=2) + "\n")
        progress = tqdm(total=len(base.kinds), unit="tensor", dynamic_ncols=True)
        with progress:
            for file_name in base.files:
                _write_file(recipe, base, members, file_name, unfinished, scale, progress)
        for folder, final in zip(unfinished, outputs, strict=True):
            folder.replace(final)
    finally:
        for folder in unfinished:
            shutil.rmtree(folder, ignore_errors=True)


def _check(recipe: Recipe, base: Shards, members: Sequence[Shards], outputs: Mapping[Path, float]) -> None:
    if not members or not outputs:
        raise ValueError(f"{len(members)} policies and {len(outputs)} values of alpha, expected at least one of each")
    if recipe.weights is not None and len(recipe.weights) != len(members):
        raise ValueError(f"{len(recipe.weights)} weights for {len(members)} policies")
    for folder, alpha in outputs.items():
        if not math.isfinite(alpha):
            raise ValueError(f"{folder}: alpha is {alpha}, expected a finite number")
        if folder.exists():
            raise ValueError(f"{folder}: exists already")
    for member in members:
        check_same_tensors(base, member)


def _rescaling(recipe: Recipe, base: Shards, members: Sequence[Shards]) -> float:
    """λ of EMR; 1 where nothing was learnt."""
    of_first, of_merged = 0.0, 0.0
    for name, (dtype, _) in base.kinds.items():
        if is_float(dtype):
            reference, policies = base.read(name), [member.read(name) for member in members]
            difference = policies[0].astype(np.float32) - reference.astype(np.float32)
            of_first += float(np.abs(difference).sum(dtype=np.float64))
            of_merged += float(np.abs(merge_tensor(recipe, name, reference, policies)).sum(dtype=np.float64))
    return of_first / of_merged if of_merged else 1.0


def _write_file(
    recipe: Recipe,
    base: Shards,
    members: Sequence[Shards],
    file_name: str,
    outputs: Mapping[Path, float],
    scale: float,
    progress: tqdm,
) -> None:
    """One shard of every output: the reference's header, then its tensors in the same order and dtypes."""
    with contextlib.ExitStack() as stack:
        files = {stack.enter_context((folder / file_name).open("wb")): alpha for folder, alpha in outputs.items()}
        for file in files:
            file.write(base.header(file_name))
        for name in base.files[file_name]:
            reference, policies = base.read(name), [member.read(name) for member in members]
            if is_float(base.kinds[name][0]):
                vector = scale * merge_tensor(recipe, name, reference, policies)
                for file, alpha in files.items():
                    merged = (reference.astype(vector.dtype) + alpha * vector).astype(reference.dtype)
                    if not np.isfinite(merged).all():
                        raise ValueError(f"tensor {name!r} of shape {merged.shape} is not finite at alpha={alpha}")
                    file.write(merged.reshape(-1).view(np.uint8))
            else:
                for member, policy in zip(members, policies, strict=True):
                    if not np.array_equal(policy, reference):
                        raise ValueError(f"{member.folder}: integers of tensor {name!r} differ from the reference's")
                for file in files:
                    file.write(reference.reshape(-1).view(np.uint8))
            progress.update()
