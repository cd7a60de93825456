"""What the adapters to other people's environments have in common: their packages, and their tasks by number."""

import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def require(module: str, package: str) -> None:
    """Says what to install.

    Raises:
      ImportError: there is no such module; the message names its package.
    """
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"this environment needs the package {package} (see requirements-envs.txt, requirements-verifiers.txt)"
        )


def stand_in(module: str, warnings: Sequence[str] = ()) -> None:
    """Lets the import of a compiled package succeed that others import and nothing here uses; using it fails.

    Args:
      module: its name, at top level.
      warnings: names of warning classes that it is asked for while it is imported.
    """
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        sys.modules[module] = types.ModuleType(module)
        for warning in warnings:
            setattr(sys.modules[module], warning, Warning)


def choose(tasks: Sequence[T], options: Mapping[str, Any] | None, rng: np.random.Generator) -> T:
    """The task that a reset's `options={"task": n}` asks for, the n-th; else one that is drawn.

    Raises:
      ValueError: there are not so many. They are not gone through again: held-out numbers come after those to train on.
    """
    number = (options or {}).get("task")
    if number is None:
        return tasks[rng.integers(len(tasks))]
    if not 0 <= number < len(tasks):
        raise ValueError(f"task {number}, expected 0 to {len(tasks) - 1}")
    return tasks[number]
