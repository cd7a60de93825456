"""A live monitor: a reference model reads along, and every turn comes with its Progress Advantage."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpo_jax.kernels import linear_logprobs, progress_advantage
from mpo_jax.kernels.segments import Reduce, segment_mean
from mpo_jax.models.transformer import Cache, Transformer, TransformerConfig
from mpo_jax.rollout.protocol import Engine, Generation

Flag = Callable[[Sequence[float]], bool]


def mean_below(threshold: float, min_turns: int = 1) -> Flag:
    """Flags an episode whose mean over its turns so far, `min_turns` at least, is below a threshold."""
    return lambda scores: len(scores) >= min_turns and float(np.mean(scores)) < threshold


class MonitoredEngine:
    """An engine's turns, each with its `progress` β (reduce log π − reduce log π_ref) and whether `flag` flags it.

    π is the engine's policy, by the log-probs that it returns; π_ref keeps a KV cache of its own and reads each turn
    once, when it has ended. A turn that was cut scores 0. See *Progress Advantage* (arXiv:2606.26080).

    Attributes:
      num_slots, context_length, version, exact: the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        config: TransformerConfig,
        reference: nnx.State,
        *,
        flag: Flag,
        beta: float = 1.0,
        reduce: Reduce = segment_mean,
    ):
        """Makes room for the reference's cache; nothing is compiled before the first turn has ended.

        Args:
          engine: samples.
          config: of the reference.
          reference: its parameters.
          flag: the scores of an episode's turns so far -> whether it goes badly.
          beta: β.
          reduce: over the tokens of a turn.
        """
        self._engine, self._config, self._reference = engine, config, reference
        self._flag, self._beta, self._reduce = flag, beta, reduce
        self.num_slots, self.context_length = engine.num_slots, engine.context_length
        self._cache = Cache.empty(config, self.num_slots, self.context_length)
        self._waiting: dict[int, list[int]] = {}
        self._read_to = np.zeros(self.num_slots, np.int32)  # ids in the cache: all of the context but the last
        self._last: dict[int, list[int]] = {}
        self._scores: dict[int, list[float]] = {}

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def exact(self) -> bool:
        return self._engine.exact

    def load(self, params: Any, version: int) -> None:
        """Replaces the policy's weights; the reference stays."""
        self._engine.load(params, version)

    def free(self, slot: int) -> None:
        """Forgets the slot's context, in both models."""
        self._engine.free(slot)
        self._read_to[slot] = 0
        for kept in (self._waiting, self._last, self._scores):
            kept.pop(slot, None)

    def generate(self, new_tokens: dict[int, list[int]], seeds: dict[int, int]) -> dict[int, Generation]:
        """As the engine does; the turns that have ended come scored."""
        self._waiting |= new_tokens
        turns = self._engine.generate(new_tokens, seeds)
        return self._scored({slot: (self._waiting.pop(slot), turn) for slot, turn in turns.items()})

    def _scored(self, turns: Mapping[int, tuple[list[int], Generation]]) -> dict[int, Generation]:
        if not turns:
            return {}
        texts = {slot: [*self._last.get(slot, []), *news, *turn.tokens] for slot, (news, turn) in turns.items()}
        width = min(1 << (max(16, *map(len, texts.values())) - 1).bit_length(), self.context_length)
        tokens = np.zeros((self.num_slots, width + 1), np.int32)
        logprobs, counts = np.zeros((self.num_slots, width), np.float32), np.zeros(self.num_slots, np.int32)
        actions = np.zeros((self.num_slots, width), bool)
        for slot, ids in texts.items():
            turn, counts[slot] = turns[slot][1], len(ids) - 1
            tokens[slot, : len(ids)] = ids
            acted = slice(len(ids) - 1 - len(turn.tokens), len(ids) - 1)
            logprobs[slot, acted], actions[slot, acted] = turn.logprobs, turn.finish_reason == "stop"
        rows = tokens, self._read_to.copy(), counts, logprobs, actions
        self._cache, scores = _read_along(
            self._config, self._reduce, self._reference, self._cache, *rows, jnp.float32(self._beta)
        )
        self._read_to += counts
        self._last |= {slot: ids[-1:] for slot, ids in texts.items()}
        return {slot: self._with_score(slot, turn, float(scores[slot])) for slot, (_, turn) in turns.items()}

    def _with_score(self, slot: int, turn: Generation, score: float) -> Generation:
        scores = self._scores.setdefault(slot, [])
        scores.append(score)
        return dataclasses.replace(turn, progress=score, flagged=self._flag(scores))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _read_along(config, reduce, params, cache, tokens, starts, counts, logprobs, actions, beta):
    """The cache after each row has read counts[B] of tokens[B,W+1] from starts[B] on, and the scores [B] of its turn.

    logprobs[B,W] and actions[B,W] are of tokens[:, 1:].
    """
    graph = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]
    model, context = nnx.merge(graph, params), cache.length
    steps = jnp.arange(tokens.shape[1] - 1)[None, :]
    positions = jnp.where(steps < counts[:, None], starts[:, None] + steps, context)
    hidden, cache = model(tokens[:, :-1], positions, cache=cache)
    found, _ = linear_logprobs(hidden.reshape(-1, hidden.shape[-1]), model.head(), tokens[:, 1:].reshape(-1))
    score = functools.partial(progress_advantage, reduce=reduce, beta=beta, num_segments=1)
    return cache, jax.vmap(score)(logprobs, found.reshape(actions.shape), jnp.where(actions, 0, -1), actions)[:, 0]
