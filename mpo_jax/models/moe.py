"""A mixture of experts: top-k routing, grouped matrix products, and what keeps the load even."""

import functools

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from mpo_jax.models.config import TransformerConfig
from mpo_jax.models.grouped import grouped_dot, permuted, sorted_places
from mpo_jax.models.mesh import ROWS
from mpo_jax.types import Array


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Routing:
    """Where the tokens of one layer, or of all layers stacked before the other axes, were sent.

    Attributes:
      probabilities: float32[…,E], the router's softmax over all experts.
      experts: int32[…,k], those that were used; −1 where replay named none.
    """

    probabilities: Array
    experts: Array


def route(
    logits: Array, experts_per_token: int, renormalize: bool, replay: Array | None = None
) -> tuple[Array, Routing]:
    """Weights of the k experts of each token: the largest of softmax(logits), divided by their sum if `renormalize`.

    Args:
      logits: [N,E].
      experts_per_token: k.
      renormalize: Hugging Face's `norm_topk_prob`.
      replay: int[N,k], experts to use instead; their weights are still this router's, so that it is trained. A row of
        −1 leaves the choice to the router, another −1 means no expert in that place. None leaves all to the router.

    Returns:
      Weights float32[N,k], 0 where there is no expert, and the routing.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    _, experts = jax.lax.top_k(probabilities, experts_per_token)
    if replay is not None:
        experts = jnp.where(jnp.all(replay < 0, axis=-1, keepdims=True), experts, replay.astype(experts.dtype))
    chosen = jnp.take_along_axis(probabilities, jnp.maximum(experts, 0), axis=-1)
    weights = jnp.where(experts >= 0, chosen, 0.0)
    if renormalize:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.maximum(total, jnp.finfo(weights.dtype).tiny)
    return weights, Routing(probabilities=probabilities, experts=experts)


class Experts(nnx.Module):
    """SwiGLU experts behind a router: y = Σ_{e ∈ top k} w_e down_e(silu(gate_e x) · up_e x).

    Tokens are sorted by expert, so that each matrix product is one over ragged groups. On a mesh each device routes its
    own rows; it has its own experts, of every row of its neighbours on the expert axis. No token is dropped. See *Qwen3
    Technical Report* (arXiv:2505.09388), section 2.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.router = nnx.Linear(c.width, c.num_experts, use_bias=False, rngs=rngs)
        draw = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        self.expert_gate = nnx.Param(draw(rngs.params(), (c.num_experts, c.width, c.expert_width)))
        self.expert_up = nnx.Param(draw(rngs.params(), (c.num_experts, c.width, c.expert_width)))
        self.expert_down = nnx.Param(draw(rngs.params(), (c.num_experts, c.expert_width, c.width)))

    def __call__(self, x: Array, replay: Array | None = None) -> tuple[Array, Routing]:
        """Of x[B,T,D], and replay int[B,T,k] as in `route`: the mixture [B,T,D] and the routing [B,T,…]."""
        c, mesh = self.config, jax.sharding.get_abstract_mesh()
        params = self.router.kernel, self.expert_gate, self.expert_up, self.expert_down
        params = tuple(param.get_value().astype(x.dtype) for param in params)
        if mesh.empty:
            weights, routing = self._route(x, replay, params[0])
            return mixture(x, weights, routing.experts, *params[1:]), routing
        if c.num_experts % mesh.shape["expert"]:
            raise ValueError(f"num_experts={c.num_experts} cannot be divided over expert={mesh.shape['expert']}")
        # As `training.sharding` has it: a dimension that its axis does not divide is whole on every device.
        width = "fsdp" if c.width % mesh.shape["fsdp"] == 0 else None
        hidden = "tensor" if c.expert_width % mesh.shape["tensor"] == 0 else None
        wide, narrow = P("expert", width, hidden), P("expert", hidden, width)
        # The kernels of `grouped_dot` do not say over which axes their results vary, so that cannot be checked.
        return jax.shard_map(
            functools.partial(self._on_device, gather=width is not None, add=hidden is not None),
            in_specs=(P(ROWS), P(ROWS), P(), wide, wide, narrow),
            out_specs=(P(ROWS), P(ROWS)),
            check_vma=False,
        )(x, replay, *params)

    def _route(self, x: Array, replay: Array | None, router: Array) -> tuple[Array, Routing]:
        """Weights [B,T,k] and routing [B,T,…] of x[B,T,D]."""
        c = self.config
        replay = None if replay is None else replay.reshape(-1, c.experts_per_token)
        found = route(x.reshape(-1, c.width) @ router, c.experts_per_token, c.renormalize_experts, replay)
        return jax.tree.map(lambda leaf: leaf.reshape(*x.shape[:-1], -1), found)

    def _on_device(self, x, replay, router, gate, up, down, *, gather: bool, add: bool) -> tuple[Array, Routing]:
        """The mixture of this device's rows, with the experts of all devices.

        Args:
          x, replay: its own rows.
          router: whole.
          gate, up, down: its own part of its own experts.
          gather: the experts' width is divided over the axis fsdp.
          add: their hidden layers are divided over the axis tensor, so that its devices add up.
        """
        weights, routing = self._route(x, replay, router)
        rows = x, weights, routing.experts
        x, weights, experts = (jax.lax.all_gather(leaf, "expert", axis=0, tiled=True) for leaf in rows)
        if gather:
            gate, up = (jax.lax.all_gather(leaf, "fsdp", axis=1, tiled=True) for leaf in (gate, up))
            down = jax.lax.all_gather(down, "fsdp", axis=2, tiled=True)
        experts = experts - jax.lax.axis_index("expert") * len(gate)
        mixed = mixture(x, weights, experts, gate, up, down)
        mixed = jax.lax.psum(mixed, "tensor") if add else mixed
        return jax.lax.psum_scatter(mixed, "expert", scatter_dimension=0, tiled=True), routing


def mixture(x: Array, weights: Array, experts: Array, gate: Array, up: Array, down: Array) -> Array:
    """Σ_j weights_j · down_e(silu(gate_e x) · up_e x), e = experts_j, over those of the k experts that are given.

    Args:
      x: [B,T,D].
      weights: [B,T,k].
      experts: int[B,T,k]; outside 0..E-1, an expert that is not among the given ones.
      gate, up, down: [E,D,F], [E,D,F], [E,F,D].

    Returns:
      [B,T,D].
    """
    number, k = len(gate), experts.shape[-1]
    experts = experts.reshape(-1)
    groups = jnp.where((experts >= 0) & (experts < number), experts, number)
    order, places = sorted_places(groups)
    sizes = jnp.bincount(groups, length=number + 1)
    grouped = permuted(jnp.repeat(x.reshape(-1, x.shape[-1]), k, axis=0), order, places)
    hidden = jax.nn.silu(grouped_dot(grouped, gate, sizes)) * grouped_dot(grouped, up, sizes)
    by_token = permuted(grouped_dot(hidden, down, sizes), places, order).reshape(*weights.shape, -1)
    return jnp.einsum("btkd,btk->btd", by_token, weights.astype(x.dtype))


def expert_load(routing: Routing, mask: Array) -> Array:
    """Fraction of the tokens under mask[B,T] that each expert was given, float32[E]; they add up to k."""
    number = routing.probabilities.shape[-1]
    sent = jax.nn.one_hot(routing.experts, number).sum(axis=-2)  # −1 is no expert's
    return _mean(sent, mask)


def load_balancing_loss(routing: Routing, mask: Array) -> Array:
    """E Σ_e f_e P_e, with f the load and P the mean probability of each expert, over the tokens of all layers.

    It is k where both are even. Gradients go through P alone. See *Switch Transformers* (arXiv:2101.03961), Eq. 4–6.

    Args:
      routing: leading axes [B,T] or [L,B,T].
      mask: bool[B,T], the tokens that count.
    """
    probabilities = _mean(routing.probabilities, mask)
    return probabilities.shape[-1] * jnp.sum(jax.lax.stop_gradient(expert_load(routing, mask)) * probabilities)


def router_metrics(routing: Routing, mask: Array) -> dict[str, Array]:
    """How even the routing of the tokens under mask[B,T] is.

    Returns:
      `max_load`: the busiest expert's load over that of an even one; `idle_experts`: fraction that got no token;
      `router_entropy`: mean entropy of the router, in nats.
    """
    load = expert_load(routing, mask)
    p = routing.probabilities
    entropy = -jnp.sum(p * jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny)), axis=-1)
    return {
        "max_load": jnp.max(load) / jnp.maximum(jnp.mean(load), jnp.finfo(load.dtype).tiny),
        "idle_experts": jnp.mean(load == 0),
        "router_entropy": _mean(entropy[..., None], mask)[0],
    }


def router_terms(routing: Routing, mask: Array, num_tokens: Array) -> dict[str, Array]:
    """`load_balancing_loss` and `router_metrics` of the tokens under mask[B,T], times their share of `num_tokens`.

    So those of microbatches add up; but what counts as an expert's load is its load in one of them.
    """
    found = {"load_balancing_loss": load_balancing_loss(routing, mask)} | router_metrics(routing, mask)
    return jax.tree.map(lambda x: x * jnp.sum(mask) / num_tokens, found)


def _mean(x: Array, mask: Array) -> Array:
    """Of x[…,B,T,E] over the tokens under mask[B,T] and over layers."""
    mask = jnp.broadcast_to(mask, x.shape[:-1])[..., None]
    axes = tuple(range(x.ndim - 1))
    return jnp.sum(jnp.where(mask, x, 0.0), axis=axes) / jnp.maximum(jnp.sum(mask), 1)
