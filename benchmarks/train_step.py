"""The train step beside the same model, loss, clipping and AdamW in torch."""

from typing import Any

import numpy as np

from benchmarks.measure import Case

RATE, BETAS, EPSILON, DECAY, NORM, CLIP = 1e-4, (0.9, 0.99), 1e-8, 0.01, 1.0, 0.2


def episodes(rows: int, length: int, vocabulary: int) -> Any:
    """`Trajectories` of random ids, a turn each, with random log-probs of whoever sampled them."""
    from mpo_jax.training.batching import empty

    rng, batch = np.random.default_rng(0), empty(rows, length, 1)
    sampled = np.broadcast_to(np.arange(length) >= length // 4, (rows, length))
    zeros = np.zeros((rows, length), np.int32)
    return batch.replace(
        tokens=rng.integers(0, vocabulary, (rows, length)).astype(np.int32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
        sequence_ids=zeros,
        turn_ids=zeros,
        action_mask=sampled,
        executable_mask=sampled,
        state_ids=zeros,
        group_ids=np.zeros((rows, 1), np.int32),
    )


def constants(batch: Any) -> Any:
    """`Targets` with random advantages, old log-probs near those of a random policy, and a mean over tokens."""
    from mpo_jax.types import Targets

    rng, mask = np.random.default_rng(1), batch.action_mask
    weights = (mask / mask.sum()).astype(np.float32)
    normal = [np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32) for _ in range(2)]
    zeros = np.zeros(mask.shape, np.float32)
    old = np.where(mask, -7.6 + 0.1 * normal[1], 0).astype(np.float32)
    fields = {"advantages": normal[0], "old_logprobs": old, "weights": weights, "value_weights": weights}
    return Targets(returns=zeros, old_values=zeros, ref_logprobs=zeros, **fields)


def ours(config, params, batch, targets):
    """A function that takes one step of its own state and gives the loss."""
    import jax

    from mpo_jax import algorithms
    from mpo_jax.models.actor_critic import Models
    from mpo_jax.training.optimizers import make_optimizer
    from mpo_jax.training.state import Optimizers, initial_state
    from mpo_jax.training.step import make_train_step

    algorithm = algorithms.from_config("dapo", epsilon_low=CLIP, epsilon_high=CLIP)
    optimizer = make_optimizer("adamw", RATE, max_grad_norm=NORM, b2=BETAS[1], weight_decay=DECAY)
    optimizers = Optimizers(policy=optimizer, critic=optimizer)
    step = make_train_step(algorithm, Models.of(config), optimizers)
    state = [initial_state(config, params, algorithm, optimizers)]
    batch, targets = jax.device_put((batch, targets))

    def once() -> float:
        state[0], metrics = step(state[0], batch, targets, True)
        return float(metrics["policy_loss"])

    return once


def theirs(model, batch, targets):
    """The same in torch: the clipped surrogate of token ratios, whole logits, its own AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)
    tokens = torch.tensor(batch.tokens, dtype=torch.long)
    advantages, old, weights = (torch.tensor(x) for x in (targets.advantages, targets.old_logprobs, targets.weights))

    def once() -> float:
        logits = model(tokens, use_cache=False).logits[:, :-1]
        logprobs = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        ratio = torch.exp(logprobs.view(len(tokens), -1) - old[:, 1:])
        clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
        gain = torch.minimum(ratio * advantages[:, 1:], clipped * advantages[:, 1:])
        loss = -(weights[:, 1:] * gain).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        return loss.item()

    return once


def case(models: tuple[Any, Any, Any], rows: int, length: int, repeats: int) -> Case:
    """Both, after their first losses and those after two updates have been found equal."""
    model, config, params = models
    batch = episodes(rows, length, config.vocab_size)
    targets = constants(batch)
    steps = {"mpo_jax": ours(config, params, batch, targets), "torch": theirs(model, batch, targets)}
    for _ in range(3):
        found = [step() for step in steps.values()]
        np.testing.assert_allclose(*found, rtol=1e-3)
    return Case(f"tiny Llama, {rows} rows of {length} tokens", steps, repeats)
