"""A decoder-only transformer in the Qwen3 family's shape, driven by one config.

RMSNorm before each block, rotary positions, grouped-query attention with normalised queries and keys, SwiGLU.
See *Qwen3 Technical Report* (arXiv:2505.09388), section 2.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from mpo_jax.types import Array

MESH_AXES = ("data", "fsdp", "tensor", "expert")
ROWS = ("data", "fsdp", "expert")  # the axes over which the rows of a batch are divided


REMAT = {  # what of a block is kept for the backward pass; the rest is computed again
    "all": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "none": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a transformer.

    Attributes:
      vocab_size: V, number of token ids.
      width: D, of the residual stream.
      num_layers: blocks.
      num_heads: query heads.
      num_kv_heads: key and value heads; a divisor of `num_heads`.
      head_dim: H, of one head; even, for the rotation.
      mlp_width: of the gated hidden layer.
      rope_theta: base of the rotary frequencies.
      norm_epsilon: of every RMSNorm.
      qk_norm: normalise queries and keys by head (Qwen3 does, Llama does not).
      tied_embeddings: the output head is the embedding table.
      smeared_keys: mix each key with the one before it. Copying what followed an earlier occurrence of a token then
        takes one head, not two layers that must find each other: tiny models learn to copy in minutes.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 1e4
    norm_epsilon: float = 1e-6
    qk_norm: bool = True
    tied_embeddings: bool = True
    smeared_keys: bool = False
    scan_layers: bool = False
    remat: str = "all"

    def __post_init__(self):
        if self.remat not in REMAT:
            raise ValueError(f"remat={self.remat!r}, expected one of: {', '.join(REMAT)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; the rotation needs pairs")


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Cache:
    """Keys and values of what each row has read so far; the entry of position p lies at index p.

    Attributes:
      keys, values: one float[B,C,K,H] a layer, C the context length and K the number of key heads.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @classmethod
    def empty(cls, config: TransformerConfig, num_rows: int, context_length: int, dtype=jnp.float32) -> "Cache":
        shape = (num_rows, context_length, config.num_kv_heads, config.head_dim)
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
        return cls(keys=keys, values=values)


def by_rows(x: Array, *more_axes: str) -> Array:
    """x[B,…], its first dimension divided over the mesh in use; x itself where none is set (`jax.set_mesh`)."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec((*ROWS, *more_axes)))


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """Rotary position embedding of x[B,T,N,H] at positions[B,T]: pair (i, i+H/2) turns by position · θ^(−2i/H).

    See *RoFormer* (arXiv:2104.09864), Eq. 34; halves are paired as in Hugging Face's weights.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def smear(keys: Array, share: Array, starts: Array) -> Array:
    """Keys[B,T,K,H] mixed with the key before: σ(share) k_t + (1 − σ(share)) k_{t−1}, by head; nothing before a start.

    See *In-context Learning and Induction Heads* (arXiv:2209.11895), "smeared keys".
    """
    before = jnp.where(starts[:, :, None, None], 0.0, jnp.roll(keys, 1, axis=1))
    share = jax.nn.sigmoid(share)[None, None, :, None]
    return share * keys + (1.0 - share) * before


class Attention(nnx.Module):
    """Causal grouped-query attention, over the row itself or over a cache."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.query = nnx.Linear(c.width, c.num_heads * c.head_dim, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(c.width, c.num_kv_heads * c.head_dim, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(c.width, c.num_kv_heads * c.head_dim, use_bias=False, rngs=rngs)
        self.output = nnx.Linear(c.num_heads * c.head_dim, c.width, use_bias=False, rngs=rngs)
        if c.qk_norm:
            self.query_norm = nnx.RMSNorm(c.head_dim, epsilon=c.norm_epsilon, rngs=rngs)
            self.key_norm = nnx.RMSNorm(c.head_dim, epsilon=c.norm_epsilon, rngs=rngs)
        if c.smeared_keys:
            self.smear = nnx.Param(jnp.zeros(c.num_kv_heads))

    def __call__(self, x, positions, mask, cache):
        c = self.config
        rows, length, _ = x.shape
        q = self.query(x).reshape(rows, length, c.num_heads, c.head_dim)
        k = self.key(x).reshape(rows, length, c.num_kv_heads, c.head_dim)
        v = self.value(x).reshape(rows, length, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotate(q, positions, c.rope_theta), rotate(k, positions, c.rope_theta)
        key_positions = positions
        if cache is not None:
            row = jnp.arange(rows)[:, None]
            k = cache[0].at[row, positions].set(k, mode="drop")
            v = cache[1].at[row, positions].set(v, mode="drop")
            key_positions = jnp.arange(k.shape[1])[None, :]
        cache = (k, v)
        if c.smeared_keys:
            k = smear(k, self.smear.get_value(), key_positions == 0)
        mixed = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        return self.output(mixed.reshape(rows, length, -1)), cache


class Mlp(nnx.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)). See *GLU Variants Improve Transformer* (arXiv:2002.05202), Eq. 6."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.gate = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(config.mlp_width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One layer: attention, then the gated MLP, each on the normalised residual stream."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, rngs=rngs)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x, positions, mask, cache):
        mixed, cache = self.attention(self.attention_norm(x), positions, mask, cache)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Transformer(nnx.Module):
    """Tokens to final hidden states; the output head is applied by whoever needs it (`head`)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size, config.width, embedding_init=nnx.initializers.normal(config.width**-0.5), rngs=rngs
        )
        if config.scan_layers:
            make = nnx.vmap(lambda rngs: Block(config, rngs=rngs))
            self.blocks = nnx.split_rngs(splits=config.num_layers)(make)(rngs)
        else:
            self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, rngs=rngs)
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
          segment_ids: int[B,T], tokens see only their own segment; needed without a cache.
          cache: what was read before; the row then goes on from it.

        Returns:
          float[B,T,D], and the cache with these tokens appended (None without one).
        """
        if cache is None:
            same = segment_ids[:, :, None] == segment_ids[:, None, :]
            mask = same & jnp.tri(tokens.shape[1], dtype=bool)[None]
        else:
            mask = jnp.arange(cache.keys[0].shape[1])[None, None, :] <= positions[:, :, None]
        x = self.embedding(tokens)
        if cache is None:
            return self.final_norm(self._read(x, positions, mask)), None
        layers = []
        for index in range(self.config.num_layers):
            x, entry = self._block(index)(x, positions, mask, (cache.keys[index], cache.values[index]))
            layers.append(entry)
        keys, values = zip(*layers, strict=True)
        return self.final_norm(x), Cache(keys=keys, values=values)

    def _read(self, x: Array, positions: Array, mask: Array) -> Array:
        """All blocks on whole rows [B,T,D]."""

        graph, *params = self._split_blocks()

        def layer(x, params):
            return nnx.merge(graph, params)(by_rows(x), positions, mask, None)[0], None

        if self.config.remat != "all":
            layer = jax.checkpoint(layer, policy=REMAT[self.config.remat])
        if self.config.scan_layers:
            return jax.lax.scan(layer, x, *params)[0]
        for one in params:
            x, _ = layer(x, one)
        return x

    def _split_blocks(self) -> tuple:
        """The graph of a block, and the parameters: of all blocks in one where they are stacked, else one a block."""
        if self.config.scan_layers:
            return nnx.split(self.blocks)
        return nnx.graphdef(self.blocks[0]), *(nnx.state(block) for block in self.blocks)

    def _block(self, index: int) -> Block:
        if not self.config.scan_layers:
            return self.blocks[index]
        graph, params = nnx.split(self.blocks)
        return nnx.merge(graph, jax.tree.map(lambda x: x[index], params))

    def head(self) -> Array:
        """The output projection, float[D,V]."""
        return self.embedding.embedding.get_value().T if self.config.tied_embeddings else self.output.kernel.get_value()


class Critic(nnx.Module):
    """A value of every prefix: a trunk of its own and one linear head, zero at the start."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.trunk = Transformer(config, rngs=rngs)
        self.value = nnx.Linear(config.width, 1, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, tokens: Array, positions: Array, segment_ids: Array) -> Array:
        """float[B,T]: the value of the prefix that ends *with* each token (`evaluation` shifts it)."""
        hidden, _ = self.trunk(tokens, positions, segment_ids)
        return self.value(hidden)[..., 0]


def stacked(params: nnx.State) -> nnx.State:
    """The parameters of `scan_layers=False` as those of `scan_layers=True`: block i is entry i of a leading axis."""
    layers: dict[tuple, list] = {}
    for path, leaf in nnx.to_flat_state(params):
        whole = tuple(key for key in path if not isinstance(key, int))
        layers.setdefault(whole, []).append(leaf)
    join = [
        (path, leaves[0].replace(jnp.stack([x.get_value() for x in leaves])) if "blocks" in path else leaves[0])
        for path, leaves in layers.items()
    ]
    return nnx.from_flat_state(join)


def unstacked(params: nnx.State) -> nnx.State:
    """Undoes `stacked`."""
    flat = []
    for path, leaf in nnx.to_flat_state(params):
        if "blocks" not in path:
            flat.append((path, leaf))
            continue
        place = path.index("blocks") + 1
        for index, value in enumerate(leaf.get_value()):
            flat.append(((*path[:place], index, *path[place:]), leaf.replace(value)))
    return nnx.from_flat_state(sorted(flat, key=lambda item: [str(key).zfill(6) for key in item[0]]))
