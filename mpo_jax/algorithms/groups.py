"""Algorithms whose credit comes from the other episodes of the prompt."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mpo_jax import kernels
from mpo_jax.algorithms import slots
from mpo_jax.algorithms.update import Algorithm, Penalty
from mpo_jax.kernels.segments import Granularity, ends, segment_last, segment_mean, sequence_ids, spread, turn_ids
from mpo_jax.types import Array, Evaluation, Trajectories


def grpo(
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    normalise_std: bool = True,
    kl_coefficient: float = 0.04,
    group_size: int = 8,
) -> Algorithm:
    """GRPO: rewards against the group's, a mean over sequences, and the k3 estimate of KL(π‖π_ref) as a penalty.

    See *DeepSeekMath* (arXiv:2402.03300). `kl_coefficient=0` needs no reference.
    """
    kl = Penalty(
        "ref_kl", kl_coefficient, lambda logprobs, targets, batch: kernels.kl_k3(logprobs, targets.ref_logprobs)
    )
    return Algorithm(
        name="grpo",
        credit=slots.group_credit(normalise_std),
        ratio=slots.ratio(),
        surrogate=slots.clip(epsilon_low, epsilon_high),
        weights=slots.over(kernels.sequence_mean),
        penalties=(kl,) if kl_coefficient else (),
        needs=frozenset({"reference"} if kl_coefficient else ()),
        group_size=group_size,
    )


def dr_grpo(*, max_tokens: float = 3000.0, epsilon: float = 0.2, group_size: int = 8) -> Algorithm:
    """Dr. GRPO: GRPO without the divisions by σ and by length: token sums over a constant, `max_tokens`; no KL.

    See *Understanding R1-Zero-Like Training* (arXiv:2503.20783).
    """
    base = grpo(
        epsilon_low=epsilon, epsilon_high=epsilon, normalise_std=False, kl_coefficient=0.0, group_size=group_size
    )
    return dataclasses.replace(base, name="dr_grpo", weights=slots.over(kernels.constant_length(max_tokens)))


def dapo(
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    max_tokens: int | None = None,
    cache_tokens: int = 4096,
    group_size: int = 16,
) -> Algorithm:
    """DAPO: GRPO with clip-higher, a token mean over informative groups only, no KL, and a soft overlong penalty.

    See *DAPO* (arXiv:2503.14476). The penalty is off without `max_tokens` (the paper's is 20,480).

    Raises:
      ValueError: a cache beyond `max_tokens`, with which even an empty episode would be penalised.
    """
    if max_tokens is not None and not 0 < cache_tokens <= max_tokens:
        raise ValueError(f"cache_tokens={cache_tokens}, expected at most max_tokens={max_tokens} and more than 0")

    def overlong(num_tokens: Array) -> Array:
        if max_tokens is None:
            return jnp.zeros_like(num_tokens)
        return kernels.overlong_penalty(num_tokens, max_tokens=max_tokens, cache_tokens=cache_tokens)

    def weights(batch: Trajectories, kept: Array) -> Array:
        returns, group_ids, valid = slots.episodes(batch)
        informative = kernels.informative_groups(returns, group_ids, valid=valid)
        kept = jnp.logical_and(kept, slots.to_tokens(informative, batch) > 0)
        return kernels.token_mean(kept, batch.turn_ids, batch.sequence_ids)

    return dataclasses.replace(
        grpo(epsilon_low=epsilon_low, epsilon_high=epsilon_high, kl_coefficient=0.0, group_size=group_size),
        name="dapo",
        credit=slots.group_credit(True, overlong),
        weights=weights,
        needs=frozenset({"group_filter"}),
    )


def gspo(*, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4, group_size: int = 8) -> Algorithm:
    """GSPO: GRPO with the geometric mean of a whole sequence's ratios, no KL.

    With one advantage a sequence, the stop-gradient form that we use has the value and gradient of the original.

    See *Group Sequence Policy Optimization* (arXiv:2507.18071).
    """
    base = grpo(epsilon_low=epsilon_low, epsilon_high=epsilon_high, kl_coefficient=0.0, group_size=group_size)
    return dataclasses.replace(base, name="gspo", ratio=slots.ratio(sequence_ids, segment_mean))


def gspo_token(
    *,
    epsilon_low: float = 3e-4,
    epsilon_high: float = 4e-4,
    group_size: int = 8,
    credit: slots.Credit | None = None,
) -> Algorithm:
    """GSPO-token: GSPO whose tokens may have advantages of their own, from `credit`; None is GSPO's.

    See *Group Sequence Policy Optimization* (arXiv:2507.18071), Eq. 13.
    """
    base = gspo(epsilon_low=epsilon_low, epsilon_high=epsilon_high, group_size=group_size)
    return dataclasses.replace(base, name="gspo_token", credit=credit or base.credit)


def gigpo(
    *,
    step_coefficient: float = 1.0,
    discount_turn: float = 0.95,
    normalise_std: bool = False,
    epsilon: float = 0.2,
    kl_coefficient: float = 0.01,
    group_size: int = 8,
) -> Algorithm:
    """GiGPO: the episode's advantage in its group plus ω times the step's among the steps on the same state.

    See *Group-in-Group Policy Optimization* (arXiv:2505.10978).
    """
    episode_credit = slots.group_credit(normalise_std)

    def credit(batch: Trajectories, evaluation: Evaluation) -> tuple[Array, Array]:
        steps = jax.vmap(ends)(batch.turn_ids, batch.action_mask)
        to_go = jax.vmap(functools.partial(kernels.returns, discount=discount_turn))(
            batch.rewards, jnp.zeros_like(batch.rewards), steps, batch.sequence_ids
        )
        step = kernels.anchor_advantages(
            to_go.ravel(), batch.state_ids.ravel(), normalise_std=normalise_std, valid=steps.ravel()
        ).reshape(steps.shape)
        size = steps.shape[1]
        turn = jax.vmap(lambda *x: segment_last(*x, size))(step, batch.turn_ids, batch.action_mask)
        episode, returns = episode_credit(batch, evaluation)
        return episode + step_coefficient * jax.vmap(spread)(turn, batch.turn_ids, batch.action_mask), returns

    base = grpo(epsilon_low=epsilon, epsilon_high=epsilon, kl_coefficient=kl_coefficient, group_size=group_size)
    return dataclasses.replace(base, name="gigpo", credit=credit)


def taspo(
    *,
    kappa: float = 0.0,
    tau: float = 1.0,
    epsilon_w: float = 0.5,
    center: Granularity = turn_ids,
    epsilon: float = 0.2,
    kl_coefficient: float = 0.0,
    group_size: int = 8,
) -> Algorithm:
    """TASPO: GRPO whose turns are weighted by what privileged hindsight thinks of their executed actions.

    See *TASPO* (arXiv:2608.31077). Not published: κ, τ, ε_w, ε and the KL coefficient; the defaults are ours.
    """
    base = grpo(epsilon_low=epsilon, epsilon_high=epsilon, kl_coefficient=kl_coefficient, group_size=group_size)

    def row_weights(row: Trajectories, delta: Array, advantages: Array) -> Array:
        return kernels.hindsight_weights(
            delta,
            advantages,
            row.action_mask,
            row.executable_mask,
            row.turn_ids,
            sequence_ids=row.sequence_ids,
            kappa=kappa,
            tau=tau,
            epsilon_w=epsilon_w,
            center=center,
        )

    def credit(batch: Trajectories, evaluation: Evaluation) -> tuple[Array, Array]:
        advantages, returns = base.credit(batch, evaluation)
        delta = evaluation.privileged_logprobs - evaluation.logprobs
        return advantages * jax.vmap(row_weights)(batch, delta, advantages), returns

    return dataclasses.replace(base, name="taspo", credit=credit, needs=base.needs | {"privileged"})
