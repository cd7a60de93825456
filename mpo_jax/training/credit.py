"""The credit of single tokens, for a person to look at: what an algorithm makes of episodes under some weights."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpo_jax import kernels
from mpo_jax.algorithms import Algorithm
from mpo_jax.kernels.segments import masked, spread
from mpo_jax.store.episode import Episode
from mpo_jax.training.descriptions import started
from mpo_jax.training.learner import Learner
from mpo_jax.training.state import TrainState
from mpo_jax.types import Array, Evaluation, Targets, Trajectories


def token_credit(
    learner: Learner, state: TrainState, reference: nnx.State, episodes: Sequence[Episode]
) -> dict[str, dict[str, np.ndarray]]:
    """What each token of some episodes earns, as if they were one batch of the learner at this state.

    Args:
      learner: of the run.
      state: whose policy and critic judge.
      reference: policy parameters that Progress Advantage compares with, such as the warm start.
      episodes: of whole groups, where the algorithm compares the episodes of a group.

    Returns:
      Episode id to channel to float32[n], n its tokens, 0 off the sampled ones (the ratio: 1): `advantage`; `ratio`
      of the state's policy to the one that sampled, of the algorithm's granularity; `gap`, log π − log π_sampled;
      `progress`, the turn's Progress Advantage over the reference; `entropy`; and `value`, where there is a critic.
    """
    episodes = started(episodes)
    if not episodes:
        return {}
    batch, slots, judged, targets = learner.prepare(state, episodes)
    ref_logprobs, _ = jax.jit(learner.models.logprobs)(reference, batch)
    channels = jax.jit(functools.partial(_channels, learner.algorithm))(batch, judged, targets, ref_logprobs)
    channels = {name: np.asarray(x) for name, x in channels.items()}
    found = {}
    for row, slot in np.argwhere(slots >= 0):
        own = batch.sequence_ids[row] == slot
        found[episodes[slots[row, slot]].episode_id] = {name: x[row, own] for name, x in channels.items()}
    return found


def _channels(
    algorithm: Algorithm, batch: Trajectories, judged: Evaluation, targets: Targets, ref_logprobs: Array
) -> dict[str, Array]:
    mask, behavior = batch.action_mask, batch.behavior_logprobs

    def progress(logprobs: Array, ref_logprobs: Array, turn_ids: Array, mask: Array) -> Array:
        return spread(kernels.progress_advantage(logprobs, ref_logprobs, turn_ids, mask), turn_ids, mask)

    found = {
        "advantage": targets.advantages,
        "ratio": algorithm.ratio(judged.logprobs, targets.replace(old_logprobs=behavior), batch),
        "gap": masked(judged.logprobs, mask) - masked(behavior, mask),
        "progress": jax.vmap(progress)(judged.logprobs, ref_logprobs, batch.turn_ids, mask),
        "entropy": masked(judged.entropy, mask),
    }
    if algorithm.value_loss is not None:
        found["value"] = masked(judged.values, mask)
    return jax.tree.map(lambda x: x.astype(jnp.float32), found)
