"""Multi-scale advantages: in parallel rounds on accelerators, in loops on a CPU."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from mpo_jax.kernels import checks, multiscale_loops
from mpo_jax.kernels.checks import Scalar
from mpo_jax.kernels.recurrence import linear_recurrence
from mpo_jax.kernels.segments import ends, masked
from mpo_jax.types import PADDING, Array


def multiscale_advantages(
    rewards: Float[Array, "T"],
    values: Float[Array, "T"],
    action_mask: Bool[Array, "T"],
    turn_ids: Int[Array, "T"],
    *,
    lambda_turn: Scalar = 0.8,
    lambda_intra: Scalar = 0.95,
    beta: Scalar = 1.0,
    sequence_ids: Int[Array, "T"] | None = None,
    bootstrap_values: Float[Array, "T"] | None = None,
) -> Float[Array, "T"]:
    """Multi-scale advantages: the turn sets the level, the tokens inside it only how the level is shared out.

      A_{t,i} = A^turn_t + β (A^intra_{t,i} − mean_j A^intra_{t,j})
      A^turn_t = r_t + V_{t+1,1} − V_{t,1} + λ_turn A^turn_{t+1}     (one discount a turn, whatever its length)
      A^intra_{t,i} = r_{t,i} + V_{t,i+1} − V_{t,i} + λ_intra A^intra_{t,i+1}     (the trace ends with the turn)

    with V_{t,L_t+1} = V_{t+1,1} and V_{T+1,1} = 0. Both are λ-returns less V that differ only in a token's λ:
    λ_turn at turn ends and 1 inside, or 0 at turn ends and λ_intra inside.

    With λ_turn = 1 and β = 0 the policy gradient is unbiased whatever the critic. β ≠ 0 favours a turn's early tokens
    even with an exact critic: over turns of L tokens token k's part is multiplied by 1 + β(1 − Σ_{j<k} λ_intra^j / L),
    never turned around (notebook 01, tests/theory_test.py).

    Args:
      rewards: [T], non-zero only on a turn's last action token.
      values: [T] V before each token; read at action tokens, those inside a turn by A^intra alone.
      action_mask: [T] tokens that the policy sampled.
      turn_ids: [T] turn of each token, growing along the row, -1 on padding; observations may have any.
      lambda_turn: λ of the turn recursion.
      lambda_intra: λ of the trace inside a turn.
      beta: β, weight of the shares inside a turn; 0 is `turn_advantages`.
      sequence_ids: [T] of a packed row; None is a single sequence.
      bootstrap_values: [T] or None, V after a sequence's last action (in place of 0), read at that token.

    Returns:
      [T] advantages before whitening, 0 off the action tokens.

    Raises:
      ValueError: for shapes, dtypes or ids that do not fit.
    """
    checks.check_aligned(
        "T",
        rewards=rewards,
        values=values,
        action_mask=action_mask,
        turn_ids=turn_ids,
        sequence_ids=sequence_ids,
        bootstrap_values=bootstrap_values,
    )
    checks.check_turns(action_mask, turn_ids, sequence_ids)
    rewards, values = masked(rewards, action_mask), masked(values, action_mask)
    if bootstrap_values is not None:  # V after a sequence is one reward more at its last action
        last = ends(jnp.zeros_like(turn_ids) if sequence_ids is None else sequence_ids, action_mask)
        rewards = rewards + masked(bootstrap_values, last)
    nested = (turn_ids,) if sequence_ids is None else (turn_ids, sequence_ids)
    ids = (jnp.where(action_mask, x, PADDING).astype(jnp.int32) for x in nested)
    terms = {"lambda_turn": lambda_turn, "lambda_intra": lambda_intra, "beta": beta}
    forms = {"cpu": multiscale_loops.in_loops, "default": in_rounds}
    return jax.lax.platform_dependent(
        rewards, values, *ids, **{k: functools.partial(f, **terms) for k, f in forms.items()}
    )


def in_rounds(
    rewards: Array, values: Array, *ids: Array, lambda_turn: Scalar, lambda_intra: Scalar, beta: Scalar
) -> Array:
    """The advantages by recurrences that accelerators run in parallel.

    G_i = r_i + H_{i+1} are λ-returns; H_i = (1 − λ_i) V_i + λ_i G_i is what action i hands back to the one before it,
    λ_i that of the border between them. A sequence's first action hands back 0; no action, what it got.

    Args:
      rewards, values: [T], 0 off the actions.
      *ids: [T] of turns, and of sequences if there are several; -1 off the actions.
      lambda_turn, lambda_intra, beta: as `multiscale_advantages`.

    Returns:
      [T] advantages.
    """
    action = ids[0] != PADDING

    @jax.vmap
    def begins(ids: Array) -> Array:
        of_latest = linear_recurrence(~action, jnp.where(action, ids + 1, 0))  # plus 1: before the first action it is 0
        return jnp.logical_and(action, ids + 1 != jnp.append(0, of_latest[:-1]))

    @jax.vmap
    def trace(decay: Array) -> Array:
        handed = jnp.where(action, jnp.where(cut, 0.0, (1.0 - decay) * values + decay * rewards), 0.0)
        handed = linear_recurrence(jnp.where(action, jnp.where(cut, 0.0, decay), 1.0), handed, reverse=True)
        return jnp.where(action, rewards + _next(handed) - values, 0.0)

    @jax.vmap
    def over_rest(x: Array) -> Array:
        return linear_recurrence(_next(~first), x, reverse=True)

    first, *cut = begins(jnp.stack(ids))
    cut = cut[0] if cut else False
    turn, intra = trace(jnp.stack([jnp.where(first, lambda_turn, 1.0), jnp.where(first, 0.0, lambda_intra)]))
    total, count = over_rest(jnp.stack([intra, action.astype(intra.dtype)]))
    level = turn - beta * total / jnp.maximum(count, 1.0)
    level = linear_recurrence(~first, jnp.where(first, level, 0.0))
    return jnp.where(action, level + beta * intra, 0.0)


def _next(x: Array) -> Array:
    """x at the next token, 0 at the last."""
    return jnp.append(x[1:], jnp.zeros_like(x[:1]))
