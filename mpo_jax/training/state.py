"""All that training changes, and how it begins."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mpo_jax.algorithms import Algorithm
from mpo_jax.models import lora
from mpo_jax.models.actor_critic import shared_critic_params
from mpo_jax.models.pretrained import critic_params
from mpo_jax.models.transformer import TransformerConfig
from mpo_jax.training import sharding
from mpo_jax.types import Array


@chex.dataclass(frozen=True, mappable_dataclass=False)
class TrainState:
    """All that training changes, and what it is compared with or built upon.

    Attributes:
      step: int32, batches trained on so far; the version of the policy's weights.
      policy, critic, reference: parameters (critic and reference are None where the algorithm has none).
      policy_optimizer, critic_optimizer: optax states.
      skipped: int32, updates refused because a loss or a gradient was not finite.
      critic_best, critic_stale: float32 and int32, the best explained variance of the critic on held-out episodes, and
        how many measurements since have not exceeded it.
      base: the policy's frozen parameters where policy and critic are adapters beside them, and the reference, which is
        then None; None where all parameters are trained.
    """

    step: Array
    policy: nnx.State
    critic: nnx.State | None
    reference: nnx.State | None
    policy_optimizer: optax.OptState
    critic_optimizer: optax.OptState | None
    skipped: Array
    critic_best: Array
    critic_stale: Array
    base: nnx.State | None = None


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """How policy and critic are updated."""

    policy: optax.GradientTransformation
    critic: optax.GradientTransformation

    def both(self) -> optax.GradientTransformation:
        """That of the pair (policy, critic), each by its own."""
        each = self.policy, self.critic

        def update(grads, states, params):
            found = [o.update(*arrays) for o, *arrays in zip(each, grads, states, params, strict=True)]
            return tuple(zip(*found, strict=True))

        return optax.GradientTransformation(
            lambda pair: tuple(o.init(x) for o, x in zip(each, pair, strict=True)), update
        )


def initial_state(
    config: TransformerConfig,
    params: nnx.State,
    algorithm: Algorithm,
    optimizers: Optimizers,
    adapters: lora.LoraConfig | None = None,
    seed: int = 0,
    shared_trunk: bool = False,
) -> TrainState:
    """The state before the first step: policy and reference are the warm start, the critic's trunk too.

    Everything is a copy of its own, since the train step is given its buffers.

    Args:
      config, params: of the warm start.
      algorithm: says whether there are a critic and a reference.
      optimizers: of what is trained.
      adapters: what is trained in place of the parameters, if anything.
      seed: of the adapters.
      shared_trunk: the critic has none of its own.
    """

    def copy() -> nnx.State:
        return jax.tree.map(jnp.copy, params)

    critic = None
    if "critic" in algorithm.needs:
        critic = shared_critic_params(config) if shared_trunk else critic_params(config, copy())
    policy, base, reference = copy(), None, copy() if "reference" in algorithm.needs else None
    if adapters is not None:
        base, reference, keys = policy, None, jax.random.split(jax.random.key(seed))
        policy = lora.init(adapters, params, keys[0])
        critic = critic if critic is None or shared_trunk else lora.init(adapters, critic, keys[1])
    return TrainState(
        step=jnp.int32(0),
        policy=policy,
        critic=critic,
        reference=reference,
        policy_optimizer=optimizers.policy.init(policy),
        critic_optimizer=None if critic is None else optimizers.critic.init(critic),
        skipped=jnp.int32(0),
        critic_best=jnp.float32(-jnp.inf),
        critic_stale=jnp.int32(0),
        base=base,
    )


def judge_critic(state: TrainState, explained_variance: float) -> TrainState:
    """Notes what the critic explains of held-out episodes: a critic that memorises explains ever less of them."""
    better = explained_variance > state.critic_best
    return state.replace(
        critic_best=jnp.where(better, jnp.float32(explained_variance), state.critic_best),
        critic_stale=jnp.where(better, 0, state.critic_stale + 1),
    )


def follow_policy(decay: float, state: TrainState) -> TrainState:
    """Moves the reference towards the policy: reference ← decay · reference + (1 − decay) · policy."""
    reference = optax.incremental_update(state.policy, state.reference, 1 - decay)
    return sharding.constrained(state.replace(reference=reference))
