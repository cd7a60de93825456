"""Every family against `transformers` in float64: log-probs, entropy, gradients, the cache; padded and packed."""

import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import peers, tiny
from mpo_jax.models import huggingface, layout
from mpo_jax.models.evaluation import token_logprobs
from mpo_jax.models.rope import LinearScaling, Llama3Scaling, YarnScaling
from mpo_jax.models.transformer import Cache

torch = peers.torch
RNG = np.random.default_rng(0)
LONG, SHORT = (RNG.integers(0, 61, n).tolist() for n in (9, 6))
# Long alone with padding left of it, short with padding right of it, and both packed with one blank between them.
BATCH = tiny.lay_out([[*[None] * 7, LONG], [SHORT, *[None] * 10], [LONG, None, SHORT]], 16, sequences=2)
SPANS = ((0, 7, LONG), (1, 0, SHORT), (2, 0, LONG), (2, 10, SHORT))
MIX = RNG.normal(size=(2, 3, 16)).astype(np.float32)  # what a loss makes of log-probs and entropies
ALL = pytest.mark.parametrize("name", peers.FAMILIES)


@functools.cache
def load(name):
    return huggingface.load(pathlib.Path(peers.folder(name)))


@functools.cache
def expected(name):
    """Log-probs and entropies [B,T] in float64, each sequence alone and unpadded, and the gradient of their mix."""
    model = peers.model(name).double()
    model.zero_grad()
    found = np.zeros((2, 3, 16))
    total = 0.0
    for row, start, sequence in SPANS:
        log_p = model(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
        chosen = log_p.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        span = slice(start + 1, start + len(sequence))
        for kind, x in enumerate((chosen, entropy)):
            found[kind, row, span] = x.detach().numpy()
            total = total + (torch.tensor(MIX[kind, row, span]) * x).sum()
    total.backward()
    gradients = {key: x.grad.numpy() for key, x in model.named_parameters()}
    peers.model(name).float()
    return found, gradients


def close(found, expected, message=""):
    """To 1e-5 of the largest entry."""
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.max(np.abs(expected)), err_msg=message)


@functools.partial(jax.jit, static_argnums=0, compiler_options=tiny.QUICK)
def mixed(config, params, batch):
    def loss(params):
        found = jnp.stack(token_logprobs(nnx.merge(tiny.graph(config), params), batch))
        return jnp.sum(found * MIX), found

    return jax.value_and_grad(loss, has_aux=True)(params)


@ALL
def test_bug_087_119_121_123_padded_and_packed_logprobs_entropies_and_gradients(name):
    config, params = load(name)
    (_, found), gradients = mixed(config, params, BATCH)
    outputs, theirs = expected(name)
    close(found, outputs)
    for parameter, gradient in layout.names(gradients).items():
        for key, x in layout.huggingface(config, parameter).split(np.asarray(gradient)).items():
            close(x, gradient_of(theirs, key), key)


def gradient_of(gradients, key):
    """Of a tensor by its name in a file; in memory `transformers` holds the experts stacked and gate over up."""
    if key in gradients:
        return gradients[key]
    prefix, rest = key.split("experts.")
    expert, kind, _ = rest.split(".")
    if kind == "down_proj":
        return gradients[f"{prefix}experts.down_proj"][int(expert)]
    both = gradients[f"{prefix}experts.gate_up_proj"][int(expert)]
    return np.split(both, 2)[kind == "up_proj"]


@functools.partial(jax.jit, static_argnums=0, compiler_options=tiny.QUICK)
def cached(config, params, tokens):
    """Logits of a row read 5 tokens at a time."""
    model, cache, logits = nnx.merge(tiny.graph(config), params), Cache.empty(config, 1, 12), []
    for start in range(0, tokens.shape[1], 5):
        piece = tokens[:, start : start + 5]
        hidden, cache = model(piece, start + jnp.arange(piece.shape[1])[None], cache=cache)
        logits.append(hidden @ model.head())
    return jnp.concatenate(logits, axis=1)


@ALL
def test_the_cache_gives_the_logits_of_the_whole(name):
    config, params = load(name)
    with torch.no_grad():
        theirs = peers.model(name).double()(torch.tensor([LONG])).logits.numpy()
    peers.model(name).float()
    close(cached(config, params, np.array([LONG], np.int32)), theirs)


@pytest.mark.parametrize(
    ("scaling", "theta", "fields"),
    [
        (LinearScaling(4.0), 1e4, {"rope_type": "linear", "factor": 4.0}),
        (
            Llama3Scaling(8.0, 1.0, 4.0, 8192),
            5e5,
            peers.LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 8192},
        ),
        (YarnScaling(4.0, 32768), 1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
        (
            YarnScaling(16.0, 4096, beta_fast=20.0, beta_slow=2.0, attention_factor=1.5, truncate=False),
            1e4,
            {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "attention_factor": 1.5,
                "truncate": False,
            },
        ),
    ],
    ids=["linear", "llama3.1", "qwen3_yarn", "yarn_untruncated"],
)
def test_bug_129_stretched_frequencies_of_real_sizes(scaling, theta, fields):
    config = peers.transformers.LlamaConfig(head_dim=128, rope_parameters={"rope_theta": theta} | fields)
    theirs, magnitude = peers.transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, "cpu")
    found = scaling.stretch(theta ** (-np.arange(64, dtype=np.float32) / 64), theta)
    np.testing.assert_allclose(found, theirs.numpy(), rtol=2e-6)
    np.testing.assert_allclose(scaling.magnitude, magnitude, rtol=1e-12)


SHARDED = """
import functools, pathlib, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 8)
from models import parity_test as parity, tiny
from mpo_jax.models import huggingface, layout
name, folder = sys.argv[1:]
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("expert", "fsdp"))
def sharding(name, shape):
    spec = P("expert", "fsdp") if len(shape) == 3 else P("fsdp") if shape[0] % 4 == 0 else P()
    return NamedSharding(mesh, spec)
config, params = huggingface.load(pathlib.Path(folder), sharding=sharding)
_, whole = huggingface.load(pathlib.Path(folder))
rows = jax.tree.map(lambda x: np.concatenate([x] * 3)[:8], parity.BATCH)
parity.MIX = np.concatenate([parity.MIX] * 3, axis=1)[:, :8]
placed = jax.device_put(rows, NamedSharding(mesh, P(("expert", "fsdp"))))
(_, found), gradients = parity.mixed(config, params, placed)
assert len(found.sharding.device_set) == 8
(_, one), plain = parity.mixed(config, whole, rows)
parity.close(found, one)
for name, x in layout.names(gradients).items():
    parity.close(x, layout.names(plain)[name], name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3"])
def test_eight_devices_compute_what_one_does(name):
    command = [sys.executable, "-c", SHARDED, name, peers.folder(name)]
    subprocess.run(command, check=True, timeout=300, env={"PYTHONPATH": "tests:.", "JAX_PLATFORMS": "cpu"})
