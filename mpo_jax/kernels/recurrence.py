"""First-order linear recurrences along a row: a loop on a CPU, ⌈log₂ T⌉ rounds of parallel steps on anything else."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Shaped

from mpo_jax.types import Array


def linear_recurrence(
    decay_t: Shaped[Array, "T"], x_t: Shaped[Array, "T"], *, reverse: bool = False
) -> Shaped[Array, "T"]:
    """y_t = x_t + d_t y_{t−1} with y_0 = 0; with `reverse`, y_t = x_t + d_t y_{t+1} with y_{T+1} = 0.

    Where d is 0, nothing from beyond takes part, NaN included. An accelerator has an overhead for each of T dependent
    steps that is far above their work, so there every t composes (d, x) with the pair from 1, 2, 4, … before it.

    See *Data Parallel Algorithms* (Hillis & Steele, 1986).

    Args:
      decay_t: [T] d.
      x_t: [T] x.
      reverse: whether it runs from the end.

    Returns:
      [T] y.
    """

    decay_t = jnp.asarray(decay_t, jnp.asarray(x_t).dtype)
    forms = {"cpu": _loop, "default": _rounds}
    return jax.lax.platform_dependent(
        decay_t, x_t, **{platform: functools.partial(form, reverse=reverse) for platform, form in forms.items()}
    )


def _loop(decay_t: Array, x_t: Array, *, reverse: bool) -> Array:
    def step(y: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        y = now[1] + _decayed(now[0], y)
        return y, y

    return jax.lax.scan(step, jnp.zeros((), x_t.dtype), (decay_t, x_t), reverse=reverse)[1]


def _rounds(decay_t: Array, x_t: Array, *, reverse: bool) -> Array:
    shift = 1  # (d, x) at t stands for the last `shift` tokens up to t
    while shift < len(x_t):
        early = [_shifted(y, -shift if reverse else shift) for y in (decay_t, x_t)]
        decay_t, x_t = _decayed(decay_t, early[0]), x_t + _decayed(decay_t, early[1])
        shift *= 2
    return x_t


def _shifted(x: Array, by: int) -> Array:
    """x_{t−by}, 0 where there is none."""
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(by, -by, 0)])


def _decayed(decay: Array, y: Array) -> Array:
    return jnp.where(decay == 0, 0, decay * y)
