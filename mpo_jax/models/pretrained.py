"""A model in a folder: `config.json`, `tokenizer.json`, `model.safetensors`."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from mpo_jax.models import weights
from mpo_jax.models.tokenizer import ChatTokenizer
from mpo_jax.models.transformer import Critic, Transformer, TransformerConfig

PACKAGED = Path(__file__).with_name("data")


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A transformer's shape, its parameters in float32, and its tokenizer."""

    config: TransformerConfig
    params: nnx.State
    tokenizer: ChatTokenizer


def shapes(config: TransformerConfig) -> nnx.State:
    """The parameters of a transformer as shapes, for `unflatten` and `eval_shape`."""
    return nnx.state(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


def save(folder: Path | str, model: Pretrained) -> None:
    """Writes the folder, parameters as bfloat16."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(model.config), indent=2) + "\n")
    model.tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    arrays = {name: x.astype(jnp.bfloat16) for name, x in weights.flatten(model.params).items()}
    save_file(arrays, folder / "model.safetensors")


def load(name: Path | str) -> Pretrained:
    """Reads a folder, or a packaged model by its name ("search_tiny").

    Raises:
      ValueError: a file is missing, damaged, or does not fit the others; the message names it.
    """
    folder = PACKAGED / name if (PACKAGED / name).is_dir() else Path(name)
    try:
        config = TransformerConfig(**json.loads((folder / "config.json").read_text()))
        arrays = {k: x.astype("float32") for k, x in load_file(folder / "model.safetensors").items()}
        params = weights.unflatten(shapes(config), arrays)
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder}: no readable model: {error}") from error
    tokenizer = ChatTokenizer.load(folder / "tokenizer.json")
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(f"{folder}: tokenizer of {tokenizer.vocab_size} ids, model of {config.vocab_size}")
    return Pretrained(config=config, params=params, tokenizer=tokenizer)


def critic_params(config: TransformerConfig, policy: nnx.State) -> nnx.State:
    """A critic whose trunk starts as the policy's and whose value starts as zero."""
    critic = Critic(config, rngs=nnx.Rngs(0))
    nnx.update(critic.trunk, policy)
    return nnx.state(critic)
