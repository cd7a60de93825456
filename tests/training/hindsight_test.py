"""What successful siblings did, read before the observation: who is asked, what changes, what the log-probs become."""

import jax
import msgspec
import numpy as np
import pytest
from flax import nnx
from models import tiny

from mpo_jax.models.evaluation import token_logprobs
from mpo_jax.store.episode import Episode, validate
from mpo_jax.training.batching import pack
from mpo_jax.training.hindsight import guidance_items, privileged_logprobs, with_guidance

CONFIG = tiny.config()
evaluate = jax.jit(
    lambda params, batch: token_logprobs(nnx.merge(tiny.graph(CONFIG), params), batch)[0], compiler_options=tiny.QUICK
)
HINTS = {"a": [1, 50, 51], "b": [1, 60], "c": [1, 40, 41, 42, 43]}


def make_episode(states, actions, reward=1.0, group=0, seed=0, trailing=0):
    """One turn a state: two tokens read, two or three sampled."""
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(2, 4, len(states))]
    mask = [flag for n in sizes for flag in [False] * 2 + [True] * n] + [False] * trailing
    m = len(states)
    episode = Episode(
        episode_id=f"e{seed}",
        group_id=group,
        task_id="t",
        tokens=rng.integers(4, 64, len(mask)).tolist(),
        action_mask=mask,
        executable_mask=mask,
        turn_ids=[t for t, n in enumerate(sizes) for _ in range(2 + n)] + [m - 1] * trailing,
        logprobs=[-1.0 if flag else 0.0 for flag in mask],
        rewards=[0.0] * (m - 1) + [reward],
        state_ids=states,
        versions=[0] * m,
        end_reason="terminated",
        metadata={"actions": actions},
    )
    validate(episode)
    return episode


def test_an_item_is_what_a_successful_sibling_did_in_the_same_state():
    episodes = [make_episode([1, 2, 3], ["x", "y", "z"]), make_episode([2, 9, 1], ["b", "c", "a"], seed=1)]
    assert guidance_items(episodes, 0) == ["a", "b", None]
    assert guidance_items(episodes, 1) == ["y", None, "x"]


def test_a_state_met_twice_is_guided_twice():
    episodes = [make_episode([1, 1], ["x", "y"]), make_episode([1], ["a"], seed=1)]
    assert guidance_items(episodes, 0) == ["a", "a"]


@pytest.mark.parametrize("changes", [{"group": 1}, {"reward": 0.0}, {"reward": -1.0}, {"reward": float("nan")}])
def test_other_groups_and_failures_say_nothing(changes):
    other = make_episode([1, 2], ["a", "b"], seed=1, **changes)
    assert guidance_items([make_episode([1, 2], ["x", "y"]), other], 0) == [None, None]


def test_its_own_actions_say_nothing_and_its_own_return_is_not_looked_at():
    assert guidance_items([make_episode([1], ["x"])], 0) == [None]
    sibling = make_episode([1], ["a"], seed=1)
    for reward in (1.0, 0.0, float("nan")):
        assert guidance_items([make_episode([1], ["x"], reward=reward), sibling], 0) == ["a"]


def test_of_several_actions_the_one_with_most_siblings_wins_then_the_first():
    said = ["c", "b", "a", "b"]
    siblings = [make_episode([1], [action], seed=i) for i, action in enumerate(said, 1)]
    me = make_episode([1], ["x"])
    assert guidance_items([me, *siblings], 0) == ["b"]
    assert guidance_items([*siblings, me], 4) == ["b"]
    assert guidance_items([me, *siblings[:3]], 0) == ["c"], "one each: the first"
    failed = [msgspec.structs.replace(s, rewards=[0.0]) for s in siblings[1:]]
    assert guidance_items([me, siblings[2], *failed], 0) == ["a"], "failures do not count"


def test_one_sibling_is_one_piece_of_evidence_however_often_it_acts():
    loud = make_episode([1, 1, 1], ["b", "b", "b"], seed=1)
    others = [make_episode([1], ["a"], seed=i) for i in (2, 3)]
    assert guidance_items([make_episode([1], ["x"]), loud, *others], 0) == ["a"]


def test_guidance_is_read_before_its_turns_observation_and_actions_stay():
    episode = make_episode([1, 2, 3], ["x", "y", "z"], trailing=1)
    guided = with_guidance(episode, ["a", None, "b"], HINTS.__getitem__)
    validate(msgspec.structs.replace(guided, logprobs=[0.0] * len(guided.tokens)))
    second, third = episode.turn_ids.index(1), episode.turn_ids.index(2)
    parts = [episode.tokens[:second], episode.tokens[second:third], episode.tokens[third:]]
    assert guided.tokens == HINTS["a"] + parts[0] + parts[1] + HINTS["b"] + parts[2]

    def actions(e):
        return [(t, turn) for t, turn, flag in zip(e.tokens, e.turn_ids, e.action_mask, strict=True) if flag]

    assert actions(guided) == actions(episode)
    assert guided.turn_ids == sorted(guided.turn_ids) and not any(guided.action_mask[:3])
    same = with_guidance(episode, [None] * 3, HINTS.__getitem__)
    assert (same.tokens, same.action_mask, same.turn_ids) == (episode.tokens, episode.action_mask, episode.turn_ids)


EPISODES = [
    make_episode([1, 2], ["x", "y"], reward=0.0, seed=0, trailing=1),  # guided in both turns
    make_episode([1, 3], ["a", "c"], seed=1),  # the successful sibling: no other has met its states with success
    make_episode([3, 2, 7], ["x", "x", "x"], reward=0.0, seed=2),  # guided by c, b, nothing
    make_episode([2], ["b"], seed=3),
    make_episode([1, 2], ["x", "y"], group=5, seed=4),  # a group of its own
]
ITEMS = [["a", "b"], [None, None], ["c", "b", None], [None], [None, None]]


@pytest.mark.parametrize("sequences", [1, 2])
def test_privileged_logprobs_are_those_of_reading_the_items_and_plain_ones_elsewhere(sequences):
    params = tiny.params(CONFIG)
    assert [guidance_items(EPISODES, i) for i in range(5)] == ITEMS
    batch, slots = pack(EPISODES, row_tokens=32, row_sequences=sequences, row_multiple=5)
    plain = np.asarray(evaluate(params, batch))
    found = privileged_logprobs(
        lambda guided: np.asarray(evaluate(params, guided)),
        EPISODES,
        batch,
        slots,
        plain,
        HINTS.__getitem__,
        row_tokens=32,
        row_multiple=5,
    )
    assert found.shape == plain.shape and found.dtype == np.float32
    changed = np.zeros(plain.shape, bool)
    for index, (episode, items) in enumerate(zip(EPISODES, ITEMS, strict=True)):
        ((row, slot),) = np.argwhere(slots == index)
        columns = np.flatnonzero(batch.sequence_ids[row] == slot)
        tokens, where = [], {}
        for t, turn in enumerate(episode.turn_ids):
            if (t == 0 or turn != episode.turn_ids[t - 1]) and items[turn] is not None:
                tokens += HINTS[items[turn]]
            where[t] = len(tokens)
            tokens.append(episode.tokens[t])
        logp = tiny.log_softmax(tiny.oracle(CONFIG, params, tokens))
        for t, turn in enumerate(episode.turn_ids):
            if episode.action_mask[t] and items[turn] is not None:
                direct = logp[where[t] - 1, episode.tokens[t]]
                np.testing.assert_allclose(found[row, columns[t]], direct, atol=1e-4)
                changed[row, columns[t]] = True
    np.testing.assert_array_equal(found[~changed], plain[~changed])
    assert np.abs(found - plain)[changed].min() > 1e-5, "an item does change what it guides"
