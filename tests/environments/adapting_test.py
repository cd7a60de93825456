"""What the adapters share."""

import importlib
import sys

import numpy as np
import pytest

from mpo_jax.environments.adapting import choose, require, stand_in


def test_a_task_is_asked_for_by_number_or_drawn():
    rng = np.random.default_rng(0)
    assert [choose("abc", {"task": n}, rng) for n in range(3)] == ["a", "b", "c"]
    assert {choose("abc", None, rng) for _ in range(50)} == {"a", "b", "c"}


@pytest.mark.parametrize("number", [3, -1])
def test_a_number_beyond_the_tasks_is_named(number):
    with pytest.raises(ValueError, match=f"task {number}, expected 0 to 2"):
        choose("abc", {"task": number}, np.random.default_rng(0))


def test_a_missing_package_is_named_and_one_that_is_there_is_not_replaced():
    with pytest.raises(ImportError, match="needs the package some-thing"):
        require("no_such_module", "some-thing")
    require("json", "json")
    stand_in("json")
    assert importlib.import_module("json").dumps(1) == "1"
    stand_in("no_such_module", ["SomeWarning"])
    assert issubclass(sys.modules.pop("no_such_module").SomeWarning, Warning)
