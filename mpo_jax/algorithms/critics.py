"""Algorithms whose credit comes from a critic. All whiten over the batch and, but for PPO, regress λ = 1 returns."""

import dataclasses
import functools

import jax

from mpo_jax import kernels
from mpo_jax.algorithms import slots
from mpo_jax.algorithms.update import Algorithm, Penalty, per_sequence
from mpo_jax.kernels.segments import Granularity, Reduce, segment_sum, spread, turn_ids
from mpo_jax.types import Array, Targets, Trajectories


def mpo(
    *,
    lambda_turn: float = 0.8,
    lambda_intra: float = 0.95,
    beta: float = 1.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    ratio_granularity: Granularity = turn_ids,
    ratio_reduce: Reduce = segment_sum,
    dual_clip: float | None = None,
    bootstrap_truncated: bool = False,
) -> Algorithm:
    """Multi-scale policy optimisation: multi-scale advantages and a turn-level ratio (not Maximum a Posteriori).

    Not published: ε, aggregation, value pretraining; the defaults are ours. Ablations are plain arguments:
    `ratio_granularity=token_ids`, β, λ_turn, λ_intra, `ratio_reduce=segment_mean`.
    """

    def actor(row: Trajectories, values: Array, bootstrap: Array) -> Array:
        return kernels.multiscale_advantages(
            row.rewards,
            values,
            row.action_mask,
            row.turn_ids,
            lambda_turn=lambda_turn,
            lambda_intra=lambda_intra,
            beta=beta,
            sequence_ids=row.sequence_ids,
            bootstrap_values=bootstrap,
        )

    return Algorithm(
        name="mpo",
        credit=slots.critic_credit(actor, bootstrap_truncated=bootstrap_truncated),
        ratio=slots.ratio(ratio_granularity, ratio_reduce),
        surrogate=slots.clip(epsilon_low, epsilon_high, dual_clip),
        weights=slots.over(kernels.token_mean),
        value_loss=kernels.squared_value_loss,
        needs=frozenset({"critic", "value_pretraining"}),
    )


def turn_ppo(*, lambda_turn: float = 0.95, epsilon: float = 0.2, bootstrap_truncated: bool = False) -> Algorithm:
    """Turn-PPO: GAE over turns, a turn-level ratio and a mean over turns. Not published: λ and ε; ours are PPO's.

    See *Turn-PPO* (arXiv:2512.17008).
    """
    base = mpo(lambda_turn=lambda_turn, beta=0.0, bootstrap_truncated=bootstrap_truncated)
    return dataclasses.replace(
        base,
        name="turn_ppo",
        surrogate=slots.clip(epsilon, epsilon),
        weights=slots.over(kernels.turn_mean),
        value_loss=functools.partial(kernels.clipped_value_loss, epsilon=epsilon),
        needs=frozenset({"critic"}),
    )


def ppo(
    *,
    lambda_: float = 0.95,
    lambda_critic: float = 0.95,
    epsilon: float = 0.2,
    value_epsilon: float = 0.2,
    dual_clip: float | None = None,
    bootstrap_truncated: bool = False,
) -> Algorithm:
    """Proximal policy optimisation over tokens, with clipped values; its λ_critic is usually the policy's λ.

    See *Proximal Policy Optimization Algorithms* (arXiv:1707.06347). Not published for agents: λ (0.95 is usual).
    """
    return Algorithm(
        name="ppo",
        credit=slots.critic_credit(slots.token_actor(lambda row: lambda_), lambda_critic, bootstrap_truncated),
        ratio=slots.ratio(),
        surrogate=slots.clip(epsilon, epsilon, dual_clip),
        weights=slots.over(kernels.token_mean),
        value_loss=functools.partial(kernels.clipped_value_loss, epsilon=value_epsilon),
        needs=frozenset({"critic"}),
    )


def vc_ppo(*, lambda_actor: float = 0.95, lambda_critic: float = 1.0, epsilon: float = 0.2) -> Algorithm:
    """VC-PPO: PPO with λ_critic = 1 and a critic pretrained on the returns of the fixed initial policy.

    See *What's Behind PPO's Collapse in Long-CoT?* (arXiv:2503.01491).
    """
    return dataclasses.replace(
        ppo(lambda_=lambda_actor, lambda_critic=lambda_critic, epsilon=epsilon),
        name="vc_ppo",
        value_loss=kernels.squared_value_loss,
        needs=frozenset({"critic", "value_pretraining"}),
    )


def vapo(
    *,
    alpha: float = 0.05,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    nll_coefficient: float = 0.1,
    success_return: float = 1.0,
) -> Algorithm:
    """VAPO: length-adaptive λ, clip-higher, and the NLL of successful episodes (return ≥ `success_return`).

    See *VAPO* (arXiv:2504.05118). The NLL is divided by all tokens of the batch, so that it adds up over microbatches.
    """

    def nll(logprobs: Array, targets: Targets, batch: Trajectories) -> Array:
        success = per_sequence(batch.rewards, batch) >= success_return - 1e-6
        return kernels.success_nll(logprobs, jax.vmap(spread)(success, batch.sequence_ids, batch.action_mask) > 0)

    return Algorithm(
        name="vapo",
        credit=slots.critic_credit(slots.token_actor(slots.adaptive_lambda(alpha))),
        ratio=slots.ratio(),
        surrogate=slots.clip(epsilon_low, epsilon_high),
        weights=slots.over(kernels.token_mean),
        value_loss=kernels.squared_value_loss,
        penalties=(Penalty("success_nll", nll_coefficient, nll),),
        needs=frozenset({"critic", "value_pretraining"}),
    )


def sao(
    *, alpha: float = 1.5, epsilon_low: float = 0.3, epsilon_high: float = 5.0, critic_updates: int = 2
) -> Algorithm:
    """SAO: single episodes, skip-observation GAE, the ratio against the *sampling* policy, and a double-sided mask.

    The critic's attention stays as it was in the warm start.

    See *SAO* (arXiv:2607.07508), which also uses (ε_low, ε_high) = (0.8, 3.0). Not published: whitening, which is ours.
    """
    return Algorithm(
        name="sao",
        credit=slots.critic_credit(slots.token_actor(slots.adaptive_lambda(alpha))),
        ratio=slots.ratio(),
        surrogate=functools.partial(kernels.double_sided_mask, epsilon_low=epsilon_low, epsilon_high=epsilon_high),
        weights=slots.over(kernels.token_mean),
        value_loss=kernels.squared_value_loss,
        needs=frozenset({"critic"}),
        anchor=lambda batch, evaluation: batch.behavior_logprobs,
        critic_updates=critic_updates,
        critic_frozen=frozenset({"attention"}),
    )


def bilevel_gae(
    *, lambda_turn: float = 1.0, lambda_token: float = 1.0, discount_turn: float = 0.95, epsilon: float = 0.2
) -> Algorithm:
    """Bi-level GAE: over turn ends, then over the tokens of each turn; the rest is PPO.

    See *RAGEN* (arXiv:2504.20073).
    """

    def actor(row: Trajectories, values: Array, bootstrap: Array) -> Array:
        return kernels.bilevel_advantages(
            row.rewards,
            values,
            row.action_mask,
            row.turn_ids,
            lambda_turn=lambda_turn,
            lambda_token=lambda_token,
            discount_turn=discount_turn,
            sequence_ids=row.sequence_ids,
            bootstrap_values=bootstrap,
        )

    return dataclasses.replace(ppo(epsilon=epsilon), name="bilevel_gae", credit=slots.critic_credit(actor))
