"""A critic on the policy's trunk reads once what two models would read twice, and is saved as one of its own."""

import jax
import jax.numpy as jnp
import numpy as np

from models import tiny
from mpo_jax.models import huggingface, weights
from mpo_jax.models.actor_critic import Models, shared_critic_params, whole_critic

CONFIG = tiny.config(tied_embeddings=False)
POLICY, VALUE = tiny.params(CONFIG), tiny.stirred(shared_critic_params(CONFIG))
BATCH = tiny.lay_out([[[5, 9, 4], [7, 8, 2, 6]], [[3, 1, 5, 2], None]], 8, sequences=2)


def test_one_reading_says_what_two_say():
    shared, own = Models.of(CONFIG, shared_trunk=1.0), Models.of(CONFIG)
    found = jax.jit(shared.both)(POLICY, VALUE, BATCH)
    expected = jax.jit(own.both)(POLICY, whole_critic(POLICY, VALUE), BATCH)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or np.abs(b).max() > 0.1
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a, b)


def test_its_value_starts_as_zero():
    assert not any(x.any() for x in weights.flatten(shared_critic_params(CONFIG)).values())


def test_it_is_saved_with_its_trunk_and_read_as_a_critic(tmp_path):
    critic = whole_critic(POLICY, VALUE)
    huggingface.save(tmp_path, CONFIG, critic, dtype=jnp.float32)
    _, back = huggingface.load(tmp_path, critic=True)
    jax.tree.map(np.testing.assert_array_equal, back, critic)
