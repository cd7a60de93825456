"""Fillings of an algorithm's slots: kernels bound to their hyperparameters and mapped over the rows of a batch."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mpo_jax import kernels
from mpo_jax.algorithms.update import per_sequence
from mpo_jax.kernels.aggregation import Aggregation
from mpo_jax.kernels.segments import Granularity, Reduce, segment_sum, spread, token_ids
from mpo_jax.types import Array, Evaluation, Targets, Trajectories

Credit = Callable[[Trajectories, Evaluation], tuple[Array, Array]]
Actor = Callable[[Trajectories, Array, Array], Array]  # (row, values[T], bootstrap_values[T]) -> advantages[T]


def critic_credit(actor: Actor, lambda_critic: float = 1.0, bootstrap_truncated: bool = False) -> Credit:
    """Whitened advantages of `actor`, and λ_critic-returns for the critic; truncated episodes may bootstrap."""

    def credit(batch: Trajectories, evaluation: Evaluation) -> tuple[Array, Array]:
        rest = jnp.where(jnp.logical_and(batch.truncated, bootstrap_truncated), evaluation.final_values, 0.0)
        bootstrap = jax.vmap(spread)(rest, batch.sequence_ids, batch.action_mask)
        advantages = jax.vmap(actor)(batch, evaluation.values, bootstrap)
        returns = jax.vmap(lambda *row: kernels.returns(*row[:-1], lambda_=lambda_critic, bootstrap_values=row[-1]))(
            batch.rewards, evaluation.values, batch.action_mask, batch.sequence_ids, bootstrap
        )
        return kernels.whiten(advantages, batch.action_mask), returns

    return credit


def token_actor(lambda_: Callable[[Trajectories], Array | float]) -> Actor:
    """Token GAE with λ from the row."""

    def actor(row: Trajectories, values: Array, bootstrap: Array) -> Array:
        return kernels.token_gae(
            row.rewards, values, row.action_mask, row.sequence_ids, lambda_=lambda_(row), bootstrap_values=bootstrap
        )

    return actor


def adaptive_lambda(alpha: float) -> Callable[[Trajectories], Array]:
    """λ [T] of each token's sequence, by its number of action tokens."""

    def lambda_(row: Trajectories) -> Array:
        num_tokens = segment_sum(row.action_mask, row.sequence_ids, row.action_mask, len(row.group_ids))
        return spread(kernels.length_adaptive_lambda(num_tokens, alpha), row.sequence_ids, row.action_mask)

    return lambda_


def group_credit(normalise_std: bool, bonus: Callable[[Array], Array] = jnp.zeros_like) -> Credit:
    """Group-relative advantages of episodes, whose rewards `bonus` (of their number of tokens) adds to; no returns."""

    def credit(batch: Trajectories, evaluation: Evaluation) -> tuple[Array, Array]:
        returns, group_ids, valid = episodes(batch)
        returns = returns + bonus(per_sequence(batch.action_mask, batch).ravel())
        advantages = kernels.group_advantages(returns, group_ids, normalise_std=normalise_std, valid=valid)
        return to_tokens(advantages, batch), jnp.zeros_like(evaluation.values)

    return credit


def episodes(batch: Trajectories) -> tuple[Array, Array, Array]:
    """Return, group and presence of every episode of the batch, all [B·S]."""
    valid = per_sequence(batch.action_mask, batch) > 0
    return per_sequence(batch.rewards, batch).ravel(), jnp.asarray(batch.group_ids).ravel(), valid.ravel()


def to_tokens(x: Array, batch: Trajectories) -> Array:
    """Gives the action tokens [B,T] of every episode its entry of x [B·S]."""
    return jax.vmap(spread)(x.reshape(batch.group_ids.shape), batch.sequence_ids, batch.action_mask)


def ratio(
    granularity: Granularity = token_ids, reduce: Reduce = segment_sum
) -> Callable[[Array, Targets, Trajectories], Array]:
    """Importance ratio against `old_logprobs` at a granularity."""

    def slot(logprobs: Array, targets: Targets, batch: Trajectories) -> Array:
        kernel = functools.partial(kernels.importance_ratio, reduce=reduce)
        return jax.vmap(kernel)(logprobs, targets.old_logprobs, _ids(granularity, batch), batch.action_mask)

    return slot


def clip(epsilon_low: float, epsilon_high: float, dual_clip: float | None = None) -> Callable[[Array, Array], Array]:
    """Clipped surrogate.

    Raises:
      ValueError: a dual-clip constant that would cut ratios which are not clipped yet.
    """
    if dual_clip is not None and not dual_clip > 1.0 + epsilon_high:
        raise ValueError(f"dual_clip is {dual_clip}, expected more than 1 + epsilon_high = {1.0 + epsilon_high}")
    bounds = {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "dual_clip": dual_clip}
    return functools.partial(kernels.clipped_surrogate, **bounds)


def over(aggregation: Aggregation) -> Callable[[Trajectories, Array], Array]:
    """Aggregation over the kept tokens of a batch."""
    return lambda batch, kept: aggregation(kept, batch.turn_ids, batch.sequence_ids)


def truncated_importance(
    *, granularity: Granularity = token_ids, reduce: Reduce = segment_sum, maximum: float = 2.0
) -> Callable[[Array, Trajectories], tuple[Array, Array]]:
    """A `correction` that weights by truncated π_old/π_behavior; every token stays in the denominator."""

    def correction(old_logprobs: Array, batch: Trajectories) -> tuple[Array, Array]:
        kernel = functools.partial(kernels.truncated_weights, reduce=reduce, maximum=maximum)
        weights = jax.vmap(kernel)(old_logprobs, batch.behavior_logprobs, _ids(granularity, batch), batch.action_mask)
        return weights, batch.action_mask

    return correction


def masked_importance(
    *,
    granularity: Granularity = token_ids,
    reduce: Reduce = segment_sum,
    minimum: float = 0.5,
    maximum: float = 5.0,
) -> Callable[[Array, Trajectories], tuple[Array, Array]]:
    """A `correction` that drops what lies outside [minimum, maximum] (the denominator too) and weights the rest."""

    def correction(old_logprobs: Array, batch: Trajectories) -> tuple[Array, Array]:
        kernel = functools.partial(kernels.masked_weights, reduce=reduce, minimum=minimum, maximum=maximum)
        return jax.vmap(kernel)(old_logprobs, batch.behavior_logprobs, _ids(granularity, batch), batch.action_mask)

    return correction


def _ids(granularity: Granularity, batch: Trajectories) -> Array:
    return jax.vmap(granularity)(batch.action_mask, batch.turn_ids, batch.sequence_ids)
