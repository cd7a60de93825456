"""Rows of an agent's episodes at the sizes that are measured: observations and turns in turns, one episode a row."""

import numpy as np


def draw(num_rows: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Observations of 20 to 200 tokens before turns of 20 to 300: about 40 turns in 8,192 tokens, .59 of them actions.

    Returns:
      Arrays [B,T] by name; one reward an episode, at its last action.
    """
    rng = np.random.default_rng(seed)
    shape = num_rows, length
    turn_ids, action_mask, rewards = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for row in range(num_rows):
        start, turn = 0, 0
        while start < length:
            observation, action = rng.integers(20, 201), rng.integers(20, 301)
            turn_ids[row, start : start + observation + action] = turn
            action_mask[row, start + observation : start + observation + action] = True
            start, turn = start + observation + action, turn + 1
        rewards[row, np.flatnonzero(action_mask[row])[-1]] = rng.integers(0, 2)
    old_logprobs = -rng.exponential(0.7, shape).astype(np.float32)
    return {
        "rewards": rewards,
        "values": rng.uniform(0, 1, shape).astype(np.float32),
        "action_mask": action_mask,
        "turn_ids": turn_ids,
        "old_logprobs": old_logprobs,
        "logprobs": old_logprobs + rng.normal(0, 0.01, shape).astype(np.float32),
        "advantages": rng.normal(size=shape).astype(np.float32),
    }
