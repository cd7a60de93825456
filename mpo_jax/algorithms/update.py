"""What an algorithm is, and the three places where it acts: the constants of an update and its two losses."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpo_jax import kernels
from mpo_jax.kernels.segments import masked, segment_sum, spread
from mpo_jax.types import Array, Evaluation, Targets, Trajectories


class Penalty(NamedTuple):
    """A loss added to the policy's: coefficient · Σ weights · loss(logprobs, targets, batch)."""

    name: str
    coefficient: float
    loss: Callable[[Array, Targets, Trajectories], Array]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The slots in which algorithms differ; all arrays are [B,T].

    Attributes:
      name: of the function that built it.
      credit: (batch, evaluation) -> advantages, returns; over the whole batch.
      ratio: (logprobs, targets, batch) -> ratio.
      surrogate: (ratio, advantages) -> objective, to be maximised.
      weights: (batch, kept tokens) -> aggregation weights of these, over the whole batch.
      value_loss: (values, old_values, returns) -> loss, or None without a critic.
      penalties: losses added to the policy's.
      needs: what the loop must provide, of critic, reference, privileged, value_pretraining, group_filter.
      anchor: (batch, evaluation) -> log-probs that the ratio is against.
      correction: (old_logprobs, batch) -> weights and kept tokens, or None; for the rollout–trainer mismatch.
      critic_updates: of the critic for one of the policy.
      critic_frozen: names of the critic's modules that are not trained.
      group_size: episodes of a prompt that the method suggests.
    """

    name: str
    credit: Callable[[Trajectories, Evaluation], tuple[Array, Array]]
    ratio: Callable[[Array, Targets, Trajectories], Array]
    surrogate: Callable[[Array, Array], Array]
    weights: Callable[[Trajectories, Array], Array]
    value_loss: Callable[[Array, Array, Array], Array] | None = None
    penalties: tuple[Penalty, ...] = ()
    needs: frozenset[str] = frozenset()
    anchor: Callable[[Trajectories, Evaluation], Array] = lambda batch, evaluation: evaluation.logprobs
    correction: Callable[[Array, Trajectories], tuple[Array, Array]] | None = None
    critic_updates: int = 1
    critic_frozen: frozenset[str] = frozenset()
    group_size: int = 1


def drop_nonfinite(batch: Trajectories) -> tuple[Trajectories, Array]:
    """Takes sequences with a non-finite reward out of the action masks, and counts them."""
    bad = per_sequence(~jnp.isfinite(batch.rewards), batch) > 0
    kept = jnp.logical_and(batch.action_mask, jax.vmap(spread)(bad, batch.sequence_ids, batch.action_mask) == 0)
    executable = jnp.logical_and(batch.executable_mask, kept)
    return batch.replace(action_mask=kept, executable_mask=executable), jnp.sum(bad)


def targets(algorithm: Algorithm, batch: Trajectories, evaluation: Evaluation) -> Targets:
    """The constants of one update, from the *whole* batch: call it before any split into minibatches.

    Sequences with a non-finite reward (count them with `drop_nonfinite`) get zero weight and enter no statistic.
    """
    batch, _ = drop_nonfinite(batch)
    mask, kept, correction = batch.action_mask, batch.action_mask, 1.0
    advantages, returns = algorithm.credit(batch, evaluation)
    if algorithm.correction is not None:
        correction, kept = algorithm.correction(evaluation.logprobs, batch)
    constants = Targets(
        advantages=masked(advantages, mask),
        returns=masked(returns, mask),
        old_logprobs=masked(algorithm.anchor(batch, evaluation), mask),
        old_values=masked(evaluation.values, mask),
        ref_logprobs=masked(evaluation.ref_logprobs, mask),
        weights=masked(algorithm.weights(batch, kept) * correction, kept),
        value_weights=kernels.token_mean(mask, batch.turn_ids, batch.sequence_ids),
        experts=evaluation.experts,
    )
    return jax.lax.stop_gradient(constants)


def policy_loss(
    algorithm: Algorithm, logprobs: Array, batch: Trajectories, targets: Targets
) -> tuple[Array, dict[str, Array]]:
    """−Σ weights · objective + Σ penalties, of any rows of the batch; losses and metrics of its parts add up exactly.

    Args:
      algorithm: whose slots are used.
      logprobs: [B,T] under the policy that is updated.
      batch: rows of the batch that `targets` came from.
      targets: the same rows of it.

    Returns:
      The loss, and token means: clip_fraction (tokens without gradient though A ≠ 0), ratio, old_kl (KL(old‖new), k3).
    """
    mask = jnp.logical_and(batch.action_mask, targets.value_weights > 0)
    batch, logprobs = batch.replace(action_mask=mask), masked(logprobs, mask)
    ratio = algorithm.ratio(logprobs, targets, batch)
    objective, slope = jax.vjp(lambda x: algorithm.surrogate(x, targets.advantages), ratio)
    terms = {p.name: _total(targets.weights, p.loss(logprobs, targets, batch)) for p in algorithm.penalties}
    loss = -_total(targets.weights, objective) + sum(p.coefficient * terms[p.name] for p in algorithm.penalties)
    removed = (slope(jnp.ones_like(objective))[0] == 0) & (targets.advantages != 0)
    means = {"clip_fraction": removed, "ratio": ratio, "old_kl": kernels.kl_k3(targets.old_logprobs, logprobs)}
    terms |= {name: _total(targets.value_weights, x) for name, x in means.items()}
    return loss, jax.lax.stop_gradient({"policy_loss": loss} | terms)


def value_loss(algorithm: Algorithm, values: Array, targets: Targets) -> tuple[Array, dict[str, Array]]:
    """Σ value_weights · value_loss of any rows of the batch, to be called where the algorithm has a critic."""
    values = masked(values, targets.value_weights > 0)
    loss = _total(targets.value_weights, algorithm.value_loss(values, targets.old_values, targets.returns))
    return loss, jax.lax.stop_gradient({"value_loss": loss})


def per_sequence(x: Array, batch: Trajectories) -> Array:
    """Sums x [B,T] over the action tokens of each sequence, [B,S]."""
    size = batch.group_ids.shape[1]
    return jax.vmap(lambda *row: segment_sum(*row, size))(x, batch.sequence_ids, batch.action_mask)


def _total(weights: Array, x: Array) -> Array:
    return jnp.sum(jnp.where(weights != 0, weights * x, 0.0))  # a NaN weight is no zero: it stays visible
