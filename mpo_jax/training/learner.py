"""The learner: takes groups of episodes, makes targets once, and steps over minibatches."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpo_jax import algorithms, kernels
from mpo_jax.algorithms import Algorithm
from mpo_jax.kernels.diagnostics import masked_mean
from mpo_jax.models.actor_critic import Models
from mpo_jax.store.episode import Episode
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.training.batching import pack, padded, row_order
from mpo_jax.training.cluster import Cluster
from mpo_jax.training.dense import Shaping
from mpo_jax.training.descriptions import describe, informative, started
from mpo_jax.training.hindsight import Guidance, privileged_logprobs
from mpo_jax.training.microbatches import select_rows
from mpo_jax.training.profiling import Stopwatch
from mpo_jax.training.state import Optimizers, TrainState, follow_policy
from mpo_jax.training.step import make_evaluate, make_train_step
from mpo_jax.types import PADDING, Evaluation, Targets, Trajectories


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a run is divided.

    Attributes:
      num_steps: batches to train on.
      groups_per_step: groups in a batch, of each process.
      epochs: passes over a batch.
      minibatches: gradient steps a pass.
      microbatches: parts whose gradients are added up within a gradient step.
      value_pretraining_steps: first batches, on which only the critic is trained (where the algorithm asks for it).
      row_tokens, row_sequences, row_multiple: shape of the packed rows of each process; see `batching.pack`.
      load_balancing: coefficient of the load-balancing loss of a policy with experts.
      reference_decay: what is left of the reference after a batch, the rest is the policy's; 1 keeps it frozen.
      critic_patience: measurements in a row without a better explained variance on held-out episodes after which the
        critic is left alone; None = never.
      max_staleness: the highest lag of a batch's oldest weights, in versions; None = no bound.
      checkpoint_every, evaluate_every: in steps.
      seed: of the order of rows.
    """

    num_steps: int
    groups_per_step: int
    epochs: int = 1
    minibatches: int = 4
    microbatches: int = 1
    value_pretraining_steps: int = 0
    critic_patience: int | None = None
    row_tokens: int = 512
    row_sequences: int = 8
    row_multiple: int = 16
    load_balancing: float = 0.0
    reference_decay: float = 1.0
    max_staleness: int | None = None
    checkpoint_every: int = 10
    evaluate_every: int = 10
    seed: int = 0

    def __post_init__(self):
        if self.row_multiple % (self.minibatches * self.microbatches):
            raise ValueError(
                f"row_multiple={self.row_multiple} is not a multiple of minibatches·microbatches="
                f"{self.minibatches * self.microbatches}"
            )
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness={self.max_staleness}, expected at least 0")
        if not 0 <= self.reference_decay <= 1:
            raise ValueError(f"reference_decay={self.reference_decay}, expected a number from 0 to 1")


class Learner:
    """The jitted functions of one algorithm, and what one batch of episodes does to the state."""

    def __init__(
        self,
        algorithm: Algorithm,
        models: Models,
        optimizers: Optimizers,
        settings: Settings,
        guidance: Guidance | None = None,
        shape: Shaping = lambda batch: batch,
        cluster: Cluster | None = None,
    ):
        cluster = cluster or Cluster()
        _check(algorithm, models, settings, guidance, cluster)
        self.algorithm, self.settings, self.models, self.cluster = algorithm, settings, models, cluster
        self.guidance, self.shape = guidance, shape
        self.evaluate = cluster.on_mesh(make_evaluate(algorithm, models, settings.microbatches))
        self.targets = cluster.on_mesh(jax.jit(functools.partial(algorithms.targets, algorithm)))
        step = make_train_step(
            algorithm,
            models,
            optimizers,
            settings.microbatches,
            settings.minibatches,
            settings.load_balancing,
            settings.critic_patience,
        )
        self.train_step = cluster.on_mesh(step)
        self.select = cluster.on_mesh(jax.jit(select_rows))
        follow = functools.partial(follow_policy, settings.reference_decay)
        self.follow = cluster.on_mesh(jax.jit(follow, donate_argnums=0))
        self.diagnose = cluster.on_mesh(jax.jit(self._diagnose))

    def take(self, store: EpisodeStore, step: int) -> list[list[Episode]] | None:
        """The groups of a step, less what teaches nothing (dynamic sampling) or is too old (`Admission`)."""
        s, filters = self.settings, "group_filter" in self.algorithm.needs
        oldest, dropped = 0 if s.max_staleness is None else step - s.max_staleness, s.groups_per_step * 3 * filters
        return store.take(s.groups_per_step, step, min_version=oldest, keep=informative, max_dropped=dropped)

    def pretrains_value(self, step: int) -> bool:
        """Whether a step trains the critic alone."""
        return "value_pretraining" in self.algorithm.needs and step < self.settings.value_pretraining_steps

    def policy(self, state: TrainState) -> nnx.State:
        """The policy's parameters, adapters merged, for computations of this process alone; all processes must ask."""
        return self.cluster.whole(self.models.whole(state.policy, state.base))

    def update(self, state: TrainState, episodes: Sequence[Episode]) -> tuple[TrainState, dict[str, float]]:
        """Trains on one batch.

        Args:
          state: donated; do not use it again.
          episodes: of whole groups; of several processes each has its own, or none.

        Returns:
          The state one step on, and the metrics of the batch.
        """
        step, watch = int(state.step), Stopwatch()
        description = self.cluster.combined(describe(episodes, step))
        with watch("evaluate"):
            batch, _, judged, targets = jax.block_until_ready(self.prepare(state, started(episodes)))
        totals: list[dict] = []
        with watch("step"):
            for rows in self._minibatches(step, len(batch.tokens)):
                part, part_targets = self.select((batch, targets), rows)
                state, metrics = self.train_step(state, part, part_targets, not self.pretrains_value(step))
                totals.append(metrics)
            if self.settings.reference_decay < 1:
                state = self.follow(state)
            metrics = {name: np.mean([float(m[name]) for m in totals]) for name in totals[0]}
        # The step's own clip fraction, which knows the algorithm's bounds, has the last word.
        metrics = self.diagnose(state, batch, judged, targets, part, part_targets) | metrics
        metrics |= description | watch.seconds
        rows, size = len(batch.tokens), batch.tokens.size
        metrics |= {"fill": metrics["tokens"] / size, "rows": rows, "padded_tokens": size}
        return state.replace(step=state.step + 1), {name: float(value) for name, value in metrics.items()}

    def prepare(
        self, state: TrainState, episodes: Sequence[Episode]
    ) -> tuple[Trajectories, np.ndarray, Evaluation, Targets]:
        """Packs episodes that hold anything, and judges them once.

        Returns:
          The batch of all processes, int[B,S] with the index of each of this one's slots' episode (-1 = none), what the
          models say, and the targets.
        """
        batch, slots = self._pack(episodes)
        judged = self.evaluate(state, batch)
        if "privileged" in self.algorithm.needs:
            judged = judged.replace(privileged_logprobs=self._privileged(state, episodes, batch, slots, judged))
        return batch, slots, judged, self.targets(batch, judged)

    def explained_variance(self, state: TrainState, episodes: Sequence[Episode]) -> float:
        """What the critic explains of the returns of episodes that it was not trained on."""
        batch, _ = self._pack(started(episodes))
        judged = self.evaluate(state, batch)
        targets = self.targets(batch, judged)
        return float(kernels.explained_variance(judged.values, targets.returns, targets.value_weights > 0))

    def _pack(self, episodes: Sequence[Episode]) -> tuple[Trajectories, np.ndarray]:
        s = self.settings
        batch, slots = pack(
            episodes,
            row_tokens=s.row_tokens,
            row_sequences=s.row_sequences,
            row_multiple=s.row_multiple,
            routed=self.models.router_replay,
        )
        rows = int(self.cluster.agree(rows=len(slots))["rows"].max())
        batch, slots = padded(batch, slots, rows)
        # Groups are of one process, and numbered apart from those of the others.
        first = self.cluster.index * slots.size
        batch = batch.replace(group_ids=np.where(batch.group_ids < 0, batch.group_ids, batch.group_ids + first))
        return self.cluster.place_rows(self.shape(batch)), slots

    def _privileged(self, state, episodes, batch, slots, judged) -> np.ndarray:
        return privileged_logprobs(
            lambda guided: self.evaluate(state, self.cluster.place_rows(guided)).logprobs,
            episodes,
            batch,
            slots,
            np.asarray(judged.logprobs),
            self.guidance,
            row_tokens=2 * self.settings.row_tokens,
            row_multiple=self.settings.row_multiple,
        )

    def _minibatches(self, step: int, num_rows: int) -> Iterator[np.ndarray]:
        for epoch in range(self.settings.epochs):
            yield from np.split(row_order(self.settings.seed, step, epoch, num_rows), self.settings.minibatches)

    def _diagnose(
        self,
        state: TrainState,
        batch: Trajectories,
        judged: Evaluation,
        targets: Targets,
        part: Trajectories,
        part_targets: Targets,
    ) -> dict[str, jax.Array]:
        """Metrics of the batch as it came, and of the ratio on the last minibatch after its update.

        Episodes without a finite reward are counted, and in nothing else. By turn length, `clip_fraction` and
        `gradient_removed` are of the bounds ±0.2 for every algorithm, so that runs can be compared.
        """
        mask, part = targets.value_weights > 0, part.replace(action_mask=part_targets.value_weights > 0)
        found = {
            "waste": jnp.mean(batch.sequence_ids == PADDING),
            "waste_empty_rows": jnp.mean(jnp.all(batch.group_ids == PADDING, axis=1)),
            "entropy": masked_mean(judged.entropy, mask),
            "skipped_updates": state.skipped,
            "critic_stale": state.critic_stale,
            "nonfinite_rewards": algorithms.drop_nonfinite(batch)[1],
        }
        if self.algorithm.value_loss is not None:
            found |= kernels.critic_diagnostics(
                judged.values, targets.returns, mask, batch.turn_ids, batch.sequence_ids
            )
        logprobs = self.models.routed(state.policy, part, state.base, part_targets.experts)[0]
        ratio = self.algorithm.ratio(logprobs, part_targets, part)
        return found | kernels.ratio_diagnostics(
            ratio,
            part_targets.advantages,
            part_targets.old_logprobs,
            part.behavior_logprobs,
            part.action_mask,
            part.turn_ids,
            epsilon_low=0.2,
            epsilon_high=0.2,
        )


def _check(
    algorithm: Algorithm, models: Models, settings: Settings, guidance: Guidance | None, cluster: Cluster
) -> None:
    """Refuses what does not go together, before anything is compiled."""
    if "privileged" in algorithm.needs and guidance is None:
        raise ValueError(f"{algorithm.name} needs guidance from successful episodes; this run has none")
    if "privileged" in algorithm.needs and cluster.count > 1:
        raise ValueError(f"{algorithm.name} looks at all episodes at once; {cluster.count} processes have parts")
    if settings.reference_decay < 1 and ("reference" not in algorithm.needs or models.adapters is not None):
        has = "'s adapters are compared with their base" if "reference" in algorithm.needs else " has no reference"
        raise ValueError(f"reference_decay={settings.reference_decay}, expected 1: {algorithm.name}{has}")
    rows = settings.row_multiple * cluster.count
    if rows % (parts := settings.minibatches * settings.microbatches * cluster.row_shards):
        raise ValueError(
            f"row_multiple={settings.row_multiple} of {cluster.count} processes is {rows} rows, not a multiple of "
            f"minibatches·microbatches·devices with rows of their own={parts}"
        )
