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
        ("turn_ids", np.array([1, 1, 0, 0]), "turn_ids decrease at token 2"),
        ("turn_ids", np.array([0, 0, 1, 4]), "turn_ids at token 3 is beyond the 4 segments"),
        ("sequence_ids", np.array([0, 0, 0, 1]), "turn_ids at token 3 is shared by two sequences"),
        ("sequence_ids", np.array([0, -1, 0, 0]), "sequence_ids is negative .* at token 1"),
        ("bootstrap_values", np.zeros(2, np.float32), r"bootstrap_values has shape \(2,\)"),
    ],
)
def test_wrong_arguments_are_named_before_any_compile(field, wrong, message):
    kernels.multiscale_advantages(**good())
    with jax.log_compiles(False), pytest.raises(ValueError, match=message):
        kernels.multiscale_advantages(**(good() | {field: wrong}))


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
    ],
)
def test_every_entry_point_names_the_field(call, message):
    with pytest.raises(ValueError, match=message):
        call()
