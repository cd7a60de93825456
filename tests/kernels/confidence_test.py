import jax
import numpy as np
import pytest

from mpo_jax import kernels


def oracle(hidden, head, k, softcap=None):
    """In float64, from the whole table of log-probs."""
    z = hidden.astype(np.float64) @ head.astype(np.float64)
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    z -= z.max(1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    top = np.sort(log_p, axis=1)[:, ::-1][:, :k].mean(1)
    return top, -np.log(log_p.shape[1]) - log_p.mean(1)


@pytest.mark.parametrize(("vocabulary", "tile", "k"), [(7, 4, 3), (16, 16, 20), (33, 8, 20), (50, 1024, 5)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_against_the_whole_table(vocabulary, tile, k, softcap):
    rng = np.random.default_rng(vocabulary)
    hidden, head = rng.normal(size=(6, 5)).astype(np.float32), 3 * rng.normal(size=(5, vocabulary)).astype(np.float32)
    found = jax.jit(lambda h, w: kernels.linear_confidence(h, w, k=k, softcap=softcap, tile=tile))(hidden, head)
    for one, expected in zip(found, oracle(hidden, head, k, softcap), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-5)


def test_the_uniform_distribution_has_no_certainty():
    top, certainty = kernels.linear_confidence(np.zeros((2, 3), np.float32), np.ones((3, 8), np.float32), k=2)
    np.testing.assert_allclose(top, np.full(2, -np.log(8)), rtol=1e-6)
    np.testing.assert_allclose(certainty, [0, 0], atol=1e-6)


def test_large_logits_lose_nothing():
    hidden, head = np.ones((1, 1), np.float32), np.array([[4000.0, 4000.0, 3999.0]], np.float32)
    top, _ = kernels.linear_confidence(hidden, head, k=1, tile=2)
    np.testing.assert_allclose(top, [-np.log(2 + np.exp(-1))], rtol=1e-5)
