"""What the programs share: the parts of a run, built from its config."""

import ctypes
import dataclasses

import ml_collections
import optax

from experiments import adapters
from mpo_jax import algorithms
from mpo_jax.models import pretrained
from mpo_jax.models.actor_critic import Models
from mpo_jax.models.chat import TemplateTokenizer
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.training import optimizers
from mpo_jax.training.checkpoints import Checkpoints
from mpo_jax.training.dense import Shaping, progress_shaping
from mpo_jax.training.learner import Settings
from mpo_jax.training.state import Optimizers, TrainState, initial_state


def keep_freed_memory() -> None:
    """Has glibc keep freed memory instead of giving it back to the system, where the C library is glibc.

    XLA's CPU backend allocates its large temporaries anew in every call; each page of them would be zeroed by the
    kernel again. On 2 cores the train step of the search model takes half as long so.
    """
    trim_threshold, mmap_max, arena_max = -1, -4, -8  # mallopt's parameters
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((trim_threshold, 2**31 - 1), (mmap_max, 0), (arena_max, 1)):
            mallopt(parameter, value)


def load_model(config: ml_collections.ConfigDict) -> Pretrained:
    """The configured model; its chat begins with the configured system message, if there is one.

    Raises:
      ValueError: it cannot be read, or is a tiny one, whose chat has no system message.
    """
    model = pretrained.load(config.model)
    if not config.system:
        return model
    if not isinstance(model.tokenizer, TemplateTokenizer):
        raise ValueError(f"system is {config.system!r}, but the chat of {config.model} has no system message")
    return dataclasses.replace(model, tokenizer=model.tokenizer.introduced(config.system))


def make_algorithm(config: ml_collections.ConfigDict) -> algorithms.Algorithm:
    """The configured algorithm with its section's hyperparameters, and the configured correction if there is one."""
    section = config[config.algorithm].to_dict() if config.algorithm in config else {}
    algorithm = algorithms.from_config(config.algorithm, **section)
    if not config.correction:
        return algorithm
    section = config[config.correction].to_dict() if config.correction in algorithms.CORRECTIONS else {}
    return algorithms.corrected(algorithm, config.correction, **section)


def settle_groups(config: ml_collections.ConfigDict, algorithm: algorithms.Algorithm) -> None:
    """Fills in the sizes of groups that were left to the algorithm.

    Raises:
      ValueError: groups of one for an algorithm that compares the episodes of a group.
    """
    if config.group_size is None:
        config.group_size = algorithm.group_size
    if algorithm.group_size > 1 and config.group_size < 2:
        raise ValueError(f"group_size={config.group_size}: {algorithm.name} compares the episodes of a group")
    if config.groups_per_step is None:
        config.groups_per_step = max(config.episodes_per_step // config.group_size, 1)
    if config.max_pending_groups is None:
        staleness = 1 if config.max_staleness is None else config.max_staleness
        config.max_pending_groups = (staleness + 1) * config.groups_per_step


def make_shaping(config: ml_collections.ConfigDict, model: Pretrained) -> Shaping:
    """The dense reward of the configured pair of models, or none.

    Raises:
      ValueError: a model cannot be read, or does not share the vocabulary of the one in training; an algorithm that
        tells successes by their rewards.
    """
    section = config.dense
    if not section.policy:
        return lambda batch: batch
    if config.algorithm == "vapo":
        raise ValueError("dense.policy changes returns, by which vapo tells the successes that it imitates")
    pair = pretrained.load(section.policy), pretrained.load(section.reference)
    if pair[0].config.vocab_size != model.config.vocab_size:
        raise ValueError(f"dense.policy={section.policy} has not the vocabulary of model={config.model}")
    return progress_shaping(*pair, coefficient=section.coefficient, beta=section.beta)


def make_settings(config: ml_collections.ConfigDict) -> Settings:
    """How the run is divided.

    Raises:
      ValueError: sizes that do not go together.
    """
    if config.max_pending_groups < config.groups_per_step:
        raise ValueError(
            f"max_pending_groups={config.max_pending_groups} is less than groups_per_step={config.groups_per_step}: "
            "the worker would wait for the learner, and the learner for the worker"
        )
    if config.row_tokens < config.context_length:
        raise ValueError(
            f"row_tokens={config.row_tokens} is less than context_length={config.context_length}: "
            "an episode could be longer than a row, and none is cut"
        )
    names = [field.name for field in dataclasses.fields(Settings)]
    if absent := sorted(set(names) - set(config)):
        raise ValueError(f"the config lacks {', '.join(absent)}")
    return Settings(**{name: config[name] for name in names})


def make_models(config: ml_collections.ConfigDict, model: Pretrained) -> Models:
    """Graphs of policy and critic.

    Raises:
      ValueError: experts to be replayed of a model that has none.
    """
    replay = model.config if config.get("router_replay") else None
    if replay is not None and not replay.num_experts:
        raise ValueError(f"router_replay: model={config.model} has no experts")
    models = Models.of(model.config, shared_trunk=config.get("shared_trunk"))
    return dataclasses.replace(models, adapters=adapters.configured(config), router_replay=replay)


def make_optimizers(config: ml_collections.ConfigDict) -> Optimizers:
    """One optimiser at a rate for the policy, and one at a rate for the critic.

    Raises:
      ValueError: values that `optimizers.make_optimizer` or `optimizers.schedule` does not take.
    """

    def make(rate: float, updates_a_minibatch: int) -> optax.GradientTransformation:
        updates = config.num_steps * config.epochs * config.minibatches * updates_a_minibatch
        return optimizers.make_optimizer(
            config.optimizer,
            optimizers.schedule(rate, decay=config.rate_decay, warmup=config.warmup_updates, updates=updates),
            max_grad_norm=config.max_grad_norm,
            b2=config.adam_b2,
            weight_decay=config.weight_decay,
        )

    critic_updates = make_algorithm(config).critic_updates
    return Optimizers(policy=make(config.learning_rate, 1), critic=make(config.critic_learning_rate, critic_updates))


def make_state(
    config: ml_collections.ConfigDict, model: Pretrained, algorithm: algorithms.Algorithm, updates: Optimizers
) -> TrainState:
    """The state before the first step."""
    shared = config.get("shared_trunk") is not None
    adapted = adapters.configured(config)
    return initial_state(model.config, model.params, algorithm, updates, adapted, config.seed, shared)


def restore_state(checkpoints: Checkpoints, first: TrainState) -> TrainState:
    """That of the newest readable checkpoint, on the first state's base, which checkpoints leave out; or the first."""
    restored = checkpoints.restore(first.replace(base=None))
    return first if restored is None else restored[1].replace(base=first.base)
