"""One short function an algorithm: its arguments are the paper's hyperparameters, its body a composition of kernels."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mpo_jax.algorithms.critics import bilevel_gae, mpo, ppo, sao, turn_ppo, vapo, vc_ppo
from mpo_jax.algorithms.groups import dapo, dr_grpo, gigpo, grpo, gspo, gspo_token, taspo
from mpo_jax.algorithms.slots import masked_importance, truncated_importance
from mpo_jax.algorithms.update import Algorithm, Penalty, drop_nonfinite, policy_loss, targets, value_loss
from mpo_jax.kernels.segments import Granularity, Reduce, segment_mean, segment_sum, sequence_ids, token_ids, turn_ids

__all__ = [
    "ALGORITHMS",
    "CORRECTIONS",
    "Algorithm",
    "Penalty",
    "bilevel_gae",
    "corrected",
    "dapo",
    "defaults",
    "dr_grpo",
    "drop_nonfinite",
    "from_config",
    "gigpo",
    "grpo",
    "gspo",
    "gspo_token",
    "masked_importance",
    "mpo",
    "policy_loss",
    "ppo",
    "sao",
    "targets",
    "taspo",
    "truncated_importance",
    "turn_ppo",
    "value_loss",
    "vapo",
    "vc_ppo",
]

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "mpo": mpo,
    "turn_ppo": turn_ppo,
    "ppo": ppo,
    "vc_ppo": vc_ppo,
    "vapo": vapo,
    "sao": sao,
    "bilevel_gae": bilevel_gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gigpo": gigpo,
    "taspo": taspo,
}
GRANULARITIES: dict[str, Granularity] = {"token": token_ids, "turn": turn_ids, "sequence": sequence_ids}
REDUCERS: dict[str, Reduce] = {"sum": segment_sum, "mean": segment_mean}
_NAMED = {
    "ratio_granularity": GRANULARITIES,
    "center": GRANULARITIES,
    "ratio_reduce": REDUCERS,
    "granularity": GRANULARITIES,
    "reduce": REDUCERS,
}
CORRECTIONS = {"truncated": truncated_importance, "masked": masked_importance}


def from_config(name: str, **hyperparameters: Any) -> Algorithm:
    """Builds an algorithm by name; granularities and reducers may be given as strings ("turn", "mean").

    Raises:
      ValueError: for an unknown name, hyperparameter or string, naming those that exist.
    """
    return _build("algorithm", name, ALGORITHMS, hyperparameters)


def corrected(algorithm: Algorithm, name: str, **hyperparameters: Any) -> Algorithm:
    """The algorithm with importance weights π_old / π_behavior on its samples, by the name of a correction.

    π_old is the policy at the start of the update, so the weights correct the mismatch of sampling engine and trainer
    and the staleness of the samples alike: with the ratio π / π_old, the decoupled objective of *AReaL*
    (arXiv:2505.24298), truncated or masked.

    Raises:
      ValueError: for an unknown name, hyperparameter or string; for an algorithm whose ratio is against π_behavior
        already, or that has a correction of its own: the samples would be weighted twice.
    """
    anchor = next(field.default for field in dataclasses.fields(Algorithm) if field.name == "anchor")
    if algorithm.correction is not None or algorithm.anchor is not anchor:
        raise ValueError(f"{algorithm.name} accounts for the sampling policy itself: no further correction fits it")
    return dataclasses.replace(algorithm, correction=_build("correction", name, CORRECTIONS, hyperparameters))


def defaults(name: str) -> dict[str, Any]:
    """The hyperparameters of an algorithm with their defaults, as plain values that `from_config` takes back.

    Those of a correction too, for `corrected`.
    """
    strings = {function: string for known in (GRANULARITIES, REDUCERS) for string, function in known.items()}
    parameters = inspect.signature(_lookup("algorithm", name, ALGORITHMS | CORRECTIONS)).parameters
    values = {key: strings.get(parameter.default, parameter.default) for key, parameter in parameters.items()}
    return {key: value for key, value in values.items() if key != "credit"}  # a function, given in Python only


def _build(what: str, name: str, builders: Mapping[str, Callable[..., Any]], hyperparameters: dict[str, Any]) -> Any:
    build = _lookup(what, name, builders)
    known = inspect.signature(build).parameters
    for key, value in hyperparameters.items():
        _lookup(f"hyperparameter of {name}", key, known)
        if isinstance(value, str) and key in _NAMED:
            hyperparameters[key] = _lookup(key, value, _NAMED[key])
    return build(**hyperparameters)


def _lookup(what: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}, expected one of: {', '.join(known)}")
    return known[name]
