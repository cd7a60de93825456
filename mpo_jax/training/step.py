"""One train step for every algorithm: evaluate once a batch, then gradient steps on its minibatches."""

import dataclasses
import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from mpo_jax import algorithms
from mpo_jax.algorithms import Algorithm
from mpo_jax.models import lora
from mpo_jax.models.evaluation import prefix_values, routed_logprobs
from mpo_jax.models.mesh import by_rows
from mpo_jax.models.moe import Routing, router_terms
from mpo_jax.models.pretrained import critic_params
from mpo_jax.models.transformer import Critic, Transformer, TransformerConfig
from mpo_jax.training import sharding
from mpo_jax.types import Array, Evaluation, Targets, Trajectories

Metrics = dict[str, Array]


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
class Models:
    """The static half of policy and critic: their graphs, to be merged with parameters inside a jitted function.

    Attributes:
      policy, critic: graphs.
      compute_dtype: that parameters are cast to before use; they, their gradients' sums and the optimiser's state keep
        their own.
      adapters: what parameters that stand beside a base are.
      router_replay: an update uses the experts that the policy chose when its batch was evaluated, so that a ratio
        compares the same experts. See *Group Sequence Policy Optimization* (arXiv:2507.18071), section 5.3.
    """

    policy: nnx.GraphDef
    critic: nnx.GraphDef
    compute_dtype: DTypeLike = jnp.float32
    adapters: lora.LoraConfig | None = None
    router_replay: bool = False

    @classmethod
    def of(cls, config: TransformerConfig) -> "Models":
        """The graphs of a shape."""
        policy, critic = (
            nnx.eval_shape(lambda make=make: make(config, rngs=nnx.Rngs(0))) for make in (Transformer, Critic)
        )
        return cls(policy=nnx.graphdef(policy), critic=nnx.graphdef(critic))

    @classmethod
    def create(cls, config: TransformerConfig, seed: int) -> tuple["Models", nnx.State, nnx.State]:
        """Graphs, and freshly initialised policy and critic parameters."""
        policy, policy_params = nnx.split(Transformer(config, rngs=nnx.Rngs(seed)))
        critic, critic_params = nnx.split(Critic(config, rngs=nnx.Rngs(seed + 1)))
        return cls(policy=policy, critic=critic), policy_params, critic_params

    def logprobs(self, params: nnx.State, batch: Trajectories, base: nnx.State | None = None) -> tuple[Array, Array]:
        """Log-probabilities and entropies [B,T] under policy parameters, or under adapters beside a base."""
        return self.routed(params, batch, base)[:2]

    def routed(
        self, params: nnx.State, batch: Trajectories, base: nnx.State | None = None, experts: Array | None = None
    ) -> tuple[Array, Array, Routing | None]:
        """The same and the routing, with the experts [B,T,L,k] that must be used, if any."""
        return routed_logprobs(nnx.merge(self.policy, self._cast(self._whole(base, params))), batch, experts)

    def values(self, params: nnx.State, batch: Trajectories, base: nnx.State | None = None) -> tuple[Array, Array]:
        """Values [B,T] and final values [B,S] under critic parameters, or under adapters beside the policy's base."""
        base = None if base is None else lora.critic_base(base)
        return prefix_values(nnx.merge(self.critic, self._cast(self._whole(base, params))), batch)

    def policy_params(self, state: TrainState) -> nnx.State:
        """The policy's parameters as an engine takes them, adapters merged into their base."""
        return self._whole(state.base, state.policy)

    def _whole(self, base: nnx.State | None, params: nnx.State) -> nnx.State:
        return params if base is None else lora.merge(self.adapters, base, params)

    def _cast(self, params: nnx.State) -> nnx.State:
        return jax.tree.map(lambda x: x.astype(self.compute_dtype), params)


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """How policy and critic are updated."""

    policy: optax.GradientTransformation
    critic: optax.GradientTransformation


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
) -> TrainState:
    """The state before the first step: policy and reference are the warm start, the critic's trunk too.

    Everything is a copy of its own, since the train step is given its buffers.

    Args:
      config, params: of the warm start.
      algorithm: says whether there are a critic and a reference.
      optimizers: of what is trained.
      adapters: what is trained in place of the parameters, if anything.
      seed: of the adapters.
    """

    def copy() -> nnx.State:
        return jax.tree.map(jnp.copy, params)

    critic = critic_params(config, copy()) if "critic" in algorithm.needs else None
    policy, base, reference = copy(), None, copy() if "reference" in algorithm.needs else None
    if adapters is not None:
        base, reference, keys = policy, None, jax.random.split(jax.random.key(seed))
        policy = lora.init(adapters, params, keys[0])
        critic = None if critic is None else lora.init(adapters, critic, keys[1])
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


def split_rows(tree, num_microbatches: int):
    """[B, …] leaves to [M, B/M, …]; microbatch m has rows m, m+M, …, so that every device keeps its own rows."""
    return jax.tree.map(lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), tree)


def join_rows(tree):
    """Undoes `split_rows`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)


def select_rows(tree, rows: Array):
    """Some rows of [B, …] leaves, divided over the devices again."""
    return jax.tree.map(lambda x: by_rows(x[rows]), tree)


def make_evaluate(algorithm: Algorithm, models: Models, num_microbatches: int = 1) -> Callable:
    """The function (state, batch) -> `Evaluation`, evaluated a microbatch at a time."""

    def evaluate_rows(state: TrainState, batch: Trajectories) -> Evaluation:
        logprobs, entropy, routing = models.routed(state.policy, batch, state.base)
        values, final_values = jnp.zeros_like(logprobs), jnp.zeros(batch.group_ids.shape)
        if algorithm.value_loss is not None:
            values, final_values = models.values(state.critic, batch, state.base)
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
            experts=jnp.moveaxis(routing.experts, 0, 2) if models.router_replay else None,
        )

    def evaluate(state: TrainState, batch: Trajectories) -> Evaluation:
        parts = jax.lax.map(functools.partial(evaluate_rows, state), split_rows(batch, num_microbatches))
        return join_rows(parts)

    return jax.jit(evaluate)


def accumulate(
    loss: Callable, params: nnx.State, data: tuple, num_microbatches: int
) -> tuple[Array, Metrics, nnx.State]:
    """A loss that is a weighted sum over rows, its metrics and its gradient, summed over microbatches: exactly."""
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def one(_, rows):
        (value, metrics), grads = value_and_grad(params, *rows)
        return None, (value, metrics, grads)

    if num_microbatches == 1:
        (value, metrics), grads = value_and_grad(params, *data)
        return value, metrics, grads
    # Summed in the carry, so that one gradient is alive at a time.
    first = jax.eval_shape(lambda: one(None, jax.tree.map(lambda x: x[0], split_rows(data, num_microbatches)))[1])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)

    def add(total, rows):
        return jax.tree.map(jnp.add, total, one(None, rows)[1]), None

    (value, metrics, grads), _ = jax.lax.scan(add, zeros, split_rows(data, num_microbatches))
    return value, metrics, grads


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
    name, for a policy with experts.
    """

    def policy_objective(base, num_tokens, params, batch: Trajectories, targets: Targets):
        logprobs, _, routing = models.routed(params, batch, base, targets.experts)
        loss, metrics = algorithms.policy_loss(algorithm, logprobs, batch, targets)
        loss, metrics = loss * num_minibatches, jax.tree.map(lambda x: x * num_minibatches, metrics)
        if routing is not None:
            found = router_terms(routing, batch.sequence_ids >= 0, num_tokens)
            loss, metrics = loss + load_balancing * found["load_balancing_loss"], metrics | found
        return loss, metrics

    def value_objective(base, params, batch: Trajectories, targets: Targets):
        values, _ = models.values(freeze(params, algorithm.critic_frozen), batch, base)
        loss, metrics = algorithms.value_loss(algorithm, values, targets)
        return loss * num_minibatches, jax.tree.map(lambda x: x * num_minibatches, metrics)

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

    def step_if(flag: Array, step: Callable, state: TrainState, base: nnx.State | None, data: tuple):
        _, shapes = jax.eval_shape(step, state, base, data)
        idle = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.cond(flag, step, lambda state, *_: (state, idle), state, base, data)

    def train_step(state: TrainState, batch: Trajectories, targets: Targets, update_policy: Array):
        base, data, value_metrics = state.base, (batch, targets), {}
        state = state.replace(base=None)  # read by what follows, but carried through none of it
        for _ in range(algorithm.critic_updates if algorithm.value_loss is not None else 0):
            if critic_patience is None:
                state, value_metrics = step_critic(state, base, data)
            else:
                state, value_metrics = step_if(state.critic_stale < critic_patience, step_critic, state, base, data)
        state, metrics = step_if(update_policy, step_policy, state, base, data)
        return sharding.constrained(state.replace(base=base)), value_metrics | metrics

    return jax.jit(train_step, donate_argnums=0)
