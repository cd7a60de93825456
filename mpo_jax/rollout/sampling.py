"""What a sampler compiles: slots that read what they were told, and slots that sample."""

import functools

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from mpo_jax.models import transposed
from mpo_jax.models.moe import Routing
from mpo_jax.models.transformer import Transformer, TransformerConfig
from mpo_jax.rollout.decoding import draw, likeliest, reshape
from mpo_jax.types import Array


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Rows:
    """What is to be sampled, N rows: in which slot, after which id, not yet read, at which position, how many at most.

    Slot B is none; of N = B rows each is in the slot of its number.
    """

    slots: Array
    tokens: Array
    positions: Array
    room: Array
    seeds: Array
    stop_ids: Array
    temperature: Array
    top_k: Array
    top_p: Array


@functools.cache
def graph_of(config: TransformerConfig, is_transposed: bool) -> nnx.GraphDef:
    """One object a config, so that samplers of one config share what is compiled."""
    if is_transposed:
        return transposed.graph_of(config)
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]


def _compact(routing: Routing | None, id_type: str | None) -> Array | None:
    """unsigned[B,T,L·k]: the experts that read each token, where they are asked for."""
    if id_type is None:
        return None
    experts = jnp.moveaxis(routing.experts, 0, 2)
    return experts.reshape(*experts.shape[:2], -1).astype(id_type)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def read(graph, id_type, params, cache, rows, tokens, starts, counts):
    """The cache after rows[N] have read counts[N] of tokens[N,W] from starts[N] on; row B is none, of N = B all are.

    Where `id_type` says how experts are written, also those of each token, [N,W,L·k]; None otherwise.
    """
    steps = jnp.arange(tokens.shape[1])[None, :]
    positions = jnp.where(steps < counts[:, None], starts[:, None] + steps, cache.length)
    _, part, routing = nnx.merge(graph, params).routed(tokens, positions, cache=cache.take(rows))
    return cache.put(rows, part), _compact(routing, id_type)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def sample(graph, id_type, width, params, cache, rows, steps, may_be_left):
    """Reads each row's last id and samples the next, until at most `may_be_left` rows go on, or `steps` times.

    Returns:
      The cache with all but each row's last sampled token, the sampled ids and their log-probabilities [N,width], how
      many were sampled [N], and the experts that read the token before each, [N,width,L·k], as for `read`.
    """
    model = nnx.merge(graph, params)
    head, context, number_of_rows = model.head(), cache.length, len(rows.slots)
    plain = ((rows.temperature == 1) & (rows.top_k == 0) & (rows.top_p == 1)).all()
    greedy = ((rows.temperature == 0) | (rows.room == 0)).all()

    def draw_all(logits, positions):
        return draw(logits, rows.seeds, positions)

    def draw_each(logits, positions):
        return draw_all(reshape(logits, rows.temperature, rows.top_k, rows.top_p), positions)

    def take_likeliest(logits, positions):
        return likeliest(logits)

    def advance(carry):
        step, cache, token, sampled, logprobs, number, experts, alive = carry
        positions = jnp.where(alive, rows.positions + step, context)
        hidden, cache, routing = model.routed(token[:, None], positions[:, None], cache=cache)
        logits = (hidden[:, 0] @ head).astype(jnp.float32)
        # All three say the same of a row, so that its company does not matter; to draw costs more than to look.
        way = jnp.where(greedy, 2, jnp.where(plain, 1, 0))
        token = jax.lax.switch(way, (draw_each, draw_all, take_likeliest), logits, rows.positions + step + 1)
        chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
        sampled = sampled.at[:, step].set(jnp.where(alive, token, 0))
        logprobs = logprobs.at[:, step].set(jnp.where(alive, chosen, 0.0))
        if id_type is not None:
            experts = experts.at[:, step].set(_compact(routing, id_type)[:, 0])
        number += alive
        stopped = (token[:, None] == rows.stop_ids).any(axis=1)
        alive = alive & ~stopped & (step + 1 < rows.room)
        return step + 1, cache, token, sampled, logprobs, number, experts, alive

    def goes_on(carry):
        return (carry[0] < steps) & (carry[-1].sum() > may_be_left)

    empty, number = jnp.zeros((number_of_rows, width)), jnp.zeros(number_of_rows, jnp.int32)
    choices = model.config.expert_layers * model.config.experts_per_token
    experts = None if id_type is None else jnp.zeros((number_of_rows, width, choices), id_type)
    carry = (0, cache.take(rows.slots), rows.tokens, empty.astype(jnp.int32), empty, number, experts, rows.room > 0)
    _, part, _, sampled, logprobs, number, experts, _ = jax.lax.while_loop(goes_on, advance, carry)
    return cache.put(rows.slots, part), sampled, logprobs, number, experts
