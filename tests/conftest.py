"""Settings for every test: a forced multi-device CPU, no silent rank promotion, one compilation cache."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
