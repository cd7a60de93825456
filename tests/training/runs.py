"""A tiny model in a folder, configs whose runs take seconds, and episodes made by hand."""

import atexit
import dataclasses
import functools
import itertools
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from experiments import parts
from experiments.configs import search
from mpo_jax import algorithms
from mpo_jax.models import pretrained, weights
from mpo_jax.models.actor_critic import Models, whole_critic
from mpo_jax.models.tokenizer import ChatTokenizer, train_bpe
from mpo_jax.models.transformer import TransformerConfig
from mpo_jax.store.episode import Episode, validate
from mpo_jax.training.imitation import tokenizer_texts
from mpo_jax.training.learner import Learner

END = 3  # the tokenizer's end of turn


@functools.cache
def model_folder() -> Path:
    """A random transformer that ends its turns with a probability near .3, so that episodes have several."""
    folder = Path(tempfile.mkdtemp(prefix="mpo_tiny_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer = ChatTokenizer(train_bpe(itertools.islice(tokenizer_texts(), 300), 400))
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size,
        width=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp_width=24,
        rope_theta=100.0,
        tied_embeddings=False,
        smeared_keys=True,
    )
    rng, shapes = np.random.default_rng(0), pretrained.shapes(config)
    drawn = jax.tree.map(lambda x: jnp.asarray((x.ndim == 1) + rng.normal(0, 0.25, x.shape), x.dtype), shapes)
    arrays = {name: np.array(x) for name, x in weights.flatten(drawn).items()}
    arrays["embedding.embedding"][:, 0], arrays["output.kernel"][0, END] = 1.0, 2.0
    pretrained.save(folder, pretrained.Pretrained(config, weights.unflatten(shapes, arrays), tokenizer))
    return folder


@functools.cache
def model() -> pretrained.Pretrained:
    return pretrained.load(model_folder())


SMALL = {
    "num_steps": 3,
    "groups_per_step": 2,
    "group_size": 2,
    "minibatches": 2,
    "row_multiple": 4,
    "value_pretraining_steps": 1,
    "rate_decay": "constant",  # so that a run may go on beyond its first num_steps
    "num_slots": 4,
    "turn_limit": 3,
    "max_turn_tokens": 8,
    "max_pending_groups": 4,
    "evaluate_every": 100,
    "evaluation_questions": 4,
    "checkpoint_every": 2,
}


def config(**changes):
    """The config of a run of seconds."""
    result = search.get_config()
    result.update({"model": str(model_folder())} | SMALL | changes)
    return result


@functools.cache
def learner(algorithm="mpo", **changes) -> Learner:
    """Compiled once for all tests that ask for the same; rows of 64 tokens and at most 4 episodes."""
    c = config(algorithm=algorithm, **{"row_tokens": 64, "row_sequences": 4, "context_length": 64} | changes)
    built = parts.make_algorithm(c)
    traces = []

    def surrogate(*arguments):
        traces.append(algorithm)
        return built.surrogate(*arguments)

    found = Learner(
        dataclasses.replace(built, surrogate=surrogate),
        parts.make_models(c, model()),
        parts.make_optimizers(c),
        parts.make_settings(c),
        model().tokenizer.render_hint,
    )
    found.traces = traces
    return found


@functools.cache
def _first_state(algorithm, learning_rate):
    c = config(algorithm=algorithm, learning_rate=learning_rate, critic_learning_rate=learning_rate)
    return frozen(parts.make_state(c, model(), parts.make_algorithm(c), parts.make_optimizers(c)))


def fresh_state(algorithm="mpo", learning_rate=5e-4):
    """A state of its own buffers, since a step takes them."""
    return jax.tree.map(jnp.array, _first_state(algorithm, learning_rate))


def frozen(tree):
    """A copy on the host that no donation can take back."""
    return jax.tree.map(np.array, tree)


def equal(a, b) -> bool:
    """Bit for bit, NaN included."""
    left, right = ([np.asarray(x).tobytes() for x in jax.tree.leaves(tree)] for tree in (a, b))
    return left == right


def furthest(a, b) -> float:
    """The largest difference between two trees."""
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.max(np.abs(np.array(x) - np.array(y)))), a, b)))


def make_episode(group, member, actions, rewards, *, observations=None, state_ids=None, versions=None):
    """One turn an action (ids without the end of turn), after an observation of 3 ids."""
    rng = np.random.default_rng((group, member))
    tokens, mask, turn_ids = [], [], []
    for turn, action in enumerate(actions):
        read = [1, *rng.integers(4, 400, 2).tolist()] if observations is None else observations[turn]
        tokens += [*read, *action, END]
        mask += [False] * len(read) + [True] * (len(action) + 1)
        turn_ids += [turn] * (len(read) + len(action) + 1)
    episode = Episode(
        episode_id=f"{group:08d}-{member:03d}",
        group_id=group,
        task_id=str(group),
        tokens=tokens,
        action_mask=mask,
        executable_mask=mask,
        turn_ids=turn_ids,
        logprobs=[-1.0 if flag else 0.0 for flag in mask],
        rewards=rewards,
        state_ids=state_ids or list(range(len(actions))),
        versions=versions or [0] * len(actions),
        end_reason="terminated",
        metadata={"actions": [model().tokenizer.decode(action) for action in actions]},
    )
    validate(episode)
    return episode


def make_groups(num_groups=2, group_size=4, seed=0, first=0):
    """Groups of episodes of 2 or 3 turns of random ids, the rewards of each group half 1 and half 0."""
    rng = np.random.default_rng(seed)
    groups = []
    for group in range(first, first + num_groups):
        members = []
        for member in range(group_size):
            actions = [rng.integers(4, 400, rng.integers(1, 4)).tolist() for _ in range(rng.integers(2, 4))]
            rewards = [0.0] * (len(actions) - 1) + [float(member % 2)]
            members.append(make_episode(group, member, actions, rewards))
        groups.append(members)
    return groups


def flat(groups):
    return list(itertools.chain.from_iterable(groups))


def as_sampled(learner, state, episodes):
    """The episodes with the log-probs that the state's policy gives their actions."""
    batch, slots = learner._pack(episodes)
    logprobs = np.array(learner.evaluate(state, batch).logprobs)
    found = []
    for index, episode in enumerate(episodes):
        (row,), (slot,) = np.nonzero(slots == index)
        own = logprobs[row, batch.sequence_ids[row] == slot]
        own = np.where(episode.action_mask, np.minimum(own, 0.0), 0.0)
        found.append(msgspec.structs.replace(episode, logprobs=own.tolist()))
    return found


def prepare(learner, state, episodes):
    """Batch and targets, as `Learner.update` makes them."""
    batch, slots = learner._pack(episodes)
    judged = learner.evaluate(state, batch)
    if "privileged" in learner.algorithm.needs:
        judged = judged.replace(privileged_logprobs=learner._privileged(state, episodes, batch, slots, judged))
    return batch, learner.targets(batch, judged)


def shared_gradient(policy, critic, batch, targets, coefficient, algorithm="mpo"):
    """By hand: of policy loss and value loss together, each of a model with a trunk of its own, which is the same."""
    algorithm, models = algorithms.from_config(algorithm), Models.of(model().config)

    def loss(policy, critic):
        logprobs, _ = models.logprobs(policy, batch)
        values, _ = models.values(whole_critic(policy, critic), batch)
        value = algorithms.value_loss(algorithm, values, targets)[0]
        return algorithms.policy_loss(algorithm, logprobs, batch, targets)[0] + coefficient * value

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(policy, critic)


def rows_of(tree, rows):
    return jax.tree.map(lambda x: x[np.asarray(rows)], tree)
