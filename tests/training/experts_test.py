"""Training of a policy with experts: the load is spread, and an update uses the experts of its evaluation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
from models import tiny

from experiments import environments, parts, playing
from mpo_jax import algorithms
from mpo_jax.models import layout, weights
from mpo_jax.models.actor_critic import Models
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.store.episode import InvalidEpisode, decode, encode
from mpo_jax.training.batching import pack
from mpo_jax.training.learner import Learner
from mpo_jax.training.state import Optimizers, initial_state
from mpo_jax.training.step import make_evaluate, make_train_step
from training import runs

CONFIG = tiny.config(vocab_size=400, num_layers=1, num_experts=4, experts_per_token=2, expert_width=8)
ALGORITHM = algorithms.from_config("dr_grpo")
MODELS = dataclasses.replace(Models.of(CONFIG), router_replay=CONFIG)
SGD = Optimizers(policy=optax.sgd(0.1), critic=optax.sgd(0.1))
evaluate = make_evaluate(ALGORITHM, MODELS)


@functools.cache
def ready():
    """A first state on the host, a batch whose turns are as long in both halves of its rows, and targets."""
    batch, _ = runs.learner("dr_grpo", minibatches=1)._pack(runs.flat(runs.make_groups()))
    state = initial_state(CONFIG, tiny.params(CONFIG), ALGORITHM, SGD)
    judged = evaluate(state, batch)
    targets = jax.jit(functools.partial(algorithms.targets, ALGORITHM))(batch, judged)
    return runs.frozen(state), batch, targets


def test_the_load_balancing_loss_falls_where_it_has_a_coefficient():
    first, batch, targets = ready()
    step, found = make_train_step(ALGORITHM, MODELS, SGD, load_balancing=10.0), []
    targets = targets.replace(experts=None, advantages=jnp.zeros_like(targets.advantages))
    state = jax.tree.map(jnp.array, first)
    for _ in range(6):
        state, metrics = step(state, batch, targets, True)
        found.append({name: float(x) for name, x in metrics.items()})
    assert 2.0 < found[-1]["load_balancing_loss"] < found[0]["load_balancing_loss"]  # 2 = k where all is even
    assert 0 < found[0]["router_entropy"] < np.log(4) and 1 < found[0]["max_load"] <= 2
    moved = {name for name, x in layout.names(first.policy).items() if np.any(layout.names(state.policy)[name] != x)}
    assert "blocks.0.mlp.router.kernel" in moved and "blocks.0.mlp.expert_gate" not in moved


def test_an_update_uses_the_experts_of_the_evaluation():
    first, batch, targets = ready()
    assert targets.experts.shape == (*batch.tokens.shape, 1, 2)
    routed = jax.jit(MODELS.routed)
    same, _, _ = routed(first.policy, batch, None, targets.experts)
    mask = batch.action_mask
    np.testing.assert_allclose(np.asarray(same)[mask], np.asarray(targets.old_logprobs)[mask], atol=1e-6)
    # Another router would choose others, and does not.
    other = jax.tree_util.tree_map_with_path(lambda path, x: -x if "router" in str(path) else x, first.policy)
    changed, _, routing = routed(other, batch, None, targets.experts)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(routing.experts), 0, 2), targets.experts)
    free = evaluate(initial_state(CONFIG, other, ALGORITHM, SGD), batch)
    assert np.any(np.asarray(free.experts) != np.asarray(targets.experts))
    assert np.max(np.abs(np.asarray(free.logprobs - changed)[mask])) > 1e-3


def test_replay_of_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match=r"router_replay: model=.* has no experts"):
        parts.make_models(runs.config(router_replay=True), runs.model())


@functools.cache
def played():
    """A learner that replays, its first state, and episodes of the search environment that came through a store."""
    shape = {"num_layers": 2, "num_experts": 4, "experts_per_token": 2, "expert_width": 8}
    config = dataclasses.replace(runs.model().config, **shape)
    arrays = {name: np.array(x) for name, x in weights.flatten(tiny.params(config)).items()}
    arrays["embedding.embedding"][:, 0], arrays["output.kernel"][0, runs.END] = 1.0, 3.0  # so that turns end
    params = weights.unflatten(weights.shapes(config), arrays)
    model = Pretrained(config, params, runs.model().tokenizer)
    c = runs.config(algorithm="dr_grpo", router_replay=True, minibatches=1)
    algorithm, optimizers = parts.make_algorithm(c), parts.make_optimizers(c)
    learner = Learner(algorithm, parts.make_models(c, model), optimizers, parts.make_settings(c))
    state = parts.make_state(c, model, algorithm, optimizers)
    rollout = playing.make_rollout(c, model, environments.build(c, model.tokenizer), group_size=2, seed=0)
    rollout.engine.load(state.policy, 0)
    return learner, state, [decode(encode(episode)) for episode in playing.play(rollout, 2)]


def test_bug_135_the_experts_of_the_rollout_are_those_of_the_update():
    learner, state, episodes = played()
    assert max(len(e.rewards) for e in episodes) > 1
    assert all(len(e.experts) == 4 * (len(e.tokens) - 1) for e in episodes)  # 2 layers, 2 experts, a byte each
    batch, slots, judged, targets = learner.prepare(state, episodes)
    mask = batch.action_mask
    np.testing.assert_allclose(np.asarray(judged.logprobs)[mask], batch.behavior_logprobs[mask], atol=1e-4)
    # Other routers choose others; what the episodes say is used all the same, and their last tokens are left to them.
    turned = jax.tree_util.tree_map_with_path(lambda path, x: -x if "router" in str(path) else x, state.policy)
    _, _, _, forced = learner.prepare(state.replace(policy=turned), episodes)
    for index, episode in enumerate(episodes):
        (row,), (slot,) = np.nonzero(slots == index)
        own = batch.sequence_ids[row] == slot
        told = np.frombuffer(episode.experts, np.uint8).reshape(-1, 2, 2)
        np.testing.assert_array_equal(np.asarray(forced.experts)[row, own][:-1], told)
        assert np.any(np.asarray(forced.experts)[row, own][-1] != np.asarray(targets.experts)[row, own][-1])
    silent = [msgspec.structs.replace(episode, experts=b"") for episode in episodes]
    _, _, _, free = learner.prepare(state.replace(policy=turned), silent)
    assert np.mean(np.asarray(free.experts)[mask] != np.asarray(forced.experts)[mask]) > 0.5


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (lambda e: e.experts[:-4], r"experts has \d+ bytes, expected \d+: 2 experts of each of 2 layers for each of"),
        (lambda e: e.experts[:-1] + b"\x04", r"experts has 4, expected 0\.\.3"),
    ],
    ids=["a_token_short", "a_fifth"],
)
def test_bug_135_experts_that_do_not_fit_are_refused(experts, message):
    learner, _, (episode, *_) = played()
    spoilt = msgspec.structs.replace(episode, experts=experts(episode))
    with pytest.raises(InvalidEpisode, match=message):
        pack([spoilt], row_tokens=384, row_sequences=1, routed=learner.models.router_replay)
    assert pack([spoilt], row_tokens=384, row_sequences=1)[0].experts is None
