"""Text as observation and action of an environment."""

from typing import Any

import gymnasium
import numpy as np

MAXIMAL_TEXT = 1 << 16  # characters of an observation; what a tool says beyond them is dropped
CUT = "\n[cut]"  # ends what was dropped from


class AnyText(gymnasium.Space[str]):
    """Any text at all; gymnasium's own `Text` is over a fixed alphabet, and languages and tools have none."""

    def __init__(self, seed: int | None = None):
        super().__init__(shape=(), dtype=str, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A few random letters."""
        return "".join(map(chr, self.np_random.integers(97, 123, size=8, dtype=np.int64)))

    def contains(self, x: Any) -> bool:
        """Whether it is a text."""
        return isinstance(x, str)


def cut(text: str, limit: int = MAXIMAL_TEXT) -> str:
    """A text of `limit` characters at most, with `CUT` as its end where there were more."""
    return text if len(text) <= limit else text[: limit - len(CUT)] + CUT
