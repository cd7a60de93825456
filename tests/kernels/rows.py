"""Ragged rows of two sizes: turns of any length, observations anywhere, packed or not, garbage behind the mask."""

import dataclasses

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SIZES = (64, 1024)
SETTINGS = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)


@dataclasses.dataclass(frozen=True)
class Row:
    mask: np.ndarray
    turns: np.ndarray
    sequences: np.ndarray
    executable: np.ndarray
    rewards: np.ndarray
    rng: np.random.Generator

    def draw(self, scale=1.0, garbage=np.nan):
        """Normal float32 on the action tokens, garbage elsewhere."""
        x = self.rng.normal(0.0, scale, len(self.mask)).astype(np.float32)
        return np.where(self.mask, x, np.float32(garbage))


def build(sizes, seed=0, length=None, observations=3, trailing=True):
    """A row of sequences of turns of the given numbers of action tokens (0 is an empty turn)."""
    rng = np.random.default_rng(seed)
    mask, turns, sequences, turn = [], [], [], 0
    for s, lengths in enumerate(sizes):
        for n in lengths:
            before = rng.integers(0, observations + 1)
            gaps = np.sort(rng.integers(0, n + 1, rng.integers(0, observations + 1))) if n else ()
            flags = np.insert(np.ones(n, bool), gaps, False) if len(gaps) else np.ones(n, bool)
            mask += [False] * before + list(flags)
            turns += [turn] * (before + len(flags))
            sequences += [s] * (before + len(flags))
            turn += 1
        if trailing and turns:
            extra = rng.integers(0, observations + 1)
            mask, turns, sequences = mask + [False] * extra, turns + [turns[-1]] * extra, sequences + [s] * extra
    length = next(size for size in SIZES if size >= len(mask) or size == SIZES[-1]) if length is None else length
    pad = max(0, length - len(mask))
    mask = np.array((mask + [False] * pad)[:length])
    turns = np.array((turns + [-1] * pad)[:length], np.int32)
    sequences = np.array((sequences + [-1] * pad)[:length], np.int32)
    rewards = np.full(length, np.nan, np.float32)
    rewards[mask] = 0.0
    for turn in set(turns[mask]):
        last = np.flatnonzero(mask & (turns == turn))[-1]
        rewards[last] = rng.normal() if rng.random() < 0.5 else 0.0
    executable = mask & (rng.random(length) < 0.6)
    return Row(mask=mask, turns=turns, sequences=sequences, executable=executable, rewards=rewards, rng=rng)


@st.composite
def rows(draw):
    packed = draw(st.integers(1, 3))
    longest = draw(st.sampled_from([1, 2, 5, 30, 200]))
    most = draw(st.sampled_from([1, 3, 8, 40]))
    lengths = st.lists(st.integers(0 if draw(st.booleans()) else 1, longest), min_size=1, max_size=most)
    sizes = draw(st.lists(lengths, min_size=packed, max_size=packed))
    return build(sizes, draw(st.integers(0, 2**32 - 1)), observations=draw(st.sampled_from([0, 1, 6])))


def close(actual, expected, rtol=1e-5):
    """Within rtol of the larger of the entry and the array's own scale."""
    expected = np.asarray(expected, np.float64)
    scale = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rtol, atol=rtol * scale)
