"""The embedded engine: samples one turn for many episodes at once, its KV cache kept over the turns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpo_jax.models.transformer import Cache, Transformer, TransformerConfig
from mpo_jax.rollout.protocol import Generation
from mpo_jax.types import Array


class Sampler:
    """Slots with a context each. `generate` appends what the environment said and samples the next turn of every slot.

    The sampled distribution is the model's own softmax (temperature 1, nothing cut off), so that the log-probability
    returned is the one that training recomputes. A token's randomness depends on its episode's seed and its position
    only, never on which other slots are alive.

    Attributes:
      num_slots: rows of the cache.
      context_length: C, most tokens that an episode may hold.
      max_turn_tokens: most tokens sampled in one turn.
      version: of the weights in use.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        num_slots: int,
        context_length: int,
        max_turn_tokens: int,
        end_of_turn: int,
        greedy: bool = False,
    ):
        self.num_slots, self.context_length = num_slots, context_length
        self.max_turn_tokens, self.end_of_turn = max_turn_tokens, end_of_turn
        self.version = -1
        self._contexts: list[list[int]] = [[] for _ in range(num_slots)]
        self._num_cached = np.zeros(num_slots, np.int32)
        self._cache = Cache.empty(config, num_slots, context_length)
        graph = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]
        draw = functools.partial(_draw, greedy)
        self._turn = jax.jit(functools.partial(_turn, graph, draw, max_turn_tokens, end_of_turn), donate_argnums=1)

    def load(self, params: nnx.State, version: int) -> None:
        """Takes new weights. What older ones read is stale: live contexts are read anew at their next turn."""
        self._params, self.version = params, version
        self._num_cached[:] = 0

    def free(self, slot: int) -> None:
        """Forgets the context of a slot."""
        self._contexts[slot], self._num_cached[slot] = [], 0

    def generate(self, new_tokens: dict[int, list[int]], seeds: dict[int, int]) -> dict[int, Generation]:
        """Appends ids to the context of each slot named and samples its next turn.

        Args:
          new_tokens: slot -> at least one id that the environment contributed.
          seeds: slot -> seed of the slot's episode.

        Returns:
          slot -> the sampled ids (the end-of-turn id included where it was sampled), their log-probabilities, and
          why it stopped.

        Raises:
          ValueError: no id to append, or a context that would not hold them and one more token.
        """
        for slot, ids in new_tokens.items():
            room = self.context_length - len(self._contexts[slot])
            if not 0 < len(ids) < room:
                raise ValueError(f"slot {slot}: {len(ids)} new tokens; expected 1 to {room - 1}, the room that is left")
        unread = {}
        for slot, ids in new_tokens.items():
            self._contexts[slot] += ids
            unread[slot] = self._contexts[slot][self._num_cached[slot] :]
        longest = max(map(len, unread.values()))
        width = min(1 << (max(longest, 16) - 1).bit_length(), self.context_length)
        tokens = np.zeros((self.num_slots, width), np.int32)
        counts, seed = np.zeros(self.num_slots, np.int32), np.zeros(self.num_slots, np.uint32)
        for slot, ids in unread.items():
            tokens[slot, : len(ids)], counts[slot], seed[slot] = ids, len(ids), seeds[slot] & 0xFFFFFFFF
        outputs = self._turn(self._params, self._cache, tokens, self._num_cached.copy(), counts, seed)
        self._cache = outputs[0]
        sampled, logprobs, number = (np.asarray(x) for x in outputs[1:])
        return {slot: self._finish(slot, sampled[slot], logprobs[slot], int(number[slot])) for slot in new_tokens}

    def _finish(self, slot: int, sampled: np.ndarray, logprobs: np.ndarray, number: int) -> Generation:
        self._contexts[slot] += sampled[:number].tolist()
        self._num_cached[slot] = len(self._contexts[slot]) - 1  # the last sampled token is not read yet
        stopped = sampled[number - 1] == self.end_of_turn
        return Generation(
            tokens=sampled[:number].tolist(),
            logprobs=logprobs[:number].tolist(),
            finish_reason="stop" if stopped else "length",
        )


def _draw(greedy: bool, logprobs: Array, keys: Array, positions: Array) -> Array:
    """One token a row from logprobs[B,V]: the inverse of the cumulative distribution at one uniform number."""
    if greedy:
        return jnp.argmax(logprobs, axis=-1).astype(jnp.int32)
    uniform = jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position)))(keys, positions)
    cumulative = jnp.cumsum(jnp.exp(logprobs), axis=-1)
    below = cumulative <= uniform[:, None] * cumulative[:, -1:]
    return jnp.minimum(below.sum(axis=-1), logprobs.shape[-1] - 1).astype(jnp.int32)


def _turn(graph, draw, max_turn_tokens, end_of_turn, params, cache, tokens, lengths, counts, seeds):
    """Reads tokens[B,N], of which counts[B] are real, after lengths[B] cached ones, and samples up to a turn.

    Returns:
      The cache with all but each row's last sampled token, the sampled ids and their log-probabilities [B,M], and how
      many were sampled [B]. Rows with a count of 0 idle.
    """
    model = nnx.merge(graph, params)
    head, context = model.head(), cache.keys[0].shape[1]
    keys = jax.vmap(jax.random.key)(seeds)
    rows, width = tokens.shape
    prompt_ends = lengths + counts
    room = jnp.minimum(context - prompt_ends, max_turn_tokens)

    def sample(hidden, step, sampled, logprobs, alive):
        distribution = jax.nn.log_softmax((hidden @ head).astype(jnp.float32))
        token = draw(distribution, keys, prompt_ends + step)
        chosen = jnp.take_along_axis(distribution, token[:, None], axis=-1)[:, 0]
        sampled = sampled.at[:, step].set(jnp.where(alive, token, 0))
        logprobs = logprobs.at[:, step].set(jnp.where(alive, chosen, 0.0))
        return token, sampled, logprobs, alive & (token != end_of_turn) & (step + 1 < room)

    def advance(carry):
        step, cache, token, sampled, logprobs, number, alive = carry
        positions = jnp.where(alive, prompt_ends + step, context)
        hidden, cache = model(token[:, None], positions[:, None], cache=cache)
        number += alive
        token, sampled, logprobs, alive = sample(hidden[:, 0], step + 1, sampled, logprobs, alive)
        return step + 1, cache, token, sampled, logprobs, number, alive

    steps = jnp.arange(width)[None, :]
    positions = jnp.where(steps < counts[:, None], lengths[:, None] + steps, context)
    hidden, cache = model(tokens, positions, cache=cache)
    hidden = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    active = counts > 0
    empty = jnp.zeros((rows, max_turn_tokens))
    token, sampled, logprobs, alive = sample(hidden, 0, empty.astype(jnp.int32), empty, active)
    carry = (0, cache, token, sampled, logprobs, active.astype(jnp.int32), alive)
    _, cache, _, sampled, logprobs, number, _ = jax.lax.while_loop(lambda c: c[-1].any(), advance, carry)
    return cache, sampled, logprobs, number
