"""Turn-level clipped loss and its gradient beside verl's GSPO loss, and beside the least that memory can do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import measure, peers, rows
from mpo_jax import kernels

FLOOR_BYTES = (
    20  # a token's log-probs, old and new, advantage and id are read, its gradient is written: 5 times 4 bytes
)


@jax.jit
@jax.value_and_grad
def turn_loss(logprobs, old_logprobs, advantages, turn_ids, action_mask, weights, ranges=None):
    """MPO's loss: a turn's ratio, clipped, and the weights of a token mean; `ranges` of the turns make it faster."""

    def ratio(logprobs, old_logprobs, turn_ids, action_mask, ranges):
        reduce = kernels.segment_sum if ranges is None else kernels.range_sum(*ranges)
        return kernels.importance_ratio(logprobs, old_logprobs, turn_ids, action_mask, reduce=reduce)

    ratio = jax.vmap(ratio)(logprobs, old_logprobs, turn_ids, action_mask, ranges)
    objective = kernels.clipped_surrogate(ratio, advantages, epsilon_low=0.2, epsilon_high=0.2)
    return -jnp.sum(weights * objective)


@functools.partial(jax.jit, static_argnums=2)
def find_ranges(turn_ids: jax.Array, action_mask: jax.Array, num_turns: int) -> tuple[jax.Array, jax.Array]:
    """First and last token of every turn [B,K]: once a batch, for all its epochs and minibatches."""
    return jax.vmap(lambda ids, mask: kernels.segment_ranges(ids, mask, num_turns))(turn_ids, action_mask)


def verl_loss(logprobs: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Value and gradient of verl's GSPO loss."""
    config = peers.ActorConfig(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None)
    logprobs.grad = None
    old_logprobs, advantages, mask = rest
    peers.verl().compute_policy_loss_gspo(old_logprobs, logprobs, advantages, mask, config=config)[0].backward()
    return logprobs.grad


def case(num_rows: int, length: int, repeats: int) -> measure.Case:
    batch = rows.draw(num_rows, length)
    names = ("logprobs", "old_logprobs", "advantages", "turn_ids", "action_mask")
    data = [jnp.asarray(batch[name]) for name in names]
    weights = kernels.token_mean(data[4], data[3], jnp.zeros_like(data[3]))
    num_turns = -(-int(batch["turn_ids"].max() + 1) // 32) * 32
    ranges = find_ranges(*data[3:], num_turns)
    tensors = [torch.tensor(batch[name]) for name in names[:3]] + [torch.tensor(batch["action_mask"]).float()]
    tensors[0].requires_grad_()
    moved = np.ones(num_rows * length * FLOOR_BYTES // 2, np.uint8)  # a copy reads and writes each of its bytes
    copy = np.zeros_like(moved)
    return measure.Case(
        f"turn loss, value and gradient [{num_rows},{length}]",
        {
            "mpo_jax, turn ratio over known ranges": lambda: turn_loss(*data, weights, ranges),
            "mpo_jax, turn ratio": lambda: turn_loss(*data, weights),
            f"mpo_jax, ranges of ≤ {num_turns} turns, once a batch": lambda: find_ranges(*data[3:], num_turns),
            "verl, GSPO": lambda: verl_loss(*tensors),
            f"copy of {FLOOR_BYTES} B a token": lambda: np.copyto(copy, moved),
        },
        repeats,
    )
