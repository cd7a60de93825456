"""A decoder-only transformer, driven by one config: Qwen3 and its mixture of experts, Qwen2, Llama, Gemma 3.

RMSNorm before each block, rotary positions, grouped-query attention with normalised queries and keys, a gated hidden
layer or experts. See *Qwen3 Technical Report* (arXiv:2505.09388), section 2.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mpo_jax.models.attention import attend
from mpo_jax.models.cache import Cache, attend_to_cache
from mpo_jax.models.config import REMAT, TransformerConfig
from mpo_jax.models.mesh import by_rows
from mpo_jax.models.moe import Experts, Routing
from mpo_jax.models.rope import rotate
from mpo_jax.types import Array

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": lambda x: jax.nn.gelu(x, approximate=True)}


def smear(keys: Array, share: Array, starts: Array) -> Array:
    """Keys [B,T,K,H] mixed with the key before: σ(share) k_t + (1 − σ(share)) k_{t−1}, by head; none before a start.

    See *In-context Learning and Induction Heads* (arXiv:2209.11895), "smeared keys".
    """
    before = jnp.where(starts[:, :, None, None], 0.0, jnp.roll(keys, 1, axis=1))
    share = jax.nn.sigmoid(share)[None, None, :, None]
    return share * keys + (1.0 - share) * before


class ShiftedRMSNorm(nnx.Module):
    """x / rms(x) · (1 + scale), multiplied before rounding to the type of x."""

    def __init__(self, width: int, *, epsilon: float, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.zeros(width))
        self.epsilon = epsilon

    def __call__(self, x):
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        scale = 1.0 + self.scale.get_value().astype(jnp.float32)
        return (y * scale.reshape((1,) * (y.ndim - 1) + (-1,))).astype(x.dtype)


def _norm(config: TransformerConfig, width: int, rngs: nnx.Rngs) -> nnx.Module:
    kind = ShiftedRMSNorm if config.shifted_norms else nnx.RMSNorm
    return kind(width, epsilon=config.norm_epsilon, rngs=rngs)


class Attention(nnx.Module):
    """Causal grouped-query attention, over the row itself or over a cache, as far back as the layer's window."""

    def __init__(self, config: TransformerConfig, layer: int, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.window = c.window(layer)
        self.local = self.window is not None and c.local_rope_theta is not None
        self.query = nnx.Linear(c.width, c.num_heads * c.head_dim, use_bias=c.qkv_bias, rngs=rngs)
        self.key = nnx.Linear(c.width, c.num_kv_heads * c.head_dim, use_bias=c.qkv_bias, rngs=rngs)
        self.value = nnx.Linear(c.width, c.num_kv_heads * c.head_dim, use_bias=c.qkv_bias, rngs=rngs)
        self.output = nnx.Linear(c.num_heads * c.head_dim, c.width, use_bias=False, rngs=rngs)
        if c.qk_norm:
            self.query_norm = _norm(c, c.head_dim, rngs)
            self.key_norm = _norm(c, c.head_dim, rngs)
        if c.smeared_keys:
            self.smear = nnx.Param(jnp.zeros(c.num_kv_heads))

    def __call__(self, x, positions, mask, segment_ids, cache):
        c = self.config
        rows, length, _ = x.shape
        q, k, v = (
            linear(x.reshape(rows * length, -1)).reshape(rows, length, -1, c.head_dim)
            for linear in (self.query, self.key, self.value)
        )
        if c.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        theta, scaling = (c.local_rope_theta, None) if self.local else (c.rope_theta, c.rope_scaling)
        q, k = rotate(q, positions, theta, scaling), rotate(k, positions, theta, scaling)
        key_positions = positions
        if cache is not None:
            row = jnp.arange(rows)[:, None]
            k = cache[0].at[row, :, :, positions].set(k, mode="drop")
            v = cache[1].at[row, :, positions].set(v, mode="drop")
            key_positions, cache = jnp.arange(k.shape[-1])[None, :], (k, v)
        share = self.smear.get_value() if c.smeared_keys else None
        if self.window is not None:
            mask = mask & (positions[:, :, None] - key_positions[:, None, :] < self.window)
        if cache is not None:
            mixed = attend_to_cache(q, k, v, mask, c.attention_scale, share)
        else:
            k = k if share is None else smear(k, share, positions == 0)
            mixed = attend(q, k, v, mask, segment_ids=segment_ids, window=self.window, scale=c.attention_scale)
        return self.output(mixed.reshape(rows * length, -1)).reshape(rows, length, -1), cache


class Mlp(nnx.Module):
    """down(σ(gate(x)) · up(x)), σ silu or gelu. See *GLU Variants Improve Transformer* (arXiv:2002.05202), Eq. 6."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.activation = config.activation
        self.gate = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(config.mlp_width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        flat = x.reshape(-1, x.shape[-1])  # of [B,T,…] XLA for CPUs would turn activations around for the gradients
        return self.down(ACTIVATIONS[self.activation](self.gate(flat)) * self.up(flat)).reshape(x.shape)


class Block(nnx.Module):
    """One layer: attention, then the gated MLP or the experts, each on the normalised residual stream."""

    def __init__(self, config: TransformerConfig, layer: int, *, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, config.width, rngs)
        self.attention = Attention(config, layer, rngs=rngs)
        self.mlp_norm = _norm(config, config.width, rngs)
        self.has_experts = config.has_experts(layer)
        self.mlp = (Experts if self.has_experts else Mlp)(config, rngs=rngs)
        self.post_norms = config.post_norms
        if self.post_norms:
            self.attention_post_norm = _norm(config, config.width, rngs)
            self.mlp_post_norm = _norm(config, config.width, rngs)

    def __call__(self, x, positions, mask, segment_ids, cache, replay):
        mixed, cache = self.attention(self.attention_norm(x), positions, mask, segment_ids, cache)
        x = x + (self.attention_post_norm(mixed) if self.post_norms else mixed)
        inner, routing = self.mlp_norm(x), None
        if self.has_experts:
            mixed, routing = self.mlp(inner, replay)
        else:
            mixed = self.mlp(inner)
        return x + (self.mlp_post_norm(mixed) if self.post_norms else mixed), cache, routing


def _stack(routings: list[Routing | None]) -> Routing | None:
    """Of the layers that have experts, one after the other."""
    routings = [routing for routing in routings if routing is not None]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *routings) if routings else None


def _mask(tokens: Array, positions: Array, segment_ids: Array | None, cache: Cache | None) -> Array:
    """bool[B,T,S]: which keys each token may see, windows aside."""
    if (segment_ids is None) == (cache is None):
        raise ValueError("expected either segment_ids or a cache: a row that is cached is one segment")
    if cache is None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        return same & jnp.tri(tokens.shape[1], dtype=bool)[None]
    return jnp.arange(cache.length)[None, None, :] <= positions[:, :, None]


class Transformer(nnx.Module):
    """Tokens to final hidden states; the output head is applied by whoever needs it (`head`)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size, config.width, embedding_init=nnx.initializers.normal(config.width**-0.5), rngs=rngs
        )
        if config.scan_layers:
            make = nnx.vmap(lambda rngs: Block(config, 0, rngs=rngs))
            self.blocks = nnx.split_rngs(splits=config.num_layers)(make)(rngs)
        else:
            self.blocks = nnx.List([Block(config, layer, rngs=rngs) for layer in range(config.num_layers)])
        self.final_norm = _norm(config, config.width, rngs)
        if not config.tied_embeddings:
            self.output = nnx.Linear(config.width, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(
        self, tokens: Array, positions: Array, segment_ids: Array | None = None, cache: Cache | None = None
    ) -> tuple[Array, Cache | None]:
        """Hidden states after the last norm.

        Args:
          tokens: int[B,T].
          positions: int[B,T], restart at 0 with each sequence. With a cache, where to write: positions at or past the
            context length are dropped (the padding of ragged rows).
          segment_ids: int[B,T], tokens see only their own segment; needed without a cache, refused with one: what is
            in a row's cache is one segment.
          cache: what was read before; the row then goes on from it.

        Returns:
          float[B,T,D], and the cache with these tokens appended (None without one).

        Raises:
          ValueError: neither segment ids nor a cache, or both.
        """
        return self.routed(tokens, positions, segment_ids, cache)[:2]

    def routed(
        self,
        tokens: Array,
        positions: Array,
        segment_ids: Array | None = None,
        cache: Cache | None = None,
        replay: Array | None = None,
    ) -> tuple[Array, Cache | None, Routing | None]:
        """The same, and where the layers with experts, L of them, sent the tokens.

        Args:
          tokens, positions, segment_ids, cache: as above.
          replay: int[L,B,T,k], experts to use, such as the rollout's; −1 as in `moe.route`.

        Returns:
          float[B,T,D], the cache, and the routing with leading axes [L,B,T]; None without experts.

        Raises:
          ValueError: as above, or replay of another shape.
        """
        c = self.config
        mask = _mask(tokens, positions, segment_ids, cache)
        sparse = [layer for layer in range(c.num_layers) if c.has_experts(layer)]
        if replay is not None and replay.shape != (expected := (len(sparse), *tokens.shape, c.experts_per_token)):
            raise ValueError(f"replay has shape {replay.shape}, expected {expected}")
        x = jnp.take(self.embedding.embedding.get_value(), tokens, axis=0)  # in its own type; nnx.Embed gives float32
        if c.embedding_scale != 1.0:
            x = x * jnp.asarray(c.embedding_scale, x.dtype)
        if replay is not None:  # one entry a layer
            replay = [replay[sparse.index(layer)] if layer in sparse else None for layer in range(c.num_layers)]
        if cache is None:
            x, routing = self._read(x, positions, mask, segment_ids, replay)
            return self.final_norm(x), None, routing
        layers, routings = [], []
        for layer in range(c.num_layers):
            entry = cache.keys[layer], cache.values[layer]
            x, entry, routing = self._block(layer)(x, positions, mask, None, entry, replay and replay[layer])
            layers.append(entry)
            routings.append(routing)
        keys, values = zip(*layers, strict=True)
        return self.final_norm(x), Cache(keys=keys, values=values), _stack(routings)

    def _read(
        self, x: Array, positions: Array, mask: Array, segment_ids: Array, replay: list | None
    ) -> tuple[Array, Routing | None]:
        """All blocks on whole rows [B,T,D]."""

        def layer(graph, x, params, replay):
            x, _, routing = nnx.merge(graph, params)(by_rows(x), positions, mask, segment_ids, None, replay)
            return x, routing

        if self.config.remat != "all":
            layer = jax.checkpoint(layer, policy=REMAT[self.config.remat], static_argnums=0)
        if self.config.scan_layers:
            graph, params = nnx.split(self.blocks)
            each = params, None if replay is None else jnp.stack(replay)
            return jax.lax.scan(lambda x, one: layer(graph, x, *one), x, each)
        routings = []
        for index, block in enumerate(self.blocks):
            graph, params = nnx.split(block)
            x, routing = layer(graph, x, params, replay and replay[index])
            routings.append(routing)
        return x, _stack(routings)

    def _block(self, index: int) -> Block:
        if not self.config.scan_layers:
            return self.blocks[index]
        graph, params = nnx.split(self.blocks)
        return nnx.merge(graph, jax.tree.map(lambda x: x[index], params))

    def head(self) -> Array:
        """The output projection, float[D,V]."""
        return self.embedding.embedding.get_value().T if self.config.tied_embeddings else self.output.kernel.get_value()


def _value_head(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Linear:
    """One linear layer, zero at the start, in float32: bfloat16 would round values to steps of their differences."""
    return nnx.Linear(config.width, 1, kernel_init=nnx.initializers.zeros, dtype=jnp.float32, rngs=rngs)


class Critic(nnx.Module):
    """A value of every prefix: a trunk of its own, without an output head, and one linear layer, zero at the start."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.trunk = Transformer(dataclasses.replace(config, tied_embeddings=True), rngs=rngs)
        self.value = _value_head(config, rngs)

    def __call__(self, tokens: Array, positions: Array, segment_ids: Array) -> Array:
        """float[B,T]: the value of the prefix that ends *with* each token (`evaluation` shifts it)."""
        hidden, _ = self.trunk(tokens, positions, segment_ids)
        return self.value(hidden)[..., 0]


class SharedCritic(nnx.Module):
    """The same on the policy's trunk: the linear layer alone, of the hidden states that the policy's head reads."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.value = _value_head(config, rngs)

    def __call__(self, hidden: Array) -> Array:
        """float[B,T] of hidden[B,T,D]."""
        return self.value(hidden)[..., 0]
