"""Log-prob and entropy from hidden states, value and gradient, beside TRL's chunked kernel and whole logits."""

import functools
import json
import pathlib
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import measure, peers
from mpo_jax import kernels

TILES = (1024, 192)  # the default, and the widest whose temporaries are below 1 % at D = 1,024


def objective(logprobs_and_entropy, hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """A scalar whose gradient goes through log-probs and entropy alike."""
    logprobs, entropy = logprobs_and_entropy(hidden, head, targets)
    return jnp.sum(logprobs) + 0.01 * jnp.sum(entropy)


def by_tiles(tile: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The gradient of `objective` as a program."""
    kernel = functools.partial(kernels.linear_logprobs, tile=tile)
    return jax.jit(jax.grad(functools.partial(objective, kernel), (0, 1)))


def whole(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same with the logits [N,V] held."""
    return kernels.token_logprobs_and_entropy(jnp.matmul(hidden, head, preferred_element_type=jnp.float32), targets)


def trl(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's kernel as its GRPO trainer calls it, and its gradients."""
    outputs = ("log_probs", "entropy")
    found = peers.trl().chunked_logprobs(hidden, head, None, targets, 1.0, peers.TRL_CHUNK, None, 1.0, outputs)
    return torch.autograd.grad(found[0].sum() + 0.01 * found[1].sum(), (hidden, head))


def case(num_tokens: int, width: int, vocabulary: int, dtype: str, repeats: int) -> measure.Case:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(num_tokens, width)).astype(np.float32)
    head = rng.normal(size=(width, vocabulary)).astype(np.float32) / width**0.5
    targets = rng.integers(0, vocabulary, num_tokens)
    data = jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(targets, jnp.int32)
    programs = {f"mpo_jax, tiles of {tile:,}": by_tiles(tile).lower(*data).compile() for tile in TILES}
    ours = {name: functools.partial(program, *data) for name, program in programs.items()}
    beyond = {name: functools.partial(temporary_bytes, program) for name, program in programs.items()}
    tensors = [torch.tensor(x).to(getattr(torch, dtype)).requires_grad_() for x in (hidden, head.T.copy())]
    labels = torch.tensor(targets)
    results = sum(x.nbytes for x in data[:2])
    return measure.Case(
        f"linear log-probs N={num_tokens} D={width} V={vocabulary:,} {dtype}",
        ours | {"TRL, chunks": lambda: trl(*tensors, labels)},
        repeats,
        beyond | {"TRL, chunks": lambda: torch_peak_bytes(lambda: trl(*tensors, labels)) - results},
    )


def temporary_bytes(program: jax.stages.Compiled) -> int:
    return program.memory_analysis().temp_size_in_bytes


def torch_peak_bytes(contestant: Callable[[], object]) -> int:
    """Most that torch holds at once while it runs, results included, by its profiler's account."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        contestant()
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = [x for x in json.loads(trace.read_text())["traceEvents"] if x["name"] == "[memory]"]
    return int(np.cumsum([x["args"]["Bytes"] for x in sorted(events, key=lambda x: x["ts"])]).max())


def temporaries(head: tuple[int, int, int, str]) -> str:
    """What the compiled gradient needs beside inputs and results, by tiles and with whole logits; nothing is run."""
    num_tokens, width, vocabulary, dtype = head
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((num_tokens, width), (width, vocabulary))]
    shapes.append(jax.ShapeDtypeStruct((num_tokens,), jnp.int32))
    programs = {f"by tiles of {tile:,}": by_tiles(tile) for tile in TILES}
    programs["without"] = jax.jit(jax.grad(functools.partial(objective, whole), (0, 1)))
    sizes = {name: temporary_bytes(program.lower(*shapes).compile()) for name, program in programs.items()}
    said = ", ".join(f"{size / 1e6:,.1f} MB {name}" for name, size in sizes.items())
    return f"Temporaries as compiled, (N, D, V, dtype) = {head}: {said}."
