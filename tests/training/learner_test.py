"""What a batch does to a state, the order of a run, and which groups a step takes."""

import contextlib
import json
import logging
from unittest import mock

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

from experiments import parts
from mpo_jax import algorithms
from mpo_jax.models import weights
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights, WeightsError
from mpo_jax.training.checkpoints import Checkpoints
from mpo_jax.training.cluster import Cluster
from mpo_jax.training.descriptions import describe, informative
from mpo_jax.training.learner import Learner, Settings
from mpo_jax.training.loop import Loop
from mpo_jax.training.metrics import MetricsLog, read_metrics
from training import runs

GOOD, BAD = 50, 90


def bandit(rewarded):
    """4 groups of 4 over 2 turns each; half of a group say GOOD, half BAD; one of the two is paid for at the end."""
    return [
        runs.make_episode(
            group,
            member,
            [[said], [said]],
            [0.0, float(said == rewarded)],
            observations=[[1, 200 + group, 2], [1, 300 + group, 2]],
        )
        for group in range(4)
        for member, said in enumerate([GOOD, BAD, GOOD, BAD])
    ]


def margin(episodes, rewarded):
    """Mean log-prob of the rewarded token less that of the other."""
    said = {token: [] for token in (GOOD, BAD)}
    for episode in episodes:
        for token, logprob in zip(episode.tokens, episode.logprobs, strict=True):
            if token in said and logprob:
                said[token].append(logprob)
    return np.mean(said[rewarded]) - np.mean(said[GOOD + BAD - rewarded])


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dapo", "gspo", "vc_ppo", "vapo", "sao", "taspo", "mpo"])
def test_what_is_rewarded_becomes_likelier(algorithm):
    learner = runs.learner(algorithm, value_pretraining_steps=0, learning_rate=1e-2, critic_learning_rate=1e-2)
    for rewarded in (GOOD, BAD):
        state, margins = runs.fresh_state(algorithm), []
        for _ in range(11):
            episodes = runs.as_sampled(learner, state, bandit(rewarded))
            margins.append(margin(episodes, rewarded))
            state, metrics = learner.update(state, episodes)
        assert margins[-1] > margins[0] + 0.5, margins
        assert metrics["skipped_updates"] == 0 and int(state.step) == 11


def test_without_a_difference_in_reward_a_group_teaches_nothing():
    """The counterpart: equal rewards, no advantage, not one parameter moves."""
    learner = runs.learner("gspo", value_pretraining_steps=0, learning_rate=1e-2, critic_learning_rate=1e-2)
    state = runs.fresh_state("gspo")
    first = runs.frozen(state.policy)
    equal = [msgspec.structs.replace(episode, rewards=[0.0, 1.0]) for episode in bandit(GOOD)]
    state, _ = learner.update(state, runs.as_sampled(learner, state, equal))
    assert runs.equal(state.policy, first)


def test_value_pretraining_is_asked_for_by_the_algorithm_and_ends():
    learner = runs.learner("mpo", value_pretraining_steps=2)
    assert [learner.pretrains_value(step) for step in range(4)] == [True, True, False, False]
    assert not any(runs.learner("ppo", value_pretraining_steps=2).pretrains_value(step) for step in range(4))
    state = runs.fresh_state("mpo")
    first, moved = runs.frozen(state.policy), []
    episodes = runs.as_sampled(learner, state, runs.flat(runs.make_groups()))
    for _ in range(3):
        state, _ = learner.update(state, episodes)
        moved.append(not runs.equal(state.policy, first))
    assert moved == [False, False, True]
    assert int(optax.tree_utils.tree_get(state.policy_optimizer, "count")) == 2  # minibatches of the third alone
    assert int(optax.tree_utils.tree_get(state.critic_optimizer, "count")) == 6


def test_a_policy_gone_nan_is_refused_counted_and_never_published(tmp_path):
    """BUG-077."""
    learner = runs.learner("mpo", value_pretraining_steps=2)
    state = runs.fresh_state("mpo").replace(step=jnp.int32(5))
    episodes = runs.as_sampled(learner, state, runs.flat(runs.make_groups()))
    flat = weights.flatten(state.policy)
    broken = {**flat, "final_norm.scale": np.full_like(flat["final_norm.scale"], np.nan)}
    state = state.replace(policy=weights.unflatten(state.policy, broken))
    optimizer = runs.frozen(state.policy_optimizer)
    state, metrics = learner.update(state, episodes)
    assert metrics["skipped_updates"] == 2
    assert runs.equal(state.policy_optimizer, optimizer)
    with pytest.raises(WeightsError, match="not finite"):
        PublishedWeights(tmp_path).publish(weights.flatten(state.policy), 6)


def test_metrics_say_what_the_batch_was():
    learner, state = runs.learner("mpo", value_pretraining_steps=2), runs.fresh_state("mpo")
    episodes = runs.as_sampled(learner, state, runs.flat(runs.make_groups()))
    broken = msgspec.structs.replace(episodes[0], rewards=[float("nan")] * len(episodes[0].rewards))
    empty = msgspec.structs.replace(
        episodes[2],
        **{name: [] for name in ("tokens", "action_mask", "executable_mask", "turn_ids", "logprobs")},
        **{name: [] for name in ("rewards", "state_ids", "versions")},
        metadata={"actions": [], "error": "OSError: no documents"},
    )
    _, metrics = learner.update(state, [broken, episodes[1], empty, *episodes[3:]])
    assert metrics["episodes"] == 8 and metrics["failed_environments"] == 1
    assert metrics["nonfinite_rewards"] == 1
    assert metrics["success"] == pytest.approx(4 / 8)  # members 1 and 3 of both groups
    assert metrics["return"] == pytest.approx(4 / 7)  # the NaN is in no mean; the empty one is 0
    assert metrics["tokens"] == sum(len(e.tokens) for e in episodes) - len(episodes[2].tokens)
    assert metrics["rows"] == 4 and 0 < metrics["fill"] < 1
    assert metrics["waste"] == pytest.approx(1 - metrics["fill"], abs=1e-6)
    assert metrics["version_lag"] == 0
    expected = {"clip_fraction", "entropy", "explained_variance", "grad_norm", "value_grad_norm", "value_loss"}
    assert expected <= metrics.keys()
    assert all(isinstance(x, float) for x in metrics.values())


def without_reward(episode):
    return msgspec.structs.replace(episode, rewards=[float("nan")] * len(episode.rewards))


def test_an_episode_without_a_finite_reward_is_in_no_mean_over_tokens():
    """Its returns and old log-probs are 0 by then: as facts they would be a critic's failure and a ratio of e⁻¹⁰⁰."""
    learner, state = runs.learner("mpo", minibatches=1), runs.fresh_state("mpo")
    episodes = runs.as_sampled(learner, state, runs.flat(runs.make_groups()))
    batch, _, judged, targets = learner.prepare(state, [without_reward(episodes[0]), *episodes[1:]])
    counted = np.asarray(targets.value_weights) > 0
    assert 0 < counted.sum() < batch.action_mask.sum()
    judged = judged.replace(
        values=np.where(counted, targets.returns, np.float32(7)),
        entropy=np.where(counted, np.float32(1), np.float32(9)),
    )
    found = learner.diagnose(state, batch, judged, targets, batch, targets)
    assert found["nonfinite_rewards"] == 1 and found["entropy"] == 1 and found["explained_variance"] == 1
    assert found["behavior_kl"] == pytest.approx(0, abs=1e-6)  # the engine's log-probs are the policy's
    assert found["effective_sample_size"] == pytest.approx(1, abs=1e-6)  # which has not moved: all ratios are 1


def test_what_the_critic_explains_of_held_out_episodes_leaves_those_without_a_finite_reward_out():
    learner, state = runs.learner("mpo", minibatches=1), runs.fresh_state("mpo")
    flat, rng = weights.flatten(state.critic), np.random.default_rng(0)
    head = rng.normal(size=flat["value.kernel"].shape).astype(np.float32)
    state = state.replace(critic=weights.unflatten(state.critic, {**flat, "value.kernel": head}))
    episodes = runs.flat(runs.make_groups())
    found = learner.explained_variance(state, [without_reward(episodes[1]), *episodes[2:]])
    assert found == pytest.approx(learner.explained_variance(state, episodes[2:]), rel=1e-4)
    assert found < -0.1


def test_the_version_lag_is_counted_in_steps():
    """BUG-143: mean staleness is reported."""
    episodes = [runs.make_episode(0, 0, [[9], [9]], [0.0, 1.0], versions=[1, 3])]
    described = describe(episodes, step=4)
    assert described["version_lag"] == pytest.approx(2.0)  # (3 + 1) / 2
    assert described["version_lag_max"] == 3


def test_an_episode_longer_than_a_row_is_refused_by_name():
    learner, state = runs.learner("mpo", value_pretraining_steps=2), runs.fresh_state("mpo")
    with pytest.raises(ValueError, match=r"episode 00000000-001 has 73 tokens, a row holds row_tokens=64"):
        learner.update(state, [runs.make_episode(0, 0, [[9]], [1.0]), runs.make_episode(0, 1, [[9] * 69], [1.0])])


def test_waste_is_padding_and_some_of_it_empty_rows():
    """Two episodes of 12 tokens beside each other in a row of 64; three more rows are there for the sake of the shape.

    Fill 24 / 256, waste 232 / 256, of which 3 · 64 / 256 in rows that hold nothing.
    """
    learner, state = runs.learner("mpo", value_pretraining_steps=2), runs.fresh_state("mpo")
    episodes = [runs.make_episode(0, member, [[9, 9], [9, 9]], [0.0, 1.0]) for member in range(2)]
    assert [len(episode.tokens) for episode in episodes] == [12, 12]
    _, metrics = learner.update(state, runs.as_sampled(learner, state, episodes))
    found = [metrics[name] for name in ("fill", "waste", "waste_empty_rows")]
    assert found == pytest.approx([24 / 256, 232 / 256, 3 / 4])


# The reference policy.


def reference_after(decay, updates=2):
    """A state after some batches of GRPO, and the policies before the first and after each."""
    learner = runs.learner("grpo", reference_decay=decay, learning_rate=1e-2)
    state = runs.fresh_state("grpo")
    policies = [runs.frozen(state.policy)]
    for _ in range(updates):
        state, _ = learner.update(state, runs.as_sampled(learner, state, bandit(GOOD)))
        policies.append(runs.frozen(state.policy))
    assert not runs.equal(policies[0], policies[1])
    return learner, state, policies


def test_a_reference_that_keeps_everything_is_frozen():
    _, state, policies = reference_after(1.0)
    assert runs.equal(state.reference, policies[0])


def test_a_reference_that_keeps_nothing_is_the_policy_before_the_batch():
    """So KL to it is KL to the policy that was evaluated: ref_logprobs are the logprobs, bit for bit."""
    learner, state, policies = reference_after(0.0)
    assert runs.equal(state.reference, policies[-1])
    judged = learner.evaluate(state, learner._pack(bandit(GOOD))[0])
    assert runs.equal(judged.ref_logprobs, judged.logprobs)


def test_a_reference_is_an_exponential_average_of_the_policies():
    """From p0, after batches that end in p1 and p2: .25 p0 + .25 p1 + .5 p2."""
    _, state, (first, second, third) = reference_after(0.5)
    expected = jax.tree.map(lambda a, b, c: 0.25 * a + 0.25 * b + 0.5 * c, first, second, third)
    assert runs.furthest(state.reference, expected) < 1e-6 < runs.furthest(state.reference, third)


def test_a_reference_cannot_follow_where_there_is_none():
    for changes, message in [
        ({"algorithm": "mpo"}, "reference_decay=0.9, expected 1: mpo has no reference"),
        ({"algorithm": "grpo", "lora": {"rank": 2}}, "reference_decay=0.9, expected 1: grpo's adapters are compared"),
        ({"reference_decay": 1.5}, "reference_decay=1.5, expected a number from 0 to 1"),
    ]:
        c = runs.config(**{"reference_decay": 0.9} | changes)
        with pytest.raises(ValueError, match=message):
            built = parts.make_algorithm(c), parts.make_models(c, runs.model()), parts.make_optimizers(c)
            Learner(*built, parts.make_settings(c))


def test_privileged_algorithms_need_guidance():
    c = runs.config(algorithm="taspo")
    arguments = (parts.make_algorithm(c), parts.make_models(c, runs.model()), parts.make_optimizers(c))
    with pytest.raises(ValueError, match="taspo needs guidance"):
        Learner(*arguments, parts.make_settings(c))


# The order of a run, with a learner and surroundings that only write down what happens.


def play(what, **attributes):
    """Something that passes for an object of a class, and has these attributes."""
    return mock.Mock(spec=what, **attributes)


class Diary:
    """Plays everything that `Loop` needs; batches become ready after `delay` waits."""

    def __init__(self, num_steps, *, checkpoint_every=2, evaluate_every=10, delay=1, stop_at=None):
        self.settings = Settings(
            num_steps=num_steps,
            groups_per_step=1,
            checkpoint_every=checkpoint_every,
            evaluate_every=evaluate_every,
        )
        self.events, self.delay, self.ready, self.stop_at = [], delay, 0, stop_at
        self.learner = play(
            Learner,
            settings=self.settings,
            take=self.take,
            update=self.update,
            policy=lambda state: state.policy,
            cluster=Cluster(),
        )

    def note(self, what, step=None):
        self.events.append(what if step is None else f"{what} {step}")

    def take(self, store, step):
        if self.ready < self.delay:
            return None
        self.ready = 0
        self.note("take", step)
        return [["episode"]]

    def wait(self):
        self.ready += 1
        self.note("wait")

    def update(self, state, episodes):
        assert episodes == ["episode"]
        self.note("update", int(state.step))
        return state.replace(step=state.step + 1), {"tokens": 1.0, "padded_tokens": 2.0}

    def should_stop(self):
        return self.stop_at is not None and self.stop_at in self.events

    def run(self, step=0):
        state = runs.fresh_state("gspo").replace(step=jnp.int32(step))
        surroundings = [
            play(EpisodeStore, rewind=lambda s: self.note("rewind", s), pending=lambda: 0),
            play(PublishedWeights, publish=lambda params, version: self.note("publish", version)),
            play(Checkpoints, save=lambda s, state: self.note(f"save {int(state.step)} as", s)),
            play(
                MetricsLog,
                write=lambda s, metrics: self.note("write", s),
                traced=lambda s: contextlib.nullcontext(),
            ),
        ]

        def evaluate(state):
            self.note("evaluate", int(state.step))
            return {}

        return Loop(self.learner, *surroundings, self.wait, evaluate, self.should_stop).run(state)


def test_the_order_of_a_run():
    diary = Diary(3)
    assert int(diary.run().step) == 3
    assert diary.events == [
        *("rewind -1", "publish 0", "evaluate 0"),
        *("wait", "take 0", "update 0", "publish 1", "write 0"),
        *("wait", "take 1", "update 1", "publish 2", "write 1", "save 2 as 2"),
        *("wait", "take 2", "update 2", "publish 3", "write 2", "save 3 as 3"),
        *("evaluate 3", "write 3"),
    ]


def test_a_resumed_run_gives_back_later_groups_and_goes_on():
    """BUG-146: also at a step that a round of anything ends with."""
    diary = Diary(4, evaluate_every=2)
    assert int(diary.run(step=2).step) == 4
    assert diary.events[:4] == ["rewind 1", "publish 2", "evaluate 2", "wait"]
    assert [e for e in diary.events if e.startswith("update")] == ["update 2", "update 3"]


def test_a_finished_run_only_measures_itself_again():
    diary = Diary(3)
    diary.run(step=3)
    assert diary.events == ["rewind 2", "publish 3", "evaluate 3", "write 3"]


def test_evaluations_are_counted_in_steps():
    """BUG-073."""
    diary = Diary(20, evaluate_every=10, checkpoint_every=5)
    diary.run()
    assert [e for e in diary.events if e.startswith("evaluate")] == ["evaluate 0", "evaluate 10", "evaluate 20"]
    saves = [e for e in diary.events if e.startswith("save")]
    assert saves == ["save 5 as 5", "save 10 as 10", "save 15 as 15", "save 20 as 20"]


@pytest.mark.parametrize(
    ("stop_at", "last"),
    [("write 0", ["write 0", "save 1 as 1"]), ("write 1", ["write 1", "save 2 as 2"]), ("publish 0", ["publish 0"])],
)
def test_told_to_stop_it_ends_with_one_checkpoint(stop_at, last):
    diary = Diary(5, stop_at=stop_at)
    diary.run()
    assert diary.events[-len(last) :] == last
    assert sum(e.startswith("save") for e in diary.events) <= 1


def test_told_to_stop_while_it_waits_it_ends_too():
    diary = Diary(5, delay=10**9, stop_at="wait")
    assert int(diary.run().step) == 0
    assert diary.events == ["rewind -1", "publish 0", "evaluate 0", "wait"]


def test_what_waiting_raises_ends_the_run():
    """BUG-139: a dead worker is an error within one poll; a slow one is not."""
    diary = Diary(5, delay=50)
    diary.stop_at = "write 0"
    diary.run()
    assert diary.events.count("wait") == 50

    def dead():
        raise RuntimeError("the rollout worker ended with code -9; see rollout.log")

    diary = Diary(5)
    diary.wait = dead
    with pytest.raises(RuntimeError, match=r"rollout\.log"):
        diary.run()
    assert not any(e.startswith(("update", "save")) for e in diary.events)


@pytest.mark.parametrize(("algorithm", "changes"), [("mpo", {}), ("grpo", {"reference_decay": 0.5})])
def test_a_run_over_a_store_can_be_interrupted_anywhere(tmp_path, algorithm, changes):
    """5 steps in one go; or 3, the last unsaved, then a new process's objects: the same state and numbers, bit for bit.

    Also of a reference that follows the policy. BUG-146, BUG-148, BUG-149.
    """
    learner = runs.learner(algorithm, num_steps=5, **changes)
    groups = runs.make_groups(10, 4)

    def run(folder, stop_after=None, crash=False):
        folder.mkdir(exist_ok=True)
        store, checkpoints = EpisodeStore(folder / "episodes.sqlite"), Checkpoints(folder / "checkpoints")
        for group in groups:
            store.add(group[0].group_id, group)
        state = runs.fresh_state(algorithm)
        if restored := checkpoints.restore(state):
            state = restored[1]
        start, log = int(state.step), MetricsLog(folder, total_steps=5, first_step=int(state.step), quiet=True)
        done = []

        def stop():
            if stop_after is not None and len(done) > stop_after:
                if crash:
                    raise KeyboardInterrupt
                return True
            done.append(1)
            return False

        def no_groups():
            raise AssertionError("the store has groups for every step")

        with contextlib.suppress(KeyboardInterrupt):
            published = PublishedWeights(folder / "weights")
            loop = Loop(learner, store, published, checkpoints, log, no_groups, lambda state: {}, stop)
            state = loop.run(state)
        log.close(), checkpoints.close(), store.close()
        return start, runs.frozen(state) if not crash else None

    def numbers(folder):
        timed = ("seconds", "tokens_per_second", "overlap")
        rows = read_metrics(folder / "metrics.jsonl")
        return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    _, expected = run(whole)
    run(broken, stop_after=2, crash=True)  # trained on steps 0, 1 and 2; the checkpoint is of 2
    assert [row["step"] for row in numbers(broken)] == [0, 1, 2]
    start, found = run(broken)
    assert start == 2
    assert runs.equal(found, expected)
    assert numbers(broken) == numbers(whole)
    assert [row["step"] for row in numbers(whole)] == [0, 1, 2, 3, 4, 5]
    assert runs.equal(*(PublishedWeights(f / "weights").load()[0] for f in (whole, broken)))
    assert json.loads((whole / "metrics.jsonl").read_text().splitlines()[0])["step"] == 0


# Which groups a step takes.


def stored(tmp_path, kinds, first=0):
    """A store with a group for each letter: i = informative, c = constant rewards."""
    store = EpisodeStore(tmp_path / "episodes.sqlite")
    for index, kind in enumerate(kinds, start=first):
        (group,) = runs.make_groups(1, 2, first=index)
        if kind == "c":
            group = [msgspec.structs.replace(e, rewards=[0.0] * len(e.rewards)) for e in group]
        store.add(index, group)
    return store


def taken(groups):
    return None if groups is None else [group[0].group_id for group in groups]


@pytest.fixture(scope="module")
def sampler():
    return runs.learner("dapo", groups_per_step=2)


def test_dynamic_sampling_refills_the_batch(tmp_path, sampler):
    """BUG-054: 2 of the first 4 teach nothing; the batch is whole nevertheless, and the next begins after it."""
    store = stored(tmp_path, "cicici")
    assert taken(sampler.take(store, 0)) == [1, 3]
    assert taken(sampler.take(store, 0)) == [1, 3]  # asking again gives the same
    assert store.pending() == 2
    assert sampler.take(store, 1) is None  # 4 is dropped; 5 alone is no batch
    stored(tmp_path, "i", first=6)
    assert taken(sampler.take(store, 1)) == [5, 6]


def test_dynamic_sampling_ends_at_its_cap(tmp_path, sampler):
    """BUG-054: 3 times the batch may be passed over, then groups are taken as they come."""
    store = stored(tmp_path, "c" * 8)
    assert taken(sampler.take(store, 0)) == [6, 7]


def test_the_cap_counts_over_waits(tmp_path, sampler):
    store = stored(tmp_path, "c" * 4)
    assert sampler.take(store, 0) is None
    stored(tmp_path, "c" * 4, first=4)
    assert taken(sampler.take(store, 0)) == [6, 7]


def test_rewinding_gives_dropped_groups_back(tmp_path, sampler):
    store = stored(tmp_path, "cicici" + "ii")
    first = [taken(sampler.take(store, step)) for step in (0, 1)]
    assert first == [[1, 3], [5, 6]]
    store.rewind(-1)
    assert store.pending() == 8
    assert [taken(sampler.take(store, step)) for step in (0, 1)] == first
    store.rewind(0)
    assert taken(sampler.take(store, 1)) == [5, 6]


def test_other_algorithms_take_groups_as_they_come(tmp_path):
    learner = runs.learner("mpo", num_steps=5)
    assert taken(learner.take(stored(tmp_path, "ccic"), 0)) == [0, 1]


def test_informative_is_the_rule_of_the_advantages():
    """A NaN reward says nothing; noise is no difference; one episode is no group."""

    def group(*rewards):
        return [runs.make_episode(0, i, [[9]], [r]) for i, r in enumerate(rewards)]

    cases = {(0.0, 1.0): True, (1.0, 1.0): False, (1.0,): False, (1.0, 1.0 + 1e-7): False, (0.0, float("nan")): False}
    assert {rewards: informative(group(*rewards)) for rewards in cases} == cases


def test_a_batch_of_uninformative_groups_trains_nothing_and_breaks_nothing(caplog):
    """DAPO past its cap: weights are 0 on every token."""
    learner, state = runs.learner("dapo", groups_per_step=2), runs.fresh_state("dapo")
    first = runs.frozen(state.policy)
    episodes = [msgspec.structs.replace(e, rewards=[0.0] * len(e.rewards)) for e in runs.flat(runs.make_groups())]
    with caplog.at_level(logging.WARNING):
        state, metrics = learner.update(state, runs.as_sampled(learner, state, episodes))
    assert runs.equal(state.policy, first)
    assert metrics["skipped_updates"] == 0 and np.isfinite(metrics["policy_loss"])
    assert algorithms.ALGORITHMS["dapo"]().needs == {"group_filter"}


# Sizes that do not go together.


def test_rows_must_be_divisible():
    with pytest.raises(ValueError, match=r"row_multiple=6 is not a multiple of minibatches·microbatches=4"):
        Settings(num_steps=1, groups_per_step=1, minibatches=2, microbatches=2, row_multiple=6)
