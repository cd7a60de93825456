"""Packing read back, and losses and gradients that no layout, padding or split into microbatches changes."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny

from mpo_jax import algorithms, kernels
from mpo_jax.models import weights
from mpo_jax.models.actor_critic import Models
from mpo_jax.store.episode import Episode, validate
from mpo_jax.training.batching import fill, first_fit_decreasing, pack, row_order
from mpo_jax.training.microbatches import accumulate
from mpo_jax.training.state import TrainState
from mpo_jax.training.step import make_evaluate

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, database=None)
ENDS = ("terminated", "truncated", "turn_limit", "token_limit")


def make_episode(turns, *, seed=0, group=0, name="e", trailing=0, rewards=None):
    """An episode whose turns read and sample the given numbers of tokens, [(read, sampled), …]."""
    rng = np.random.default_rng(seed)
    mask, ids = [], []
    for turn, (read, sampled) in enumerate(turns):
        mask += [False] * read + [True] * sampled
        ids += [turn] * (read + sampled)
    mask, ids = mask + [False] * trailing, ids + [len(turns) - 1] * trailing
    m = len(turns)
    episode = Episode(
        episode_id=name,
        group_id=group,
        task_id="t",
        tokens=rng.integers(4, 64, len(mask)).tolist(),
        action_mask=mask,
        executable_mask=[bool(x) and rng.random() < 0.7 for x in mask],
        turn_ids=ids,
        logprobs=[-float(rng.random()) if x else 0.0 for x in mask],
        rewards=rng.normal(size=m).tolist() if rewards is None else rewards,
        state_ids=rng.integers(0, 9, m).tolist(),
        versions=rng.integers(3, 9, m).tolist(),
        end_reason=ENDS[seed % 4],
    )
    validate(episode)
    return episode


@st.composite
def episodes(draw):
    turns = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=4)
    return [
        make_episode(
            draw(turns), seed=i, group=draw(st.integers(70, 72)), name=f"e{i}", trailing=draw(st.integers(0, 2))
        )
        for i in range(draw(st.integers(0, 8)))
    ]


@SETTINGS
@given(st.lists(st.integers(0, 20), max_size=30), st.integers(20, 40), st.integers(1, 4))
def test_first_fit_decreasing_places_every_item_once_within_its_row(lengths, capacity, max_items):
    rows = first_fit_decreasing(lengths, capacity, max_items)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for number, row in enumerate(rows):
        assert 1 <= len(row) <= max_items and sum(lengths[i] for i in row) <= capacity
        assert [lengths[i] for i in row] == sorted((lengths[i] for i in row), reverse=True)
        for earlier in rows[:number]:  # first fit: what opened a row fitted in no earlier one
            ahead = [i for i in earlier if (-lengths[i], i) < (-lengths[row[0]], row[0])]
            assert len(ahead) == max_items or sum(lengths[i] for i in ahead) + lengths[row[0]] > capacity


def test_first_fit_decreasing_of_literals():
    # Rows of 10: 7, then 6, then 4 beside 6, 3 beside 7, 2 in a row of its own. At most one a row: longest first.
    assert first_fit_decreasing([3, 7, 2, 6, 4], 10, 3) == [[1, 0], [3, 4], [2]]
    assert first_fit_decreasing([3, 7, 2], 10, 1) == [[1], [0], [2]]
    assert first_fit_decreasing([5, 5, 5], 10, 2) == [[0, 1], [2]], "equal lengths in order"


def test_an_episode_longer_than_a_row_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="episode 1 has 11 tokens; a row holds 10"):
        first_fit_decreasing([3, 11], 10, 2)
    with pytest.raises(ValueError, match="episode e has 4 tokens, a row holds row_tokens=3"):
        pack([make_episode([(1, 3)])], row_tokens=3, row_sequences=1)


def expected_row(members, length, sequences, numbers):
    """The fields of one row, built a token at a time."""
    tokens = {
        "tokens": [], "positions": [], "sequence_ids": [], "turn_ids": [], "action_mask": [], "executable_mask": [],
        "rewards": [], "behavior_logprobs": [], "state_ids": [],
    }  # fmt: skip
    first = 0
    for slot, e in enumerate(members):
        for t, turn in enumerate(e.turn_ids):
            later = any(e.action_mask[u] and e.turn_ids[u] == turn for u in range(t + 1, len(e.tokens)))
            last = e.action_mask[t] and not later
            values = (e.tokens[t], t, slot, first + turn, e.action_mask[t], e.executable_mask[t],
                      e.rewards[turn] if last else 0.0, e.logprobs[t], e.state_ids[turn])  # fmt: skip
            for field, value in zip(tokens.values(), values, strict=True):
                field.append(value)
        first += len(e.rewards)
    pads = (0, 0, -1, -1, False, False, 0.0, 0.0, -1)
    row = {name: x + [pad] * (length - len(x)) for (name, x), pad in zip(tokens.items(), pads, strict=True)}
    rest = sequences - len(members)
    return row | {
        "group_ids": [numbers[e.group_id] for e in members] + [-1] * rest,
        "truncated": [e.end_reason != "terminated" for e in members] + [False] * rest,
        "policy_version": [min(e.versions) for e in members] + [0] * rest,
    }


@SETTINGS
@given(episodes(), st.integers(1, 3), st.integers(1, 3))
def test_bug_004_006_every_field_is_what_the_episodes_say(found, sequences, multiple):
    batch, slots = pack(found, row_tokens=32, row_sequences=sequences, row_multiple=multiple)
    assert slots.shape == batch.group_ids.shape and len(slots) % multiple == 0
    assert sorted(slots[slots >= 0]) == list(range(len(found)))
    used = (slots >= 0).any(axis=1).sum()
    assert len(slots) - max(used, 1) < multiple and not (slots[used:] >= 0).any(), "no more empty rows than needed"
    numbers = {group: i for i, group in enumerate(dict.fromkeys(e.group_id for e in found))}
    for b in range(len(slots)):
        members = [found[i] for i in slots[b] if i >= 0]
        for name, expected in expected_row(members, 32, sequences, numbers).items():
            np.testing.assert_array_equal(
                getattr(batch, name)[b], np.array(expected, getattr(batch, name).dtype), err_msg=name
            )
        present = batch.turn_ids[b][batch.turn_ids[b] >= 0]
        assert list(dict.fromkeys(present.tolist())) == list(range(sum(len(e.rewards) for e in members)))
        owners = collections.defaultdict(set)
        for turn, sequence in zip(batch.turn_ids[b], batch.sequence_ids[b], strict=True):
            owners[turn].add(sequence)
        assert all(len(x) == 1 for x in owners.values()), "no turn is shared"
    total = sum(sum(e.rewards) for e in found)
    np.testing.assert_allclose(batch.rewards.sum(), total, atol=1e-5)
    assert (batch.rewards[~batch.action_mask] == 0).all()


def test_types_are_those_of_trajectories():
    batch, _ = pack([make_episode([(2, 2)])], row_tokens=8, row_sequences=2)
    kinds = {name: str(x.dtype) for name, x in vars(batch).items() if x is not None}
    floats, flags = {"rewards", "behavior_logprobs"}, {"action_mask", "executable_mask", "truncated"}
    assert kinds == {n: "float32" if n in floats else "bool" if n in flags else "int32" for n in kinds}


def test_bug_004_each_user_turn_is_unmasked_and_belongs_to_the_turn_it_precedes():
    # U U U A A U U A A A: the bug's mask 0001100111; our turn ids give an observation to the turn after it.
    batch, _ = pack([make_episode([(3, 2), (2, 3)])], row_tokens=10, row_sequences=1)
    np.testing.assert_array_equal(batch.action_mask[0].astype(int), [0, 0, 0, 1, 1, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(batch.turn_ids[0], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1])


def test_bug_006_a_sampled_end_equal_to_padding_is_active_and_the_padding_is_not():
    # sampled 5 6 0 where 0 is also the padding id, in a row of 5.
    episode = msgspec.structs.replace(make_episode([(0, 3)]), tokens=[5, 6, 0])
    batch, _ = pack([episode], row_tokens=5, row_sequences=1)
    np.testing.assert_array_equal(batch.tokens[0], [5, 6, 0, 0, 0])
    np.testing.assert_array_equal(batch.action_mask[0], [True, True, True, False, False])
    np.testing.assert_array_equal(batch.rewards[0] != 0, [False, False, True, False, False])


def test_bug_010_031_a_cut_turn_gets_no_end_and_truncation_is_the_records_not_the_widths():
    cut = msgspec.structs.replace(make_episode([(0, 3)]), tokens=[21, 22, 23], end_reason="token_limit")
    full = msgspec.structs.replace(make_episode([(1, 4)]), end_reason="terminated")
    batch, slots = pack([cut, full], row_tokens=5, row_sequences=1)
    row, wide = (int(np.flatnonzero(slots[:, 0] == i)[0]) for i in (0, 1))
    np.testing.assert_array_equal(batch.tokens[row], [21, 22, 23, 0, 0])
    assert batch.action_mask[row].sum() == 3 and np.count_nonzero(batch.behavior_logprobs[row]) == 3
    assert batch.truncated[row, 0] and not batch.truncated[wide, 0]


def test_bug_016_behavior_logprobs_and_executable_mask_are_empty_where_the_action_mask_is():
    batch, _ = pack([make_episode([(2, 2), (3, 1)], trailing=2)], row_tokens=16, row_sequences=1)
    assert not batch.behavior_logprobs[~batch.action_mask].any() and not batch.executable_mask[~batch.action_mask].any()


def test_bug_118_what_one_episode_lacks_the_others_keep():
    kept = [make_episode([(1, 2)], seed=i, name=f"e{i}") for i in range(3)]
    nan = msgspec.structs.replace(kept[0], rewards=[math.nan])
    batch, slots = pack([*kept[1:], nan], row_tokens=8, row_sequences=2)
    for index, episode in enumerate((kept[1], kept[2], nan)):
        ((row, slot),) = np.argwhere(slots == index)
        span = batch.sequence_ids[row] == slot
        np.testing.assert_allclose(batch.behavior_logprobs[row, span], episode.logprobs, rtol=1e-6)
        np.testing.assert_allclose(batch.rewards[row, span][-1], episode.rewards[0])
    assert np.isnan(batch.rewards).sum() == 1, "NaN is kept, where the turn's reward lies"


def test_fill_is_the_share_of_real_tokens():
    batch, _ = pack([make_episode([(2, 3)]), make_episode([(1, 2)])], row_tokens=8, row_sequences=2, row_multiple=2)
    assert fill(batch) == 8 / 16


def test_long_tailed_lengths_fill_rows_to_99_percent():
    """512 episodes of lognormal lengths with a median of 4,000 tokens, in rows of 32,768."""
    lengths = np.random.default_rng(0).lognormal(np.log(4000), 1.0, 512).astype(int).clip(64, 32_768)
    rows = first_fit_decreasing(lengths.tolist(), 32_768, 64)
    assert sum(lengths) / (len(rows) * 32_768) >= 0.99
    assert sum(lengths) / (len(lengths) * 32_768) < 0.25, "one episode a row"


def test_row_order_is_a_seeded_permutation():
    order = row_order(3, 5, 1, 50)
    np.testing.assert_array_equal(np.sort(order), np.arange(50))
    np.testing.assert_array_equal(order, row_order(3, 5, 1, 50))
    others = [row_order(4, 5, 1, 50), row_order(3, 6, 1, 50), row_order(3, 5, 2, 50), row_order(5, 3, 1, 50)]
    assert not any(np.array_equal(order, other) for other in others) and not np.array_equal(order, np.arange(50))


# Layouts of eight episodes of two groups: alone in rows of 14, two in rows of 28, alone in rows of 28, all with
# empty rows up to a multiple of four.
CONFIG = tiny.config(num_layers=1)
ROLLOUT = [
    make_episode(
        turns, seed=i, group=i // 4, name=f"e{i}", trailing=i % 2, rewards=[0.0] * (len(turns) - 1) + [float(r)]
    )
    for i, (turns, r) in enumerate(
        [
            ([(2, 3), (2, 2)], 1.0),
            ([(2, 1), (3, 4)], 0.0),
            ([(2, 2)], 0.0),
            ([(2, 2), (1, 1), (2, 3)], 1.0),
            ([(3, 5)], 0.0),
            ([(3, 1), (1, 2), (1, 1)], 1.0),
            ([(3, 4), (2, 1)], 0.0),
            ([(3, 1)], 0.0),
        ]
    )
]
LAYOUTS = {"alone": (14, 1), "packed": (28, 2), "wide": (28, 1)}
ALGORITHMS = {"mpo": algorithms.mpo(bootstrap_truncated=True), "grpo": algorithms.grpo(kl_coefficient=0.1)}


@functools.cache
def models():
    built, policy, critic = Models.create(CONFIG, seed=0)
    return built, tiny.stirred(policy, 1), tiny.stirred(critic, 2)


@functools.cache
def layout(name):
    tokens, sequences = LAYOUTS[name]
    return pack(ROLLOUT, row_tokens=tokens, row_sequences=sequences, row_multiple=4)[0]


@functools.cache
def update(algorithm_name, layout_name, num_microbatches=1):
    """Losses, metrics and gradients of one update, of parameters a little away from those that were evaluated."""
    algorithm, batch = ALGORITHMS[algorithm_name], layout(layout_name)
    built, policy, critic = models()
    state = TrainState(
        step=jnp.int32(0), policy=policy, critic=critic, reference=tiny.stirred(policy, 3, 0.05),
        policy_optimizer=(), critic_optimizer=(), skipped=jnp.int32(0),
        critic_best=jnp.float32(0), critic_stale=jnp.int32(0),
    )  # fmt: skip
    moved, moved_critic = tiny.stirred(policy, 4, 0.01), tiny.stirred(critic, 5, 0.1)
    evaluate = make_evaluate(algorithm, built, num_microbatches)

    def policy_objective(params, rows, constants):
        return algorithms.policy_loss(algorithm, built.logprobs(params, rows)[0], rows, constants)

    def value_objective(params, rows, constants):
        return algorithms.value_loss(algorithm, built.values(params, rows)[0], constants)

    @functools.partial(jax.jit, compiler_options=tiny.QUICK)
    def run(state, moved, moved_critic, batch):
        constants = algorithms.targets(algorithm, batch, evaluate(state, batch))
        found = {"policy": accumulate(policy_objective, moved, (batch, constants), num_microbatches)}
        if algorithm.value_loss is not None:
            found["value"] = accumulate(value_objective, moved_critic, (batch, constants), num_microbatches)
        return found

    found = run(state, moved, moved_critic, batch)
    return {name: (loss, metrics, weights.flatten(grads)) for name, (loss, metrics, grads) in found.items()}


def assert_same_update(found, expected):
    assert found.keys() == expected.keys()
    for name, (loss, metrics, grads) in expected.items():
        assert abs(loss) > 1e-3 and max(np.abs(x).max() for x in grads.values()) > 1e-3, "not equal for being nothing"
        # The loss is the small sum of terms of size 1 that cancel: float32 noise is relative to the terms.
        np.testing.assert_allclose(found[name][0], loss, rtol=1e-6, atol=1e-6, err_msg=name)
        for metric, value in metrics.items():
            np.testing.assert_allclose(found[name][1][metric], value, rtol=1e-6, atol=1e-6, err_msg=metric)
        norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in grads.values()))
        for parameter, x in grads.items():
            np.testing.assert_allclose(found[name][2][parameter], x, rtol=0, atol=1e-6 * norm, err_msg=parameter)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("other", ["packed", "wide"])
def test_bug_087_123_no_packing_and_no_padding_changes_losses_or_gradients(algorithm, other):
    shapes = {name: layout(name).tokens.shape for name in LAYOUTS}
    assert shapes == {"alone": (8, 14), "packed": (4, 28), "wide": (8, 28)}
    assert_same_update(update(algorithm, other), update(algorithm, "alone"))


@pytest.mark.parametrize(("algorithm", "parts"), [("mpo", 2), ("mpo", 4), ("grpo", 2)])
def test_bug_059_066_067_microbatches_change_nothing(algorithm, parts):
    assert_same_update(update(algorithm, "packed", parts), update(algorithm, "packed"))


def weighted_sum(params, weights, x):
    """Σ weights·x·p with its gradient Σ weights·x, and the count of weights as a metric."""
    return jnp.sum(weights * x) * params["p"].get_value(), {"weight": jnp.sum(weights)}


def masked_rows(*lengths):
    mask = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
    ids = np.where(mask, 0, -1)
    return mask, kernels.token_mean(mask, ids, ids)


@pytest.mark.parametrize(
    ("lengths", "values", "right"),
    [
        ((100, 900), (0.5, 0.3), 0.32),  # BUG-059: (100·.5 + 900·.3)/1000; a mean of means is .40
        ((10, 100), (1.0, 0.0), 10 / 110),  # BUG-067: a mean of means is .5
    ],
    ids=["bug_059", "bug_067"],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_bug_059_067_microbatches_add_up_to_the_token_mean_of_the_whole_batch(lengths, values, right, parts):
    mask, weight = masked_rows(*lengths)
    x = mask * np.array(values, np.float32)[:, None]
    params = nnx.State({"p": nnx.Param(jnp.float32(1))})
    loss, metrics, grads = accumulate(weighted_sum, params, (weight, x), parts)
    np.testing.assert_allclose(loss, right, rtol=1e-5)
    np.testing.assert_allclose(grads["p"].get_value(), right, rtol=1e-5)
    np.testing.assert_allclose(metrics["weight"], 1, rtol=1e-5)


def test_bug_066_no_row_is_dropped_that_does_not_divide():
    # Five rows of one token with losses 1..5 in microbatches of two: 3.0, or an error, never 2.5.
    params = nnx.State({"p": nnx.Param(jnp.float32(1))})
    _, weight = masked_rows(1, 1, 1, 1, 1)
    with pytest.raises((TypeError, ValueError)):
        accumulate(weighted_sum, params, (weight, np.arange(1.0, 6.0, dtype=np.float32)[:, None]), 2)
    batch, slots = pack(
        [make_episode([(0, 1)], seed=i, name=f"e{i}", rewards=[i + 1.0]) for i in range(5)],
        row_tokens=1, row_sequences=1, row_multiple=2,
    )  # fmt: skip
    assert len(slots) == 6
    weight = kernels.token_mean(batch.action_mask, batch.turn_ids, batch.sequence_ids)
    loss, _, _ = accumulate(weighted_sum, params, (weight, batch.rewards), 3)
    np.testing.assert_allclose(loss, 3.0, rtol=1e-6)
