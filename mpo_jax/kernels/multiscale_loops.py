"""Multi-scale advantages in four loops over the tokens, the fastest form on a CPU."""

import jax
import jax.numpy as jnp

from mpo_jax.kernels.checks import Scalar
from mpo_jax.types import PADDING, Array


def in_loops(
    rewards: Array, values: Array, *ids: Array, lambda_turn: Scalar, lambda_intra: Scalar, beta: Scalar
) -> Array:
    """As `multiscale.in_rounds`."""
    borders = _borders(*ids)
    turn, intra = _both_scales(rewards, values, borders, lambda_turn, lambda_intra)
    level = turn - beta * _mean_of_rest(intra, borders)
    return _shared_out(level, beta * intra, borders)


def _borders(*ids: Array) -> Array:
    """How many of the segments that an action is in begin with it, and one: 1 inside all of them; 0 off the actions."""

    def step(before: tuple, now: tuple) -> tuple[tuple, Array]:
        action = now[0] != PADDING
        begun = sum(x != y for x, y in zip(now, before, strict=True))
        before = tuple(jnp.where(action, x, y) for x, y in zip(now, before, strict=True))
        return before, jnp.where(action, 1 + begun, 0)

    return jax.lax.scan(step, tuple(jnp.int32(PADDING) for _ in ids), ids)[1]


def _both_scales(
    rewards: Array, values: Array, borders: Array, lambda_turn: Scalar, lambda_intra: Scalar
) -> tuple[Array, Array]:
    """A^turn, to be read at a turn's first action, and A^intra: λ-returns less V, G_i = r_i + H_{i+1}.

    H_i = (1 − λ_i) V_i + λ_i G_i is what action i hands back to the one before it, λ_i that of the border between them;
    a sequence's first action hands back 0, and whatever is no action hands on what it got.
    """

    def step(ahead: tuple, now: tuple) -> tuple[tuple, tuple]:
        reward, value, border = now
        first, action = border > 1, border > 0
        found = tuple(reward + x for x in ahead)
        decays = jnp.where(first, lambda_turn, 1.0), jnp.where(first, 0.0, lambda_intra)
        handed = (jnp.where(border > 2, 0.0, (1.0 - d) * value + d * x) for d, x in zip(decays, found, strict=True))
        ahead = tuple(jnp.where(action, x, y) for x, y in zip(handed, ahead, strict=True))
        return ahead, tuple(jnp.where(action, x - value, 0.0) for x in found)

    zero = jnp.zeros((), jnp.result_type(rewards, values))
    return jax.lax.scan(step, (zero, zero), (rewards, values, borders), reverse=True)[1]


def _mean_of_rest(x: Array, borders: Array) -> Array:
    """Mean from each action to the end of its turn: at a turn's first action, over the turn."""

    def step(after: tuple, now: tuple) -> tuple[tuple, Array]:
        x, border = now
        total, count = (y + jnp.where(border > 0, z, 0.0) for y, z in zip(after, (x, 1.0), strict=True))
        after = tuple(jnp.where(border > 1, 0.0, y) for y in (total, count))
        return after, total / jnp.maximum(count, 1.0)

    zero = jnp.zeros((), x.dtype)
    return jax.lax.scan(step, (zero, zero), (x, borders), reverse=True)[1]


def _shared_out(level: Array, share: Array, borders: Array) -> Array:
    """The level at its turn's first action plus each action's own share."""

    def step(before: Array, now: tuple) -> tuple[Array, Array]:
        level, share, border = now
        level = jnp.where(border > 1, level, before)
        return level, jnp.where(border > 0, level + share, 0.0)

    return jax.lax.scan(step, jnp.zeros((), level.dtype), (level, share, borders))[1]
