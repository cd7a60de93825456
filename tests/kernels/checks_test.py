import jax
import jaxtyping
import numpy as np
import pytest

from mpo_jax import kernels


@pytest.fixture(autouse=True)
def plain_calls():
    """The library's own errors, as a user sees them: without the annotations that tests enforce."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def good():
    return {
        "rewards": np.zeros(4, np.float32),
        "values": np.zeros(4, np.float32),
        "action_mask": np.array([1, 1, 0, 1], bool),
        "turn_ids": np.array([0, 0, 1, 1]),
    }


@pytest.mark.parametrize(
    "field,wrong,message",
    [
        ("values", np.zeros((2, 4), np.float32), r"values has shape \(2, 4\), expected rank 1"),
        ("values", np.zeros(5, np.float32), r"values has shape \(5,\), expected \(4,\) as rewards"),
        ("values", np.zeros(4, np.int32), "values has dtype int32, expected a float dtype"),
        ("values", [0.0] * 4, "values is a list, expected an array"),
        ("action_mask", np.ones(4, np.float32), "action_mask has dtype float32, expected bool"),
        ("turn_ids", np.zeros(4, np.float32), "turn_ids has dtype float32, expected an integer"),
        ("turn_ids", np.array([0, -1, 0, 1]), "turn_ids is negative .* at token 1"),
        ("turn_ids", np.array([1, 1, 0, 0]), "turn_ids decrease at token 3"),  # token 2 is an observation
        ("turn_ids", np.array([0, 0, 1, 4]), "turn_ids at token 3 is beyond the 4 segments"),
        ("sequence_ids", np.array([0, -1, 0, 0]), "sequence_ids is negative .* at token 1"),
        ("bootstrap_values", np.zeros(2, np.float32), r"bootstrap_values has shape \(2,\)"),
    ],
)
def test_wrong_arguments_are_named_before_any_compile(field, wrong, message):
    kernels.multiscale_advantages(**good())
    with jax.log_compiles(False), pytest.raises(ValueError, match=message):
        kernels.multiscale_advantages(**(good() | {field: wrong}))


@pytest.mark.parametrize(
    "turns,sequences,message",
    [
        ([0, 0, 1, 1], [0, 0, 0, 1], "turn_ids at token 3 is shared by two sequences"),
        ([0, 1, 2, 3], [0, 1, 1, 0], "sequence_ids comes back to an earlier segment at token 3"),
    ],
)
def test_sequences_have_turns_of_their_own_and_lie_together(turns, sequences, message):
    wrong = {
        "turn_ids": np.array(turns),
        "sequence_ids": np.array(sequences),
        "action_mask": np.ones(4, bool),
    }
    with pytest.raises(ValueError, match=message):
        kernels.multiscale_advantages(**(good() | wrong))


def test_observations_may_have_any_turn():
    found = [kernels.multiscale_advantages(**(good() | {"turn_ids": np.array([0, 0, k, 1])})) for k in (-1, 0, 9)]
    np.testing.assert_array_equal(found[1:], found[:-1])


def test_shapes_are_checked_under_jit_too():
    with pytest.raises(ValueError, match="values has shape"):
        jax.jit(kernels.multiscale_advantages)(**(good() | {"values": np.zeros(5, np.float32)}))


@pytest.mark.parametrize(
    "call,message",
    [
        (
            lambda: kernels.segment_sum(np.ones(2), np.array([0, 3]), np.ones(2, bool), 2),
            "ids at token 1 is beyond the 2",
        ),
        (lambda: kernels.segment_mean(np.ones(2), np.array([0, -1]), np.ones(2, bool), 2), "ids is negative"),
        (lambda: kernels.spread(np.ones(2), np.array([0, 2]), np.ones(2, bool)), "ids at token 1 is beyond"),
        (
            lambda: kernels.importance_ratio(np.ones(2), np.ones(3), np.zeros(2, int), np.ones(2, bool)),
            "anchor_logprobs",
        ),
        (lambda: kernels.group_advantages(np.ones(2), np.array([0, 2])), "ids at token 1 is beyond"),
        (lambda: kernels.whiten(np.ones(2), np.ones(2, bool)), "x has shape"),
        (lambda: kernels.token_mean(np.ones((1, 2), int), *[np.zeros((1, 2), int)] * 2), "mask has dtype"),
        (lambda: kernels.linear_logprobs(np.ones((2, 3)), np.ones((4, 5)), np.zeros(2, int)), r"hidden \(2, 3\)"),
        (lambda: kernels.linear_logprobs(np.ones((2, 3)), np.ones((3, 5)), np.zeros(2)), "targets has dtype"),
        (lambda: kernels.progress_advantage(np.ones(2), np.ones(2), np.zeros(2), np.ones(2, bool)), "ids has dtype"),
        (lambda: kernels.segment_sum([1.0], np.zeros(1, int), np.ones(1, bool), 1), "x is a list, expected an array"),
        (lambda: kernels.anchor_advantages(np.ones(2), np.ones(2)), "state_ids has dtype float64"),
        (lambda: kernels.anchor_advantages(np.ones(2), np.ones((2, 1), int)), r"state_ids has shape \(2, 1\)"),
        (
            lambda: kernels.bilevel_advantages(*[np.ones((1, 2))] * 2, np.ones((1, 2), bool), np.zeros((1, 2), int)),
            "rank",
        ),
        (lambda: kernels.token_logprobs_and_entropy(np.ones((5, 3)), np.ones(1, int)), r"targets has shape \(1,\)"),
        (lambda: kernels.returns(*[np.ones(0)] * 2, np.ones(0, bool), np.ones(0, int)), "T is 0"),
        (lambda: kernels.lambda_returns(np.ones(0), 1.0, np.ones(0), 1.0), "K is 0"),
        (lambda: kernels.segment_last(np.ones(0), np.ones(0, int), np.ones(0, bool), 1), "T is 0"),
        (
            lambda: kernels.returns(np.ones(3), np.ones(3), np.ones(3, bool), np.array([1, 0, 1])),
            "sequence_ids comes back to an earlier segment at token 2",
        ),
    ],
)
def test_every_entry_point_names_the_field(call, message):
    with pytest.raises(ValueError, match=message):
        call()


ROW, COLUMN = np.ones(3, np.float32), np.ones((3, 1), np.float32)
ALL = np.ones(3, bool)


@pytest.mark.parametrize(
    "call,field",
    [
        (lambda: kernels.clipped_surrogate(ROW, COLUMN, epsilon_low=0.2, epsilon_high=0.2), "advantages"),
        (lambda: kernels.double_sided_mask(ROW, COLUMN, epsilon_low=0.2, epsilon_high=0.2), "advantages"),
        (lambda: kernels.squared_value_loss(ROW, ROW, COLUMN), "returns"),
        (lambda: kernels.clipped_value_loss(ROW, COLUMN, ROW, epsilon=0.2), "old_values"),
        (lambda: kernels.kl_k1(ROW, COLUMN), "ref_logprobs"),
        (lambda: kernels.kl_k2(ROW, COLUMN), "ref_logprobs"),
        (lambda: kernels.kl_k3(ROW, COLUMN), "ref_logprobs"),
        (lambda: kernels.success_nll(ROW, ALL[:, None]), "success"),
        (lambda: kernels.explained_variance(ROW, COLUMN, ALL), "returns"),
        (lambda: kernels.value_clip_fraction(ROW, ROW, ALL[:, None], epsilon=0.2), "mask"),
        (lambda: kernels.effective_sample_size(ROW, ALL[:, None]), "mask"),
    ],
)
def test_nothing_is_broadcast_in_silence(call, field):
    with pytest.raises(ValueError, match=rf"{field} has shape \(3, 1\), expected \(3,\)"):
        call()


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: kernels.linear_logprobs(COLUMN.T, COLUMN, np.zeros(1, int), temperature=0.0), r"temperature is 0\.0"),
        (lambda: kernels.linear_logprobs(COLUMN.T, COLUMN, np.zeros(1, int), tile=0), "tile is 0"),
        (lambda: kernels.linear_confidence(COLUMN.T, COLUMN, k=0), "k is 0"),
        (lambda: kernels.linear_confidence(COLUMN.T, COLUMN, tile=-1), "tile is -1"),
        (lambda: kernels.constant_length(0.0), r"length is 0\.0"),
        (lambda: kernels.overlong_penalty(ROW, max_tokens=9, cache_tokens=0), "cache_tokens is 0"),
    ],
)
def test_numbers_that_must_be_positive_are_named(call, message):
    with pytest.raises(ValueError, match=message + ", expected a positive number"):
        call()


@pytest.mark.parametrize(
    "mode",
    [
        kernels.turn_mean,
        kernels.sequence_mean,
        kernels.constant_length(3.0),
        lambda mask, turns, sequences: kernels.variance_share(np.ones((2, 3)), mask, turns, sequences),
        lambda mask, turns, sequences: kernels.in_turn_visibility(np.ones((2, 3)), mask, turns, sequences),
    ],
)
@pytest.mark.parametrize("wrong,message", [(-1, "is negative"), (7, "beyond the 3 segments")])
def test_ids_of_batches_are_checked_too(mode, wrong, message):
    ids = np.array([[0, 0, 1], [0, wrong, 1]])
    ids[1] = np.sort(ids[1]) if wrong > 0 else ids[1]
    with pytest.raises(ValueError, match=f"{message}.*token . of row 1|token . of row 1.*{message}"):
        mode(np.ones((2, 3), bool), ids, ids)
