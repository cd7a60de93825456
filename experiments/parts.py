"""What the programs share: the parts of a run, built from its config."""

import ctypes
import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import ml_collections
import numpy as np
import optax
from flax import nnx

from experiments import adapters, engines
from experiments.environments import Setting
from mpo_jax import algorithms
from mpo_jax.environments.questions import SPLITS
from mpo_jax.models import pretrained, weights
from mpo_jax.models.actor_critic import Models
from mpo_jax.models.chat import TemplateTokenizer
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.rollout.agent import run_episodes
from mpo_jax.rollout.conversation import Job, Limits
from mpo_jax.rollout.decoding import EXACT, Decoding
from mpo_jax.rollout.monitor import MonitoredEngine, mean_below
from mpo_jax.rollout.protocol import Engine
from mpo_jax.rollout.worker import Rollout, Terms
from mpo_jax.store.admission import Admission
from mpo_jax.store.episode import Episode
from mpo_jax.store.weights import PublishedWeights
from mpo_jax.training import optimizers
from mpo_jax.training.checkpoints import Checkpoints
from mpo_jax.training.dense import Shaping, progress_shaping
from mpo_jax.training.descriptions import describe
from mpo_jax.training.learner import Learner, Settings
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


def make_admission(config: ml_collections.ConfigDict) -> Admission:
    """The configured bounds of what the rollout may begin."""
    return Admission(
        max_pending=config.max_pending_groups,
        max_staleness=config.max_staleness,
        groups_per_step=config.groups_per_step,
        straggler_seconds=config.straggler_seconds,
    )


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
      ValueError: a model cannot be read, or does not share the vocabulary of the one in training.
    """
    section = config.dense
    if not section.policy:
        return lambda batch: batch
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


def make_rollout(
    config: ml_collections.ConfigDict,
    model: Pretrained,
    setting: Setting,
    *,
    tasks: Callable[[int], dict] | None = None,
    group_size: int,
    seed: int,
    decoding: Decoding = EXACT,
    engine: Engine | None = None,
) -> Rollout:
    """How groups of episodes are made, here or in a worker: of training tasks, unless `tasks` are given.

    The engine is our sampler, unless another is given.
    """
    return Rollout(
        engine=engine or engines.make_sampler(config, model, decoding),
        tokenizer=model.tokenizer,
        make_environment=setting.make,
        task_stream=tasks or setting.training_task,
        group_size=group_size,
        seed=seed,
        limits=Limits(observation_tokens=config.max_observation_tokens),
        threads=environment_threads(config),
    )


def environment_threads(config: ml_collections.ConfigDict) -> int:
    """In which environments reset and step: one a slot, but for the packaged one, which answers at once."""
    threads = config.get("environment_threads")
    if threads is not None:
        return threads
    return 0 if config.environment == "search" else config.num_slots


def monitored(config: ml_collections.ConfigDict, model: Pretrained, rollout: Rollout) -> Rollout:
    """The rollout with the warm start reading along, if the config wants a monitor."""
    if "monitor" not in config or config.monitor.threshold is None:
        return rollout
    flag = mean_below(config.monitor.threshold, config.monitor.min_turns)
    return dataclasses.replace(
        rollout,
        engine=MonitoredEngine(rollout.engine, model.config, model.params, flag=flag),
        limits=dataclasses.replace(rollout.limits, flagged=config.monitor.stop),
    )


def make_training_rollout(
    config: ml_collections.ConfigDict, model: Pretrained, setting: Setting, published: PublishedWeights
) -> tuple[Rollout, Callable[[dict[str, np.ndarray]], nnx.State]]:
    """How the groups to train on are made, and what makes the engine's weights of published arrays."""
    engine = engines.make_engine(config, model, published)
    rollout = make_rollout(config, model, setting, group_size=config.group_size, seed=config.seed, engine=engine)
    limits = dataclasses.replace(rollout.limits, group_seconds=config.group_seconds)
    rollout = dataclasses.replace(rollout, limits=limits)
    return monitored(config, model, rollout), lambda arrays: weights.unflatten(model.params, arrays)


def make_terms(config: ml_collections.ConfigDict, number: int) -> Terms:
    """On what terms the worker of a number makes groups."""
    return Terms(
        owner=f"worker-{number}",
        admission=make_admission(config),
        in_flight=config.in_flight_updates,
    )


def claim_workdir(workdir: Path, config: ml_collections.ConfigDict) -> None:
    """Makes the folder this run's, or finds that it is already.

    Raises:
      ValueError: it belongs to a run of another config; the message names the first key that differs.
    """
    path, mine = workdir / "config.json", json.loads(config.to_json())
    if not path.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(mine, indent=2) + "\n")
        beside.replace(path)
        return
    theirs = json.loads(read_config(workdir).to_json())
    for key in sorted(mine.keys() | theirs.keys()):
        if key not in ("num_steps", "mesh") and mine.get(key) != theirs.get(key):
            raise ValueError(
                f"{workdir} belongs to another run: its {key} is {theirs.get(key)!r}, here {mine.get(key)!r}; "
                "choose another --workdir or delete it"
            )


def read_config(workdir: Path) -> ml_collections.ConfigDict:
    """The config of the run that owns a folder.

    Raises:
      ValueError: no run has claimed it.
    """
    try:
        return ml_collections.ConfigDict(json.loads((workdir / "config.json").read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{workdir}: not the workdir of a run: {error}") from error


def change(config: ml_collections.ConfigDict, assignments: Iterable[str]) -> None:
    """Sets keys of a config by texts such as "documents.format=gaia", each in the type that the key has.

    Raises:
      ValueError: there is no such key, or the value is not of its type.
    """
    for assignment in assignments:
        path, _, value = assignment.partition("=")
        *sections, name = path.split(".")
        try:
            section = config[".".join(sections)] if sections else config
            kind = section.get_type(name)
            section[name] = {"True": True, "False": False}[value] if kind is bool else kind(value)
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{assignment!r} does not fit the run's config, expected key=value: {error}") from error


def make_evaluate(
    config: ml_collections.ConfigDict, model: Pretrained, setting: Setting, learner: Learner
) -> Callable[[TrainState], dict[str, float]]:
    """Success of a state on fixed training and held-out tasks, and what its critic explains of the latter."""
    asked = {split: setting.fixed_tasks(split, config.evaluation_questions) for split in SPLITS}
    rollouts = {
        split: make_rollout(config, model, setting, tasks=pool.__getitem__, group_size=1, seed=1)
        for split, pool in asked.items()
    }

    def evaluate(state: TrainState) -> dict[str, float]:
        metrics, params = {}, learner.policy(state)
        for split, rollout in rollouts.items():
            rollout.engine.load(params, int(state.step))
            episodes = play(rollout, len(asked[split]))
            metrics[f"success_{split}"] = describe(episodes, int(state.step))["success"]
        if learner.algorithm.value_loss is not None:
            metrics["explained_variance_held_out"] = learner.explained_variance(state, episodes)
        return metrics

    return evaluate


def play(rollout: Rollout, num_groups: int) -> list[Episode]:
    """The episodes of the first groups, in order, without a store."""
    return play_jobs(rollout, (job for group_id in range(num_groups) for job in rollout.jobs(group_id)))


def play_jobs(rollout: Rollout, jobs: Iterable[Job]) -> list[Episode]:
    """The episodes of some jobs, by their ids, without a store."""
    episodes = run_episodes(
        rollout.engine,
        rollout.tokenizer,
        rollout.make_environment,
        jobs,
        limits=rollout.limits,
        threads=rollout.threads,
    )
    return sorted(episodes, key=lambda episode: episode.episode_id)
