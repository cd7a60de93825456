"""A transformer small enough for tests, a float64 numpy oracle of its forward pass, and batches laid out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpo_jax.models import pretrained, weights
from mpo_jax.models.transformer import Transformer, TransformerConfig
from mpo_jax.types import Trajectories


def config(**changes):
    shape = {
        "vocab_size": 64,
        "width": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "mlp_width": 24,
        "rope_theta": 100.0,
    }
    return TransformerConfig(**shape | changes)


def stirred(params, seed=0, scale=0.3):
    """Parameters with noise on all of them, norm scales included, so that none is 0 or 1."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + rng.normal(0, scale, x.shape), x.dtype), params)


@functools.cache
def graph(config):
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]


@functools.cache
def params(config, seed=0):
    """Random parameters, norm scales around 1; drawn by numpy, so that nothing is compiled for them."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray((x.ndim == 1) + rng.normal(0, 0.4, x.shape), x.dtype), pretrained.shapes(config)
    )


QUICK = {"xla_backend_optimization_level": 0}  # compiled once, run a few times


def forward(config, params, tokens, positions, segment_ids):
    model = nnx.merge(graph(config), params)
    return model(tokens, positions, segment_ids)[0] @ model.head()


logits = jax.jit(forward, static_argnums=0, compiler_options=QUICK)


def oracle(config, params, tokens):
    """Logits [T,V] after each token of one sequence, in float64, position by position and head by head."""
    flat = params if isinstance(params, dict) else weights.flatten(params)
    p = {name: np.asarray(x, np.float64) for name, x in flat.items()}
    c, heads = config, config.num_heads

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + c.norm_epsilon) * scale

    def turned(x):
        """x [T,H], each (i, i+H/2) as a complex number times e^{i·position·frequency}."""
        half = c.head_dim // 2
        angle = np.arange(len(x))[:, None] * c.rope_theta ** (-2 * np.arange(half) / c.head_dim)
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], axis=1)

    x = p["embedding.embedding"][np.asarray(tokens)]
    for layer in range(c.num_layers):
        b = f"blocks.{layer}."
        h = norm(x, p[b + "attention_norm.scale"])
        columns = []
        for head in range(heads):
            kv = head // (heads // c.num_kv_heads)
            mine, shared = (slice(i * c.head_dim, (i + 1) * c.head_dim) for i in (head, kv))
            q = h @ p[b + "attention.query.kernel"][:, mine]
            k = h @ p[b + "attention.key.kernel"][:, shared]
            v = h @ p[b + "attention.value.kernel"][:, shared]
            if c.qk_norm:
                q, k = norm(q, p[b + "attention.query_norm.scale"]), norm(k, p[b + "attention.key_norm.scale"])
            q, k = turned(q), turned(k)
            if c.smeared_keys:
                share = 1 / (1 + np.exp(-p[b + "attention.smear"][kv]))
                k = share * k + (1 - share) * np.concatenate([np.zeros_like(k[:1]), k[:-1]])
            rows = []
            for t in range(len(x)):
                score = np.exp(k[: t + 1] @ q[t] / np.sqrt(c.head_dim))
                rows.append(score @ v[: t + 1] / score.sum())
            columns.append(np.stack(rows))
        x = x + np.concatenate(columns, axis=1) @ p[b + "attention.output.kernel"]
        h = norm(x, p[b + "mlp_norm.scale"])
        gate = h @ p[b + "mlp.gate.kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ p[b + "mlp.up.kernel"])) @ p[b + "mlp.down.kernel"]
    head = p["embedding.embedding"].T if c.tied_embeddings else p["output.kernel"]
    return norm(x, p["final_norm.scale"]) @ head


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def lay_out(rows, length, sequences=1):
    """`Trajectories` of rows of token lists, `None` for one padding token; every token an action."""
    B = len(rows)
    tokens, positions = np.zeros((2, B, length), np.int32)
    ids = np.full((B, length), -1, np.int32)
    for b, row in enumerate(rows):
        column, slot = 0, 0
        for piece in row:
            if piece is not None:
                span = slice(column, column + len(piece))
                tokens[b, span], positions[b, span], ids[b, span] = piece, np.arange(len(piece)), slot
                slot += 1
            column += 1 if piece is None else len(piece)
    present = np.array([[(ids[b] == s).any() for s in range(sequences)] for b in range(B)])
    return Trajectories(
        tokens=tokens,
        positions=positions,
        sequence_ids=ids,
        turn_ids=ids,
        action_mask=ids >= 0,
        executable_mask=ids >= 0,
        rewards=np.zeros((B, length), np.float32),
        behavior_logprobs=np.zeros((B, length), np.float32),
        state_ids=ids,
        group_ids=np.where(present, 0, -1).astype(np.int32),
        truncated=np.zeros((B, sequences), bool),
        policy_version=np.zeros((B, sequences), np.int32),
    )
