"""One train step for every algorithm: evaluate once a batch, then gradient steps on its minibatches."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mpo_jax import algorithms
from mpo_jax.algorithms import Algorithm
from mpo_jax.models.actor_critic import Models
from mpo_jax.models.moe import Routing, router_terms
from mpo_jax.training import sharding
from mpo_jax.training.microbatches import Metrics, accumulate, join_rows, split_rows
from mpo_jax.training.state import Optimizers, TrainState
from mpo_jax.types import Array, Evaluation, Targets, Trajectories


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
    update = Update(algorithm, models, optimizers, num_microbatches, num_minibatches, load_balancing, critic_patience)
    return jax.jit(update.train, donate_argnums=0)


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """What a minibatch does to policy and critic, to be traced; the attributes are `make_train_step`'s arguments."""

    algorithm: Algorithm
    models: Models
    optimizers: Optimizers
    num_microbatches: int
    num_minibatches: int
    load_balancing: float
    critic_patience: int | None

    def train(
        self, state: TrainState, batch: Trajectories, targets: Targets, update_policy: Array
    ) -> tuple[TrainState, Metrics]:
        """The critic's updates and the policy's, each where it is to be made."""
        base, data, value_metrics = state.base, (batch, targets), {}
        state = state.replace(base=None)  # read by what follows, but carried through none of it
        if self.models.shared_trunk is not None:
            state, metrics = self.step_shared(state, base, data, update_policy)
            return sharding.constrained(state.replace(base=base)), metrics
        for _ in range(self.algorithm.critic_updates if self.algorithm.value_loss is not None else 0):
            if self.critic_patience is None:
                state, value_metrics = self.step_critic(state, base, data)
            else:
                fresh = state.critic_stale < self.critic_patience
                state, value_metrics = step_if(fresh, self.step_critic, state, base, data)
        state, metrics = step_if(update_policy, self.step_policy, state, base, data)
        return sharding.constrained(state.replace(base=base)), value_metrics | metrics

    def step_policy(self, state: TrainState, base: nnx.State | None, data: tuple) -> tuple[TrainState, Metrics]:
        """One update of the policy."""
        objective = functools.partial(self.policy_objective, base, count_tokens(data[0]))
        params, optimizer_state, skipped, metrics = gradient_step(
            objective, self.optimizers.policy, state.policy, state.policy_optimizer, data, self.num_microbatches
        )
        state = state.replace(policy=params, policy_optimizer=optimizer_state, skipped=state.skipped + skipped)
        return state, metrics

    def step_critic(self, state: TrainState, base: nnx.State | None, data: tuple) -> tuple[TrainState, Metrics]:
        """One update of the critic."""
        objective = functools.partial(self.value_objective, base)
        params, optimizer_state, skipped, metrics = gradient_step(
            objective, self.optimizers.critic, state.critic, state.critic_optimizer, data, self.num_microbatches
        )
        state = state.replace(critic=params, critic_optimizer=optimizer_state, skipped=state.skipped + skipped)
        return state, metrics | {"value_grad_norm": metrics["grad_norm"]}

    def step_shared(
        self, state: TrainState, base: nnx.State | None, data: tuple, update_policy: Array
    ) -> tuple[TrainState, Metrics]:
        """One update of policy and critic on one trunk."""
        fresh = True if self.critic_patience is None else state.critic_stale < self.critic_patience
        objective = functools.partial(self.shared_objective, base, count_tokens(data[0]), (update_policy, fresh))
        params, states = (state.policy, state.critic), (state.policy_optimizer, state.critic_optimizer)
        params, states, skipped, metrics = gradient_step(
            objective, self.optimizers.both(), params, states, data, self.num_microbatches
        )

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

    def policy_objective(self, base, num_tokens, params, batch: Trajectories, targets: Targets) -> tuple:
        """The policy's loss on some rows, and its metrics."""
        logprobs, _, routing = self.models.routed(params, batch, base, targets.experts)
        return self.policy_terms(logprobs, routing, num_tokens, batch, targets)

    def value_objective(self, base, params, batch: Trajectories, targets: Targets) -> tuple:
        """The critic's loss on some rows, and its metrics."""
        params = freeze(params, self.algorithm.critic_frozen)
        return self.value_terms(self.models.values(params, batch, base)[0], targets)

    def shared_objective(self, base, num_tokens, trained, params, batch: Trajectories, targets: Targets) -> tuple:
        """The sum of both where they are `trained`, and the metrics of these."""
        logprobs, _, routing, values, _ = self.models.both(*params, batch, base, targets.experts)

        def where(flag, part):
            return jax.tree.map(lambda x: jnp.where(flag, x, 0.0), part)

        loss, metrics = where(trained[0], self.policy_terms(logprobs, routing, num_tokens, batch, targets))
        value_loss, value_metrics = where(trained[1], self.value_terms(values, targets))
        return loss + self.models.shared_trunk * value_loss, metrics | value_metrics

    def policy_terms(
        self, logprobs: Array, routing: Routing | None, num_tokens: Array, batch: Trajectories, targets: Targets
    ) -> tuple[Array, Metrics]:
        """The policy's loss at log-probs, with that of the routing if there are experts, and their metrics."""
        loss, metrics = self._scaled(algorithms.policy_loss(self.algorithm, logprobs, batch, targets))
        if routing is not None:
            found = router_terms(routing, batch.sequence_ids >= 0, num_tokens)
            loss, metrics = loss + self.load_balancing * found["load_balancing_loss"], metrics | found
        return loss, metrics

    def value_terms(self, values: Array, targets: Targets) -> tuple[Array, Metrics]:
        """The critic's loss at values, and its metrics."""
        return self._scaled(algorithms.value_loss(self.algorithm, values, targets))

    def _scaled(self, part: tuple[Array, Metrics]) -> tuple[Array, Metrics]:
        return jax.tree.map(lambda x: x * self.num_minibatches, part)


def gradient_step(
    objective: Callable,
    optimizer: optax.GradientTransformation,
    params: Any,
    optimizer_state: optax.OptState,
    data: tuple,
    num_microbatches: int,
) -> tuple[Any, optax.OptState, Array, Metrics]:
    """One update of one model; none where its loss or gradient is not finite, or where there is no gradient.

    Returns:
      Parameters and optimiser's state, whether the update was refused for not being finite, and metrics.
    """
    loss, metrics, grads = accumulate(objective, params, data, num_microbatches)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    updates, new_state = optimizer.update(grads, optimizer_state, params)
    new = (optax.apply_updates(params, updates), new_state)
    kept = jax.tree.map(functools.partial(jnp.where, finite & (norm > 0)), new, (params, optimizer_state))
    return *kept, ~finite, metrics | {"grad_norm": norm}


def step_if(flag: Array, step: Callable, state: TrainState, base: nnx.State | None, data: tuple) -> tuple:
    """A step where the flag is set; the state as it is, and metrics of 0, where it is not."""
    _, shapes = jax.eval_shape(step, state, base, data)
    idle = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.cond(flag, step, lambda state, *_: (state, idle), state, base, data)


def count_tokens(batch: Trajectories) -> Array:
    """Those that are no padding, one at least."""
    return jnp.maximum(jnp.sum(batch.sequence_ids >= 0), 1)


def freeze(params: nnx.State, modules: frozenset[str]) -> nnx.State:
    """The parameters, those within a module of such a name cut off from the gradient."""

    def leaf(path: tuple, x: Array) -> Array:
        return x if modules.isdisjoint(getattr(key, "key", None) for key in path) else jax.lax.stop_gradient(x)

    return jax.tree_util.tree_map_with_path(leaf, params)


def _check_shared_trunk(algorithm: Algorithm) -> None:
    if algorithm.value_loss is None:
        raise ValueError(f"shared_trunk: {algorithm.name} has no critic")
    if algorithm.critic_updates > 1 or algorithm.critic_frozen:
        raise ValueError(
            f"shared_trunk: {algorithm.name} makes {algorithm.critic_updates} updates of its critic for one of the "
            f"policy and leaves {sorted(algorithm.critic_frozen)} of it untrained: it needs a trunk of its own"
        )
