"""Packed rows beside one episode a row, on the search environment's own lengths: log-probs and their gradient."""

import random

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure
from mpo_jax.environments.demonstrations import demonstrate
from mpo_jax.environments.questions import questions
from mpo_jax.environments.search import SearchEnvironment
from mpo_jax.environments.search_policy import ScriptedPolicy
from mpo_jax.models import pretrained
from mpo_jax.models.actor_critic import Models
from mpo_jax.store.episode import Episode
from mpo_jax.training.batching import fill, pack
from mpo_jax.types import Trajectories

ROW_TOKENS, OBSERVATION_TOKENS = 384, 80  # as in the search experiment


def lengths(number: int, tokenizer, seed: int = 0) -> list[int]:
    """Tokens of episodes of the scripted policy, which errs in three of ten turns, on training questions."""
    rng = random.Random(seed)
    policy, environment = ScriptedPolicy(0.3, rng), SearchEnvironment()
    found = []
    for question in rng.sample(questions("train"), number):
        turns = demonstrate(question, policy, environment)
        read = (len(tokenizer.render_observation(seen, OBSERVATION_TOKENS)) for seen, _ in turns)
        said = (len(tokenizer.encode(action)) + 1 for _, action in turns)
        found.append(min(sum(read) + sum(said), ROW_TOKENS))
    return found


def episode(length: int, vocab_size: int, rng: np.random.Generator) -> Episode:
    """Of random tokens, one turn."""
    return Episode(
        episode_id="",
        group_id=0,
        task_id="",
        tokens=rng.integers(4, vocab_size, length).tolist(),
        action_mask=[True] * length,
        executable_mask=[True] * length,
        turn_ids=[0] * length,
        logprobs=[0.0] * length,
        rewards=[0.0],
        state_ids=[0],
        versions=[0],
        end_reason="terminated",
    )


def batches(number: int, model: pretrained.Pretrained) -> tuple[Trajectories, Trajectories]:
    """The same episodes packed, and one a row."""
    rng = np.random.default_rng(0)
    episodes = [episode(length, model.config.vocab_size, rng) for length in lengths(number, model.tokenizer)]
    packed, padded = (pack(episodes, row_tokens=ROW_TOKENS, row_sequences=most)[0] for most in (8, 1))
    return packed, padded


def case(number: int, repeats: int) -> measure.Case:
    """Gradients of the packaged search model over both."""
    model = pretrained.load("search_tiny")
    models, (packed, padded) = Models.of(model.config), batches(number, model)

    @jax.jit
    @jax.grad
    def gradient(params, batch: Trajectories):
        return jnp.sum(models.logprobs(params, batch)[0])

    contestants = {
        "packed": lambda: gradient(model.params, packed),
        "one episode a row": lambda: gradient(model.params, padded),
    }
    return measure.Case(f"gradient of {number} episodes, rows of {ROW_TOKENS} tokens", contestants, repeats)


def ideal(number: int) -> str:
    """How many times as long one episode a row would take, if a packed row had no padding."""
    packed, padded = map(fill, batches(number, pretrained.load("search_tiny")))
    return f"Ideal: {1 / padded:.3f} × ours. Tokens that are no padding: {packed:.3f}, and {padded:.3f}."
