"""How a run's episodes are played: rollouts built from its config, with a store and a worker's terms or without."""

import dataclasses
from collections.abc import Callable, Iterable

import ml_collections
import numpy as np
from flax import nnx

from experiments import engines
from experiments.environments import Setting
from mpo_jax.environments.questions import SPLITS
from mpo_jax.models import weights
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
from mpo_jax.training.descriptions import describe
from mpo_jax.training.learner import Learner
from mpo_jax.training.state import TrainState


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


def make_admission(config: ml_collections.ConfigDict) -> Admission:
    """The configured bounds of what the rollout may begin."""
    return Admission(
        max_pending=config.max_pending_groups,
        max_staleness=config.max_staleness,
        groups_per_step=config.groups_per_step,
        straggler_seconds=config.straggler_seconds,
    )


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
