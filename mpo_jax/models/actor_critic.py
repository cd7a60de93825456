"""Policy and critic as an update needs them: graphs, merged with whatever parameters they are asked about."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from mpo_jax.models import lora
from mpo_jax.models.evaluation import prefix_values, routed_logprobs, shared_evaluation
from mpo_jax.models.moe import Routing
from mpo_jax.models.transformer import Critic, SharedCritic, Transformer, TransformerConfig
from mpo_jax.types import Array, Trajectories


@dataclasses.dataclass(frozen=True)
class Models:
    """The static half of policy and critic: their graphs, to be merged with parameters inside a jitted function.

    Attributes:
      policy, critic: graphs.
      compute_dtype: that parameters are cast to before use; they, their gradients' sums and the optimiser's state keep
        their own.
      adapters: what parameters that stand beside a base are.
      router_replay: the policy's shape, where evaluation and updates use the experts that sampled, so that a ratio
        compares the same experts; of tokens whose episodes name none, updates use those of the evaluation. See *Group
        Sequence Policy Optimization* (arXiv:2507.18071), section 5.3. None leaves all to the routers.
      shared_trunk: coefficient of the value loss where the critic is a `SharedCritic` on the policy's trunk, which both
        losses then train; None where it has a trunk of its own.
    """

    policy: nnx.GraphDef
    critic: nnx.GraphDef
    compute_dtype: DTypeLike = jnp.float32
    adapters: lora.LoraConfig | None = None
    router_replay: TransformerConfig | None = None
    shared_trunk: float | None = None

    @classmethod
    def of(cls, config: TransformerConfig, *, shared_trunk: float | None = None) -> "Models":
        """The graphs of a shape."""
        kinds = Transformer, Critic if shared_trunk is None else SharedCritic
        policy, critic = (nnx.eval_shape(lambda make=make: make(config, rngs=nnx.Rngs(0))) for make in kinds)
        return cls(policy=nnx.graphdef(policy), critic=nnx.graphdef(critic), shared_trunk=shared_trunk)

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
        return routed_logprobs(nnx.merge(self.policy, self._cast(self.whole(params, base))), batch, experts)

    def values(self, params: nnx.State, batch: Trajectories, base: nnx.State | None = None) -> tuple[Array, Array]:
        """Values [B,T] and final values [B,S] under parameters of a critic with a trunk of its own, or its adapters."""
        base = None if base is None else lora.critic_base(base)
        return prefix_values(nnx.merge(self.critic, self._cast(self.whole(params, base))), batch)

    def both(
        self,
        policy: nnx.State,
        critic: nnx.State,
        batch: Trajectories,
        base: nnx.State | None = None,
        experts: Array | None = None,
    ) -> tuple[Array, Array, Routing | None, Array, Array]:
        """What `routed` and `values` return; where the trunk is shared, of one reading of the batch."""
        if self.shared_trunk is None:
            return *self.routed(policy, batch, base, experts), *self.values(critic, batch, base)
        model = nnx.merge(self.policy, self._cast(self.whole(policy, base)))
        return shared_evaluation(model, nnx.merge(self.critic, self._cast(critic)), batch, experts)

    def whole(self, params: nnx.State, base: nnx.State | None) -> nnx.State:
        """The parameters themselves, or the base with them merged into it as adapters."""
        return params if base is None else lora.merge(self.adapters, base, params)

    def _cast(self, params: nnx.State) -> nnx.State:
        return jax.tree.map(lambda x: x.astype(self.compute_dtype), params)


def shared_critic_params(config: TransformerConfig) -> nnx.State:
    """A critic on the policy's trunk, whose value starts as zero."""
    return nnx.state(SharedCritic(config, rngs=nnx.Rngs(0)))


def whole_critic(policy: nnx.State, critic: nnx.State) -> nnx.State:
    """A critic on the policy's trunk as one with a trunk of its own, to be saved; adapters beside a base likewise."""
    trunk = nnx.to_flat_state(lora.critic_base(policy))
    return nnx.from_flat_state([*trunk, *nnx.to_flat_state(critic)])
