"""Low-rank adapters beside frozen parameters, of policy or critic, saved as PEFT does.

Adapters are a state of their own: an optimiser, checkpoints and published weights see them alone, and a model is
evaluated with `merge(config, base, adapters)`.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mpo_jax.models import layout, weights
from mpo_jax.models.config import TransformerConfig
from mpo_jax.types import Array

_CONFIG, _TENSORS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_FIXED = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which kernels W get a product beside them: W + (alpha / rank) A B. See *LoRA* (arXiv:2106.09685), Eq. 3.

    Attributes:
      rank: r, columns of A[in,r] and rows of B[r,out].
      alpha: over the rank, what multiplies the product.
      targets: names of the layers; experts have none.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("query", "key", "value", "output", "gate", "up", "down")

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}, expected at least 1")


def _is_target(config: LoraConfig, path: tuple) -> bool:
    return "blocks" in path and path[-1] == "kernel" and path[-2] in config.targets


def init(config: LoraConfig, base: nnx.State, key: Array) -> nnx.State:
    """Adapters that change nothing yet, A uniform in ±1/√in, B zero, and a critic's value layer, to be trained whole.

    Raises:
      ValueError: no kernel is a target.
    """
    flat = []
    for path, leaf in nnx.to_flat_state(base):
        value = leaf.get_value()
        if "value" in path and "blocks" not in path:
            flat.append((path, leaf.replace(jnp.copy(value))))
        if _is_target(config, path):
            *lead, rows, columns = value.shape
            key, own = jax.random.split(key)
            bound = 1 / math.sqrt(rows)
            a = jax.random.uniform(own, (*lead, rows, config.rank), minval=-bound, maxval=bound)
            flat.append(((*path[:-1], "lora_a"), nnx.Param(a)))
            flat.append(((*path[:-1], "lora_b"), nnx.Param(jnp.zeros((*lead, config.rank, columns)))))
    if not any(path[-1] == "lora_a" for path, _ in flat):
        raise ValueError(f"no kernel is named by the targets {config.targets}")
    return nnx.from_flat_state(flat)


def critic_base(policy: nnx.State) -> nnx.State:
    """A policy's parameters as the trunk of a critic, whose value layer is among the adapters."""
    flat = nnx.to_flat_state(policy)
    return nnx.from_flat_state([(("trunk", *path), leaf) for path, leaf in flat if path[0] != "output"])


def merge(config: LoraConfig, base: nnx.State, adapters: nnx.State) -> nnx.State:
    """The parameters that base and adapters are together, of the base's types; differentiable in both.

    What stands among the adapters and is none, as a critic's value layer, is taken as it is.
    """
    own = dict(nnx.to_flat_state(adapters))
    whole = {path: leaf for path, leaf in own.items() if path[-1] not in ("lora_a", "lora_b")}
    flat = []
    for path, leaf in (dict(nnx.to_flat_state(base)) | whole).items():
        if (*path[:-1], "lora_a") in own and path[-1] == "kernel":
            a, b = (own[(*path[:-1], name)].get_value() for name in ("lora_a", "lora_b"))
            change = (config.alpha / config.rank) * jnp.matmul(a, b)
            leaf = leaf.replace((leaf.get_value() + change).astype(leaf.get_value().dtype))
        flat.append((path, leaf))
    return nnx.from_flat_state(flat)


def _places(model: TransformerConfig, name: str) -> tuple[str, bool]:
    """PEFT's name of an adapter's or a value layer's array, and whether it is transposed there."""
    *layer, kind = name.split(".")
    kernel = ".".join([*layer, "kernel"])
    if kind not in ("lora_a", "lora_b"):
        return _PREFIX + layout.huggingface(model, name).names[0], kind == "kernel"
    theirs = layout.huggingface(model, kernel).names[0].removesuffix("weight")
    return f"{_PREFIX}{theirs}lora_{kind[-1].upper()}.weight", True


def save(folder: Path, config: LoraConfig, model: TransformerConfig, adapters: nnx.State, base_name: str = "") -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, which PEFT loads over the base model.

    Args:
      folder: made if absent.
      config: of the adapters.
      model: of the base model.
      adapters: of a policy, or of a critic with its value layer.
      base_name: where the base model is, for whoever loads the adapters without it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    adapters = weights.unstacked(adapters) if model.scan_layers else adapters
    tensors, modules = {}, set()
    for name, x in layout.names(adapters).items():
        theirs, transposed = _places(model, name)
        tensors[theirs] = np.ascontiguousarray(np.asarray(x).T if transposed else np.asarray(x))
        if ".lora_A." in theirs:
            modules.add(theirs.split(".")[-3])
    critic = any(name.startswith("value.") for name in layout.names(adapters))
    fields = _FIXED | {
        "task_type": "TOKEN_CLS" if critic else "CAUSAL_LM",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "modules_to_save": ["score"] if critic else None,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
    }
    save_file(tensors, folder / _TENSORS, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(fields, indent=2) + "\n")


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds adapters, as PEFT saves them, and no model of its own."""
    return (folder / _CONFIG).is_file()


def read_base_name(folder: Path) -> str:
    """What adapters' own config names as their base, a folder or a name on a hub; empty where it names none.

    Raises:
      ValueError: the config cannot be read.
    """
    return str(_read_fields(folder).get("base_model_name_or_path") or "")


def _read_fields(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no readable JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: a JSON {type(fields).__name__}, expected an object")
    return fields


def _check_fields(folder: Path, fields: dict[str, Any]) -> None:
    for name, kind in (("r", int), ("lora_alpha", int | float), ("target_modules", list)):
        if not isinstance(fields.get(name), kind):
            raise ValueError(f"{folder / _CONFIG}: {name} is {fields.get(name)!r}, expected {kind}")
    for name, value in _FIXED.items():
        if fields.get(name, value) != value:
            raise ValueError(f"{folder / _CONFIG}: {name} is {fields[name]!r}, only {value!r} is supported")
    if fields.get("rank_pattern") or fields.get("alpha_pattern"):
        raise ValueError(f"{folder / _CONFIG}: rank_pattern and alpha_pattern are not supported")


def load(folder: Path, model: TransformerConfig, base: nnx.State) -> tuple[LoraConfig, nnx.State]:
    """Reads adapters of a base model.

    Raises:
      ValueError: a kind of adapter that is not supported, or a tensor that is missing, foreign or of another shape.
    """
    fields = _read_fields(folder)
    _check_fields(folder, fields)
    modules = tuple(fields["target_modules"])
    targets = {
        path[-2]
        for path, _ in nnx.to_flat_state(base)
        if _is_target(LoraConfig(1, 1.0), path)
        and layout.huggingface(model, ".".join(map(str, path))).names[0].split(".")[-2] in modules
    }
    config = LoraConfig(rank=fields["r"], alpha=float(fields["lora_alpha"]), targets=tuple(sorted(targets)))
    like = jax.eval_shape(lambda: init(config, base, jax.random.key(0)))
    try:
        tensors = layout.Safetensors([folder / _TENSORS])
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / _TENSORS}: no readable tensors: {error}") from error
    places = {name: _places(model, name) for name in layout.names(like)}
    shapes = {places[name][0]: x.shape[::-1] if places[name][1] else x.shape for name, x in layout.names(like).items()}
    try:
        layout.check(tensors, shapes)
    except ValueError as error:
        raise ValueError(f"{folder / _TENSORS}: {error}") from error
    flat = []
    for path, leaf in nnx.to_flat_state(like):
        theirs, transposed = places[".".join(map(str, path))]
        x = tensors.read(theirs, (slice(None),) * len(leaf.get_value().shape))
        flat.append((path, leaf.replace(jnp.asarray((x.T if transposed else x).astype(np.float32)))))
    return config, nnx.from_flat_state(flat)
