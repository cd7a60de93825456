"""Compiled packages that other people's environments import and the games that we play never use."""

import importlib.util
import sys
import types
from collections.abc import Sequence


def stand_in(name: str, warnings: Sequence[str] = ()) -> None:
    """Lets `import name` succeed where the package is not installed; using it fails.

    Args:
      name: of a top-level module.
      warnings: names of warning classes that it is asked for while it is imported.
    """
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        sys.modules[name] = types.ModuleType(name)
        for warning in warnings:
            setattr(sys.modules[name], warning, Warning)
