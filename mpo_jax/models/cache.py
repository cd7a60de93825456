"""Keys and values of what was read before, and attention over them."""

import functools

import chex
import jax
import jax.numpy as jnp

from mpo_jax.models.config import TransformerConfig
from mpo_jax.types import Array


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Cache:
    """Keys and values of what each row has read so far; the entry of position p lies at index p.

    They lie as the products of a step read them, so that none has to be turned for every token.

    Attributes:
      keys: one float[B,K,H,C] a layer, C the context length and K the number of key heads.
      values: one float[B,K,C,H] a layer.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @classmethod
    def empty(cls, config: TransformerConfig, num_rows: int, context_length: int, dtype=jnp.float32) -> "Cache":
        lead, layers = (num_rows, config.num_kv_heads), range(config.num_layers)
        return cls(
            keys=tuple(jnp.zeros((*lead, config.head_dim, context_length), dtype) for _ in layers),
            values=tuple(jnp.zeros((*lead, context_length, config.head_dim), dtype) for _ in layers),
        )

    @property
    def length(self) -> int:
        """C, how many positions there are."""
        return self.keys[0].shape[-1]

    def resized(self, length: int) -> "Cache":
        """The same with so many positions, the last ones cut off or empty ones added.

        Every array of this one is given up as soon as it is copied, so that two whole caches are never held.
        """

        def resize(x: Array, axis: int) -> Array:
            new = _resize(x, axis, length)
            x.delete()
            return new

        return Cache(
            keys=tuple(resize(keys, 3) for keys in self.keys), values=tuple(resize(values, 2) for values in self.values)
        )

    def take(self, rows: Array) -> "Cache":
        """Some rows[N], whatever for a row that there is none of; itself where they are as many as it has: all."""
        return self if len(rows) == len(self.keys[0]) else jax.tree.map(lambda x: x.at[rows].get(mode="clip"), self)

    def put(self, rows: Array, part: "Cache") -> "Cache":
        """The same with what `take` gave of these rows replaced."""
        if len(rows) == len(self.keys[0]):
            return part
        return jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), self, part)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _resize(x: Array, axis: int, length: int) -> Array:
    if length <= x.shape[axis]:
        return jax.lax.slice_in_dim(x, 0, length, axis=axis)
    return jnp.pad(x, [(0, length - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])


def attend_to_cache(
    q: Array, keys: Array, values: Array, mask: Array, scale: float | None, share: Array | None = None
) -> Array:
    """What queries find in a cache.

    Smeared keys, σ(share) k_s + (1 − σ(share)) k_{s−1}, are had by smearing the scores, which are linear in them and
    many times fewer numbers.

    Args:
      q: [B,T,N,H].
      keys: [B,K,H,C].
      values: [B,K,C,H].
      mask: bool[B,T,C].
      scale: of the scores; None for H^(−1/2).
      share: float[K], before the sigmoid; None where keys are not smeared.

    Returns:
      [B,T,N,H].
    """
    rows, length, heads, head_dim = q.shape
    groups = heads // keys.shape[1]
    q = jnp.moveaxis(q.reshape(rows, length, -1, groups, head_dim), 1, 3)  # [B,K,G,T,H]
    scores = jnp.matmul(q.reshape(rows, -1, groups * length, head_dim), keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(rows, -1, groups, length, keys.shape[-1]) * (head_dim**-0.5 if scale is None else scale)
    if share is not None:
        share = jax.nn.sigmoid(share.astype(jnp.float32))[None, :, None, None, None]
        before = jnp.pad(scores[..., :-1], [(0, 0)] * 4 + [(1, 0)])  # nothing before the first key
        scores = share * scores + (1.0 - share) * before
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    p = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.matmul(p.reshape(rows, -1, groups * length, keys.shape[-1]), values)
    mixed = mixed.reshape(rows, -1, groups, length, head_dim)
    return jnp.moveaxis(mixed, 3, 1).reshape(rows, length, heads, head_dim)
