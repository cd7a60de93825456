"""How parameters are updated: optax's optimisers behind clipping by global norm, at a constant or scheduled rate."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers


def muon_matrices(params: Any) -> Any:
    """Which parameters Muon orthogonalises: the matrices within blocks, of stacked blocks each layer on its own.

    Embedding, output head, value head, norms and routers stay with Adam. See *Muon is Scalable for LLM Training*
    (arXiv:2502.16982), section 2.

    Returns:
      A tree with the axes (in, out) of each such matrix, None for the others.
    """

    def axes(path: tuple, x: jax.Array) -> MuonDimensionNumbers | None:
        name = _name(path)
        matrix = "blocks." in name and name.endswith(".kernel") and "router" not in name
        return MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if matrix else None

    return jax.tree_util.tree_map_with_path(axes, params)


def decayed(params: Any) -> Any:
    """Which parameters AdamW's decay draws to 0: not norms, biases and shares of smeared keys. Muon's: its matrices."""
    kept = ("scale", "bias", "smear")
    return jax.tree_util.tree_map_with_path(lambda path, _: _name(path).split(".")[-1] not in kept, params)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adam": lambda rate, b2, decay: optax.adam(rate, b2=b2),
    "adamw": lambda rate, b2, decay: optax.adamw(rate, b2=b2, weight_decay=decay, mask=decayed),
    "muon": lambda rate, b2, decay: optax.contrib.muon(
        rate, adam_b2=b2, weight_decay=decay, muon_weight_dimension_numbers=muon_matrices
    ),
}
DECAYS: dict[str, Callable[[float, int], optax.Schedule]] = {
    "constant": lambda rate, updates: optax.constant_schedule(rate),
    "cosine": lambda rate, updates: optax.cosine_decay_schedule(rate, updates),
    "linear": lambda rate, updates: optax.linear_schedule(rate, 0.0, updates),
}


def schedule(rate: float, *, decay: str = "constant", warmup: int = 0, updates: int = 0) -> float | optax.Schedule:
    """The learning rate by update: linear warm-up from 0, then what `DECAYS` names, to 0 at the last update.

    Args:
      rate: the highest.
      decay: a name of `DECAYS`.
      warmup: updates until the highest rate.
      updates: of the whole run, counted in updates and not in microbatches.

    Raises:
      ValueError: an unknown decay, or a warm-up as long as the run.
    """
    if decay not in DECAYS:
        raise ValueError(f"unknown decay {decay!r}, expected one of: {', '.join(DECAYS)}")
    if decay == "constant" and not warmup:
        return rate
    if decay != "constant" and not 0 <= warmup < updates:
        raise ValueError(f"warmup={warmup} leaves nothing of {updates} updates to decay over")
    after = DECAYS[decay](rate, updates - warmup)
    return optax.join_schedules([optax.linear_schedule(0.0, rate, warmup), after], [warmup])


def make_optimizer(
    name: str, rate: float | optax.Schedule, *, max_grad_norm: float, b2: float, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """An optimiser of `OPTIMIZERS` that first clips gradients by their global norm.

    Raises:
      ValueError: an unknown name, a norm that is not positive, a decay of weights that the optimiser does not do.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}, expected one of: {', '.join(OPTIMIZERS)}")
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm}, expected a positive number")
    if weight_decay and name == "adam":
        raise ValueError(f"weight_decay is {weight_decay}, but adam has none: choose adamw or muon")
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), OPTIMIZERS[name](rate, b2, weight_decay))
