"""Settings for every test: CPU, and no silent rank promotion; programs called with flags."""

import os
import types

import pytest
from absl import flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def set_flags(monkeypatch):
    """Gives the flags of a program (a module) these values, the others their defaults, for calls of its `main`."""

    def set_all(program, **values):
        defaults = {k: v.default for k, v in vars(program).items() if isinstance(v, flags.FlagHolder)}
        for name, value in {**defaults, **values}.items():
            monkeypatch.setattr(program, name, types.SimpleNamespace(value=value))

    return set_all
