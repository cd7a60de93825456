"""A dense reward: the Progress Advantage of a fixed pair of models, at the end of every turn."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mpo_jax.kernels import progress_advantage
from mpo_jax.kernels.segments import Reduce, ends, segment_mean, spread
from mpo_jax.models.evaluation import token_logprobs
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.models.transformer import Transformer
from mpo_jax.types import Array, Trajectories

Shaping = Callable[[Trajectories], Trajectories]


def progress_rewards(
    batch: Trajectories,
    logprobs: Array,
    ref_logprobs: Array,
    *,
    coefficient: float,
    beta: float = 1.0,
    reduce: Reduce = segment_mean,
) -> Trajectories:
    """Adds c · β (reduce log π − reduce log π_ref) of each turn to the reward of the turn's last token.

    Where the pair's score is exactly A* = r + γ E V*(s') − V*(s), r + c A* is (1+c) r, shaped by the potential c V*:
    its optimum is that of r with the KL coefficient divided by 1 + c, and credit for the outcome comes turns earlier.
    For other pairs, and for a mean over tokens, no such thing holds; c is not published. See *Progress Advantage*
    (arXiv:2606.26080); on shaping, Ng, Harada and Russell (1999).

    Args:
      batch: of B rows.
      logprobs: [B,T] under the pair's policy, which is not the one in training.
      ref_logprobs: [B,T] under its reference.
      coefficient: c.
      beta: β.
      reduce: over the tokens of a turn.
    """

    def row(rewards: Array, *turns: Array) -> Array:
        _, _, ids, mask = turns
        scores = progress_advantage(*turns, reduce=reduce, beta=beta)
        return rewards + coefficient * jnp.where(ends(ids, mask), spread(scores, ids, mask), 0.0)

    return batch.replace(
        rewards=jax.vmap(row)(batch.rewards, logprobs, ref_logprobs, batch.turn_ids, batch.action_mask)
    )


def progress_shaping(policy: Pretrained, reference: Pretrained, *, coefficient: float, beta: float = 1.0) -> Shaping:
    """The function from a batch to one whose rewards are shaped by the pair; both models are frozen.

    Raises:
      ValueError: the models' vocabularies differ in size.
    """
    configs = policy.config, reference.config
    sizes = [config.vocab_size for config in configs]
    if len(set(sizes)) > 1:
        raise ValueError(f"dense rewards: a policy of {sizes[0]} token ids and a reference of {sizes[1]}")
    graphs = [nnx.split(nnx.eval_shape(lambda c=c: Transformer(c, rngs=nnx.Rngs(0))))[0] for c in configs]

    @jax.jit
    def shape(params: tuple[nnx.State, nnx.State], batch: Trajectories) -> Trajectories:
        found = [token_logprobs(nnx.merge(graph, p), batch)[0] for graph, p in zip(graphs, params, strict=True)]
        return progress_rewards(batch, *found, coefficient=coefficient, beta=beta)

    return functools.partial(shape, (policy.params, reference.params))
