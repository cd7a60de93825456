"""One train step for every algorithm: evaluate once a batch, then gradient steps on its minibatches."""

import dataclasses
import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mpo_jax import algorithms
from mpo_jax.algorithms import Algorithm
from mpo_jax.models import lora
from mpo_jax.models.actor_critic import Models, shared_critic_params
from mpo_jax.models.moe import router_terms
from mpo_jax.models.pretrained import critic_params
from mpo_jax.models.transformer import TransformerConfig
from mpo_jax.training import sharding
from mpo_jax.training.microbatches import Metrics, accumulate, join_rows, split_rows
from mpo_jax.types import Array, Evaluation, Targets, Trajectories


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


def freeze(params: nnx.State, modules: frozenset[str]) -> nnx.State:
    """The parameters, those within a module of such a name cut off from the gradient."""

    def leaf(path: tuple, x: Array) -> Array:
        return x if modules.isdisjoint(getattr(key, "key", None) for key in path) else jax.lax.stop_gradient(x)

    return jax.tree_util.tree_map_with_path(leaf, params)


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


def make_evaluate(algorithm: Algorithm, models: Models, num_microbatches: int = 1) -> Callable:
    """The function (state, batch) -> `Evaluation`, evaluated a microbatch at a time."""

    def evaluate_rows(state: TrainState, batch: Trajectories) -> Evaluation:
        experts = None if models.router_replay is None else batch.experts
        if algorithm.value_loss is None:
            logprobs, entropy, routing = models.routed(state.policy, batch, state.base, experts)
            values, final_values = jnp.zeros_like(logprobs), jnp.zeros(batch.group_ids.shape)
        else:
            judged = models.both(state.policy, state.critic, batch, state.base, experts)
            logprobs, entropy, routing, values, final_values = judged
        ref_logprobs = logprobs
        if "reference" in algorithm.needs:
            reference = state.reference if state.base is None else state.base
            ref_logprobs = models.logprobs(reference, batch)[0]
        return Evaluation(
            logprobs=logprobs,
            entropy=entropy,
            values=values,
            final_values=final_values,
            ref_logprobs=ref_logprobs,
            privileged_logprobs=logprobs,
            experts=None if models.router_replay is None else jnp.moveaxis(routing.experts, 0, 2),
        )

    def evaluate(state: TrainState, batch: Trajectories) -> Evaluation:
        parts = jax.lax.map(functools.partial(evaluate_rows, state), split_rows(batch, num_microbatches))
        return join_rows(parts)

    return jax.jit(evaluate)


def make_train_step(
    algorithm: Algorithm,
    models: Models,
    optimizers: Optimizers,
    num_microbatches: int = 1,
    num_minibatches: int = 1,
    load_balancing: float = 0.0,
    critic_patience: int | None = None,
) -> Callable:
    """The jitted function (state, batch, targets, update_policy) -> (state, metrics); the state is donated.

    Weights in `targets` sum over the whole batch of which this is one of `num_minibatches`: the loss is scaled by
    that number, so a minibatch's gradient estimates the batch's. `update_policy` is a traced flag: value pretraining
    is the same compiled step with the policy left alone. So is the critic once its state is `critic_patience`
    measurements stale. Metrics of what is left alone are 0. `load_balancing` is the coefficient of the loss of that
    name, for a policy with experts. Where policy and critic share a trunk, both losses are one, and so is the step.

    Raises:
      ValueError: a shared trunk for an algorithm without a critic, or whose critic is trained in a way of its own.
    """
    if models.shared_trunk is not None:
        _check_shared_trunk(algorithm)

    def policy_terms(logprobs, routing, num_tokens, batch: Trajectories, targets: Targets):
        loss, metrics = algorithms.policy_loss(algorithm, logprobs, batch, targets)
        loss, metrics = loss * num_minibatches, jax.tree.map(lambda x: x * num_minibatches, metrics)
        if routing is not None:
            found = router_terms(routing, batch.sequence_ids >= 0, num_tokens)
            loss, metrics = loss + load_balancing * found["load_balancing_loss"], metrics | found
        return loss, metrics

    def value_terms(values, targets: Targets):
        loss, metrics = algorithms.value_loss(algorithm, values, targets)
        return loss * num_minibatches, jax.tree.map(lambda x: x * num_minibatches, metrics)

    def policy_objective(base, num_tokens, params, batch: Trajectories, targets: Targets):
        logprobs, _, routing = models.routed(params, batch, base, targets.experts)
        return policy_terms(logprobs, routing, num_tokens, batch, targets)

    def value_objective(base, params, batch: Trajectories, targets: Targets):
        return value_terms(models.values(freeze(params, algorithm.critic_frozen), batch, base)[0], targets)

    def shared_objective(base, num_tokens, trained, params, batch: Trajectories, targets: Targets):
        logprobs, _, routing, values, _ = models.both(*params, batch, base, targets.experts)

        def where(flag, part):
            return jax.tree.map(lambda x: jnp.where(flag, x, 0.0), part)

        loss, metrics = where(trained[0], policy_terms(logprobs, routing, num_tokens, batch, targets))
        value_loss, value_metrics = where(trained[1], value_terms(values, targets))
        return loss + models.shared_trunk * value_loss, metrics | value_metrics

    def gradient_step(objective, optimizer, params, optimizer_state, data):
        """One update of one model; none where its loss or gradient is not finite, or where there is no gradient."""
        loss, metrics, grads = accumulate(objective, params, data, num_microbatches)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, new_state = optimizer.update(grads, optimizer_state, params)
        new = (optax.apply_updates(params, updates), new_state)
        kept = jax.tree.map(functools.partial(jnp.where, finite & (norm > 0)), new, (params, optimizer_state))
        return *kept, ~finite, metrics | {"grad_norm": norm}

    def step_policy(state: TrainState, base: nnx.State | None, data: tuple) -> tuple[TrainState, Metrics]:
        num_tokens = jnp.maximum(jnp.sum(data[0].sequence_ids >= 0), 1)
        objective = functools.partial(policy_objective, base, num_tokens)
        params, optimizer_state, skipped, metrics = gradient_step(
            objective, optimizers.policy, state.policy, state.policy_optimizer, data
        )
        state = state.replace(policy=params, policy_optimizer=optimizer_state, skipped=state.skipped + skipped)
        return state, metrics

    def step_critic(state: TrainState, base: nnx.State | None, data: tuple) -> tuple[TrainState, Metrics]:
        objective = functools.partial(value_objective, base)
        params, optimizer_state, skipped, metrics = gradient_step(
            objective, optimizers.critic, state.critic, state.critic_optimizer, data
        )
        state = state.replace(critic=params, critic_optimizer=optimizer_state, skipped=state.skipped + skipped)
        return state, metrics | {"value_grad_norm": metrics["grad_norm"]}

    def step_shared(state: TrainState, base: nnx.State | None, data: tuple, update_policy: Array):
        fresh = True if critic_patience is None else state.critic_stale < critic_patience
        num_tokens = jnp.maximum(jnp.sum(data[0].sequence_ids >= 0), 1)
        objective = functools.partial(shared_objective, base, num_tokens, (update_policy, fresh))
        params, states = (state.policy, state.critic), (state.policy_optimizer, state.critic_optimizer)
        params, states, skipped, metrics = gradient_step(objective, optimizers.both(), params, states, data)

        def keep(flag, new, old):
            return jax.tree.map(functools.partial(jnp.where, flag), new, old)

        state = state.replace(
            policy=keep(update_policy, params[0], state.policy),
            critic=keep(fresh, params[1], state.critic),
            policy_optimizer=keep(update_policy, states[0], state.policy_optimizer),
            critic_optimizer=keep(fresh, states[1], state.critic_optimizer),
            skipped=state.skipped + skipped,
        )
        return state, metrics

    def step_if(flag: Array, step: Callable, state: TrainState, base: nnx.State | None, data: tuple):
        _, shapes = jax.eval_shape(step, state, base, data)
        idle = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.cond(flag, step, lambda state, *_: (state, idle), state, base, data)

    def train_step(state: TrainState, batch: Trajectories, targets: Targets, update_policy: Array):
        base, data, value_metrics = state.base, (batch, targets), {}
        state = state.replace(base=None)  # read by what follows, but carried through none of it
        if models.shared_trunk is not None:
            state, metrics = step_shared(state, base, data, update_policy)
            return sharding.constrained(state.replace(base=base)), metrics
        for _ in range(algorithm.critic_updates if algorithm.value_loss is not None else 0):
            if critic_patience is None:
                state, value_metrics = step_critic(state, base, data)
            else:
                state, value_metrics = step_if(state.critic_stale < critic_patience, step_critic, state, base, data)
        state, metrics = step_if(update_policy, step_policy, state, base, data)
        return sharding.constrained(state.replace(base=base)), value_metrics | metrics

    return jax.jit(train_step, donate_argnums=0)


def _check_shared_trunk(algorithm: Algorithm) -> None:
    if algorithm.value_loss is None:
        raise ValueError(f"shared_trunk: {algorithm.name} has no critic")
    if algorithm.critic_updates > 1 or algorithm.critic_frozen:
        raise ValueError(
            f"shared_trunk: {algorithm.name} makes {algorithm.critic_updates} updates of its critic for one of the "
            f"policy and leaves {sorted(algorithm.critic_frozen)} of it untrained: it needs a trunk of its own"
        )
