"""A program: three steps on one device and on meshes of eight; prints how far apart they end. Run by sharding_test."""

import contextlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from models import tiny

from mpo_jax import algorithms
from mpo_jax.models.actor_critic import Models
from mpo_jax.models.transformer import Critic, Transformer
from mpo_jax.training import sharding
from mpo_jax.training.state import Optimizers, TrainState
from mpo_jax.training.step import make_evaluate, make_train_step

ROWS, TOKENS = 8, 24
MESHES = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tensor": {"fsdp": 4, "tensor": 2},
    "all": dict(data=2, fsdp=2, tensor=2),
    "experts": dict(fsdp=2, tensor=2, expert=2),
}
DENSE, MOE = (
    tiny.config(num_layers=2, head_dim=8, mlp_width=32, scan_layers=True, remat="none", **more)
    for more in ({}, dict(num_experts=8, experts_per_token=2, expert_width=8))
)
CASES = [
    ("mpo", "fsdp", DENSE),
    ("mpo", "all", DENSE),
    ("grpo", "tensor", DENSE),
    ("vapo", "data", DENSE),
    ("mpo", "experts", MOE),
]


def drawn(make, config, seed):
    """A graph, and parameters drawn by numpy."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)
    return graph, jax.tree.map(lambda x: jnp.asarray((x.ndim == 1) + rng.normal(0, 0.3, x.shape), x.dtype), shapes)


def packed_batch():
    """Rows of two or three episodes of two turns, so that packing is of the batch; some rows end in padding."""
    rng = np.random.default_rng(0)
    rows = [[rng.integers(4, 64, n).tolist() for n in lengths] for lengths in [(10, 14), (8, 8, 6), (20,), (12, 9)] * 2]
    batch = tiny.lay_out(rows, TOKENS, sequences=3)
    ids, place = batch.sequence_ids, batch.positions
    halves = np.where(ids >= 0, 2 * ids + (place >= 5), -1)
    mask = (ids >= 0) & (place % 5 >= 2)
    last = mask & (np.roll(ids, -1, axis=1) != ids)
    return batch.replace(
        turn_ids=halves.astype(np.int32),
        state_ids=halves.astype(np.int32),
        action_mask=mask,
        executable_mask=mask,
        rewards=np.where(last, rng.integers(0, 2, ids.shape), 0).astype(np.float32),
        behavior_logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
        group_ids=np.where(batch.group_ids >= 0, np.arange(ROWS)[:, None] // 2, -1).astype(np.int32),
    )


def three_steps(name, config, sizes, microbatches):
    algorithm = algorithms.from_config(name)
    (policy, params), (critic, critic_params) = drawn(Transformer, config, 0), drawn(Critic, config, 1)
    models = Models(policy=policy, critic=critic)
    adam = Optimizers(policy=optax.adam(1e-3), critic=optax.adam(1e-3))
    has_critic = "critic" in algorithm.needs
    state = TrainState(
        step=jnp.int32(0),
        policy=params,
        critic=critic_params if has_critic else None,
        reference=jax.tree.map(jnp.copy, params) if "reference" in algorithm.needs else None,
        policy_optimizer=adam.policy.init(params),
        critic_optimizer=adam.critic.init(critic_params) if has_critic else None,
        skipped=jnp.int32(0),
        critic_best=jnp.float32(0.0),
        critic_stale=jnp.int32(0),
    )
    mesh = jax.set_mesh(sharding.make_mesh(**sizes)) if sizes else contextlib.nullcontext()
    with mesh:
        state = sharding.place_state(state)
        placement = jax.tree.map(lambda x: x.sharding, state)
        batch = sharding.place_rows(packed_batch())
        evaluate, step = make_evaluate(algorithm, models), make_train_step(algorithm, models, adam, microbatches)
        targets = jax.jit(lambda batch, judged: algorithms.targets(algorithm, batch, judged))(
            batch, evaluate(state, batch)
        )
        numbers = []
        for _ in range(3):
            state, metrics = step(state, batch, targets, True)
            numbers.append({key: float(value) for key, value in metrics.items()})
    if sizes:
        kept = jax.tree.map(lambda x, first: x.sharding.is_equivalent_to(first, x.ndim), state, placement)
        assert all(jax.tree.leaves(kept)), kept
    return jax.tree.map(np.asarray, (state.policy, state.critic, state.policy_optimizer)), numbers


def distance(found, expected):
    """‖a − b‖ / ‖b‖ over all arrays."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    return float(np.sqrt(sum(np.sum((a - b) ** 2.0) for a, b in pairs) / sum(np.sum(b**2.0) for _, b in pairs)))


def main():
    jax.config.update("jax_disable_most_optimizations", True)
    expected, report = {}, []
    for name, mesh, config in CASES:
        if (name, config) not in expected:
            expected[name, config] = three_steps(name, config, None, 1)
        state, numbers = three_steps(name, config, MESHES[mesh], 1)
        state_of_one, numbers_of_one = expected[name, config]
        losses = [
            abs(a[k] - b[k]) for a, b in zip(numbers, numbers_of_one, strict=True) for k in ("policy_loss", "grad_norm")
        ]
        case = f"{name} {mesh} {'moe' if config is MOE else 'dense'}"
        report.append({"case": case, "parameters": distance(state, state_of_one), "losses": max(losses)})
        report[-1]["moved"] = numbers_of_one[0]["grad_norm"]
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
