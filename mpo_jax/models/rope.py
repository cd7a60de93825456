"""Rotary position embeddings, and the three ways in which models stretch them over longer contexts."""

import dataclasses
import math

import jax.numpy as jnp

from mpo_jax.types import Array


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor`. See *Extending Context Window of LLMs …* (arXiv:2306.15595), Eq. 4."""

    factor: float

    def stretch(self, frequencies: Array, theta: float) -> Array:
        """The frequencies [H/2] that are used instead."""
        return frequencies / self.factor

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied by."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended.

    With n(f) = C f / 2π turns in the original context C: f' = f if n > high, f/factor if n < low, else
    (1−s) f/factor + s f with s = (n − low) / (high − low). See *The Llama 3 Herd of Models* (arXiv:2407.21783), 3.4.2;
    the formula itself was published with the weights only.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int

    def stretch(self, frequencies: Array, theta: float) -> Array:
        """The frequencies [H/2] that are used instead."""
        turns = self.original_context * frequencies / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - kept) * frequencies / self.factor + kept * frequencies

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied by."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """As llama3's, but blended over the dimensions that make between `beta_slow` and `beta_fast` turns.

    Pair i makes β turns in the original context C at i(β) = H ln(C / 2πβ) / (2 ln θ); the share of f/factor rises from
    0 at i(beta_fast) to 1 at i(beta_slow). Queries and keys grow by 0.1 ln(factor) + 1. See *YaRN* (arXiv:2309.00071),
    section 3.2 and Eq. 22.

    Attributes:
      attention_factor: replaces the growth; None for the paper's.
      truncate: the two dimensions are rounded outwards to whole ones.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def stretch(self, frequencies: Array, theta: float) -> Array:
        """The frequencies [H/2] that are used instead."""
        half = frequencies.shape[0]

        def dimension(turns: float) -> float:
            return half * math.log(self.original_context / (turns * 2 * math.pi)) / math.log(theta)

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        divided = jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return divided * frequencies / self.factor + (1 - divided) * frequencies

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling


def rotate(x: Array, positions: Array, theta: float, scaling: Scaling | None = None) -> Array:
    """Rotary position embedding of x[B,T,N,H] at positions[B,T]: pair (i, i+H/2) turns by position · θ^(−2i/H).

    See *RoFormer* (arXiv:2104.09864), Eq. 34; halves are paired as in Hugging Face's weights.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequencies = scaling.stretch(frequencies, theta)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling is not None:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
