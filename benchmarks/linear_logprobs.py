"""Log-prob and entropy from hidden states, value and gradient, beside TRL's chunked kernel and whole logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import measure, peers
from mpo_jax import kernels


def objective(logprobs_and_entropy, hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """A scalar whose gradient goes through log-probs and entropy alike."""
    logprobs, entropy = logprobs_and_entropy(hidden, head, targets)
    return jnp.sum(logprobs) + 0.01 * jnp.sum(entropy)


def whole(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same with the logits [N,V] held."""
    return kernels.token_logprobs_and_entropy(jnp.matmul(hidden, head, preferred_element_type=jnp.float32), targets)


def trl(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's kernel as its GRPO trainer calls it, and its gradients."""
    hidden.grad = head.grad = None
    outputs = ("log_probs", "entropy")
    found = peers.trl().chunked_logprobs(hidden, head, None, targets, 1.0, peers.TRL_CHUNK, None, 1.0, outputs)
    (found[0].sum() + 0.01 * found[1].sum()).backward()
    return hidden.grad, head.grad


def case(num_tokens: int, width: int, vocabulary: int, dtype: str, repeats: int) -> measure.Case:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(num_tokens, width)).astype(np.float32)
    head = rng.normal(size=(width, vocabulary)).astype(np.float32) / width**0.5
    targets = rng.integers(0, vocabulary, num_tokens)
    data = jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(targets, jnp.int32)
    ours = jax.jit(jax.grad(functools.partial(objective, kernels.linear_logprobs), (0, 1)))
    tensors = [torch.tensor(x).to(getattr(torch, dtype)).requires_grad_() for x in (hidden, head.T.copy())]
    labels = torch.tensor(targets)
    return measure.Case(
        f"linear log-probs N={num_tokens} D={width} V={vocabulary:,} {dtype}",
        {"mpo_jax, tiles": lambda: ours(*data), "TRL, chunks": lambda: trl(*tensors, labels)},
        repeats,
        result_bytes=sum(x.nbytes for x in data[:2]),
    )


def temporaries(head: tuple[int, int, int, str]) -> str:
    """What the compiled gradient needs beside inputs and results, by tiles and with whole logits; nothing is run."""
    num_tokens, width, vocabulary, dtype = head
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((num_tokens, width), (width, vocabulary))]
    shapes.append(jax.ShapeDtypeStruct((num_tokens,), jnp.int32))
    programs = (jax.jit(jax.grad(functools.partial(objective, f), (0, 1))) for f in (kernels.linear_logprobs, whole))
    tiles, logits = (f.lower(*shapes).compile().memory_analysis().temp_size_in_bytes / 1e6 for f in programs)
    return f"Temporaries as compiled, (N, D, V, dtype) = {head}: {tiles:,.1f} MB by tiles, {logits:,.1f} MB without."
