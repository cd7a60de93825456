"""What the models say of tokens: the one place where "predicts the next token" is shifted to "concerns this token"."""

import jax.numpy as jnp

from mpo_jax.kernels import linear_logprobs
from mpo_jax.models.mesh import by_rows
from mpo_jax.models.moe import Routing
from mpo_jax.models.transformer import Critic, SharedCritic, Transformer
from mpo_jax.types import Array, Trajectories


def starts_of_sequences(batch: Trajectories) -> Array:
    """bool[B,T]: the first token of each sequence, which no prefix in its row predicts (padding included)."""
    return (batch.positions == 0) | (batch.sequence_ids < 0)


def token_logprobs(model: Transformer, batch: Trajectories) -> tuple[Array, Array]:
    """log π(tokens[t] | tokens[<t]) and the entropy of that distribution, each float32[B,T].

    Zero at the first token of a sequence and on padding.
    """
    return routed_logprobs(model, batch)[:2]


def routed_logprobs(
    model: Transformer, batch: Trajectories, experts: Array | None = None
) -> tuple[Array, Array, Routing | None]:
    """The same, and where the L layers with experts sent the tokens, leading axes [L,B,T]; None without experts.

    Args:
      model: the policy.
      batch: to be read.
      experts: int[B,T,L,k], experts to use; None leaves the choice to the routers.
    """
    hidden, routing = _read(model, batch, experts)
    return *_logprobs(model, hidden, batch), routing


def _read(model: Transformer, batch: Trajectories, experts: Array | None) -> tuple[Array, Routing | None]:
    """Hidden states [B,T,D] after each token, and the routing."""
    replay = None if experts is None else jnp.moveaxis(experts, 2, 0)
    hidden, _, routing = model.routed(batch.tokens, batch.positions, batch.sequence_ids, replay=replay)
    return hidden, routing


def _logprobs(model: Transformer, hidden: Array, batch: Trajectories) -> tuple[Array, Array]:
    rows, length, width = hidden.shape
    hidden = by_rows(hidden[:, :-1].reshape(-1, width), "tensor")  # where heads are divided, tokens are here
    logprobs, entropy = linear_logprobs(hidden, model.head(), batch.tokens[:, 1:].reshape(-1))
    unpredicted = starts_of_sequences(batch)[:, 1:]

    def shift(x):
        x = jnp.where(unpredicted, 0.0, x.reshape(rows, length - 1))
        return jnp.pad(x, ((0, 0), (1, 0)))

    return shift(logprobs), shift(entropy)


def prefix_values(critic: Critic, batch: Trajectories) -> tuple[Array, Array]:
    """V(tokens[<t]) float32[B,T], and V of each whole sequence float32[B,S].

    Zero at the first token of a sequence, where there is no prefix, and for absent sequences.
    """
    return _before(critic(batch.tokens, batch.positions, batch.sequence_ids), batch)


def shared_evaluation(
    model: Transformer, critic: SharedCritic, batch: Trajectories, experts: Array | None = None
) -> tuple[Array, Array, Routing | None, Array, Array]:
    """What `routed_logprobs` and `prefix_values` return, of one reading of the batch by the trunk that both share."""
    hidden, routing = _read(model, batch, experts)
    return *_logprobs(model, hidden, batch), routing, *_before(critic(hidden), batch)


def _before(after: Array, batch: Trajectories) -> tuple[Array, Array]:
    """Values [B,T] and final values [B,S], of values after each token."""
    after = after.astype(jnp.float32)
    before = jnp.pad(after[:, :-1], ((0, 0), (1, 0)))
    values = jnp.where(starts_of_sequences(batch), 0.0, before)
    slots = jnp.arange(batch.group_ids.shape[1])
    member = batch.sequence_ids[:, None, :] == slots[None, :, None]  # [B,S,T]
    last = jnp.max(jnp.where(member, jnp.arange(after.shape[1])[None, None, :], -1), axis=-1)
    final = jnp.take_along_axis(after, jnp.maximum(last, 0), axis=1)
    return values, jnp.where(last >= 0, final, 0.0)
