"""A mixture of experts: top-k routing, grouped matrix products, and what keeps the load even."""

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from mpo_jax.models.config import TransformerConfig
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

    Tokens are sorted by expert, so that each matrix product is one over ragged groups. See *Qwen3 Technical Report*
    (arXiv:2505.09388), section 2.
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
        c, shape = self.config, x.shape
        k = c.experts_per_token
        flat = x.reshape(-1, c.width)
        replay = None if replay is None else replay.reshape(-1, k)
        weights, routing = route(self.router(flat), k, c.renormalize_experts, replay)
        owners = jnp.maximum(routing.experts, 0).reshape(-1)  # a place without an expert has weight 0
        order = jnp.argsort(owners, stable=True)
        sizes = jnp.bincount(owners, length=c.num_experts)
        grouped = flat[order // k]
        gate = jax.lax.ragged_dot(grouped, self.expert_gate.get_value().astype(x.dtype), sizes)
        up = jax.lax.ragged_dot(grouped, self.expert_up.get_value().astype(x.dtype), sizes)
        down = jax.lax.ragged_dot(jax.nn.silu(gate) * up, self.expert_down.get_value().astype(x.dtype), sizes)
        by_token = down[jnp.argsort(order)].reshape(-1, k, c.width)
        mixed = jnp.einsum("nkd,nk->nd", by_token, weights.astype(x.dtype))
        return mixed.reshape(shape), jax.tree.map(lambda leaf: leaf.reshape(*shape[:-1], -1), routing)


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
