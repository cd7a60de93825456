"""How a run is watched: traces of chosen steps, and what share of the devices' peak it reaches."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import ml_collections
import numpy as np

from mpo_jax.models.pretrained import Pretrained
from mpo_jax.training import plan
from mpo_jax.training.profiling import Trace
from mpo_jax.training.state import TrainState


def make_trace(workdir: Path, steps: Sequence[str] | None) -> Trace | None:
    """What traces the named steps, one or a first and a last.

    Raises:
      ValueError: they are not one or two step numbers in order.
    """
    if not steps:
        return None
    if len(steps) > 2 or not all(step.isdecimal() for step in steps):
        raise ValueError(f"profile_steps={','.join(steps)}: expected a step, or the first and the last")
    return Trace(workdir / "trace", int(steps[0]), int(steps[-1]))


def make_utilisation(
    config: ml_collections.ConfigDict, model: Pretrained, state: TrainState
) -> Callable[[float, float], float] | None:
    """MFU of the state's devices at (tokens of an episode, tokens a second); None where no peak of them is known.

    Epochs count as often as they are trained; what the evaluation of a batch computes does not.
    """
    devices = np.array(sorted(jax.tree.leaves(state.policy)[0].devices(), key=lambda device: device.id))
    if devices[0].device_kind not in plan.CHIPS:
        return None
    program = plan.Program(model.config, jax.sharding.Mesh(devices, ("data",)), state, None)
    return lambda length, rate: plan.utilisation(program, length, config.epochs * rate)
