"""Low-rank adapters of a run: from its config, and to the folders where PEFT finds them."""

from pathlib import Path

import ml_collections

from mpo_jax.models import lora
from mpo_jax.models.actor_critic import whole_critic
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.training.state import TrainState


def configured(config: ml_collections.ConfigDict) -> lora.LoraConfig | None:
    """What is trained in place of the parameters; None where they are, as in runs from before there were adapters.

    Raises:
      ValueError: a rank that is negative.
    """
    if "lora" not in config or config.lora.rank == 0:
        return None
    return lora.LoraConfig(rank=config.lora.rank, alpha=config.lora.alpha, targets=tuple(config.lora.targets))


def save(workdir: Path, config: ml_collections.ConfigDict, model: Pretrained, state: TrainState) -> None:
    """Writes the trained adapters, if there are any: `adapter/`, and `critic_adapter/` with its value layer."""
    if (adapters := configured(config)) is not None:
        lora.save(workdir / "adapter", adapters, model.config, state.policy, config.model)
        if state.critic is not None:
            shared = config.get("shared_trunk") is not None
            critic = whole_critic(state.policy, state.critic) if shared else state.critic
            lora.save(workdir / "critic_adapter", adapters, model.config, critic, config.model)
