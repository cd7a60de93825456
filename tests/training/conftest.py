"""Programs of these tests are compiled once and run a few times: quickly compiled, not quickly run."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def compile_quickly():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
