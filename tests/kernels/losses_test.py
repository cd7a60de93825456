import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpo_jax import kernels

clip = functools.partial(kernels.clipped_surrogate, epsilon_low=0.2, epsilon_high=0.2)


def f32(*x):
    return np.array(x, np.float32)


def test_clipped_surrogate_literals_and_gradients():
    ratio, a = f32(0.5, 1.1, 1.5, 0.5, 1.1, 1.5), f32(1, 1, 1, -1, -1, -1)
    np.testing.assert_allclose(clip(ratio, a), [0.5, 1.1, 1.2, -0.8, -1.1, -1.5], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda r: clip(r, a).sum())(ratio), [1, 1, 0, 0, -1, -1])
    assert not np.any(jax.grad(lambda a: clip(ratio, a).sum())(a))  # advantages are constants


def test_clipped_surrogate_is_the_pessimistic_minimum():
    rng = np.random.default_rng(0)
    ratio, a = rng.uniform(0, 3, 1000).astype(np.float32), rng.normal(size=1000).astype(np.float32)
    found = kernels.clipped_surrogate(ratio, a, epsilon_low=0.2, epsilon_high=0.28)
    np.testing.assert_allclose(found, np.minimum(ratio * a, np.clip(ratio, 0.8, 1.28) * a), rtol=1e-6)


def test_bug_078_dual_clip_only_where_the_advantage_is_negative():
    ratio, a = f32(0.5, 10), f32(1, -1)
    np.testing.assert_allclose(clip(ratio, a, dual_clip=3.0), [0.5, -3])
    np.testing.assert_array_equal(jax.grad(lambda r: clip(r, a, dual_clip=3.0).sum())(ratio), [1, 0])
    np.testing.assert_allclose(clip(ratio, a), [0.5, -10])


def test_double_sided_mask_drops_both_sides_whatever_the_sign():
    ratio, a = f32(0.6, 0.8, 5.9, 6.1, 0.6, 6.1), f32(1, 1, 1, 1, -1, -1)
    f = functools.partial(kernels.double_sided_mask, epsilon_low=0.3, epsilon_high=5.0)
    np.testing.assert_allclose(f(ratio, a), [0, 0.8, 5.9, 0, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda r: f(r, a).sum())(ratio), [0, 1, 1, 0, 0, 0])


@pytest.mark.parametrize("f", [clip, functools.partial(kernels.double_sided_mask, epsilon_low=0.3, epsilon_high=5.0)])
@pytest.mark.parametrize("a", [1.0, -1.0])
def test_surrogates_keep_nan_visible(f, a):
    assert np.isnan(f(f32(np.nan), f32(a))).all()


def test_value_losses():
    v, old, target = f32(1, 0.1, 3), f32(0, 0, 3), f32(0, 1, 2)
    # clipped values .2, .1, 3: ½max(1, .04), ½max(.81, .81), ½max(1, 1)
    np.testing.assert_allclose(kernels.clipped_value_loss(v, old, target, epsilon=0.2), [0.5, 0.405, 0.5], rtol=1e-6)
    np.testing.assert_allclose(kernels.squared_value_loss(v, old, target), [0.5, 0.405, 0.5], rtol=1e-6)


@pytest.mark.parametrize(
    "loss", [kernels.squared_value_loss, functools.partial(kernels.clipped_value_loss, epsilon=0.2)]
)
def test_bug_041_values_have_a_gradient_and_targets_have_none(loss):
    data = f32(1, 0.1, 3), f32(0.9, 0, 3), f32(0, 1, 2)
    grads = jax.grad(lambda *x: loss(*x).sum(), argnums=(0, 1, 2))(*data)
    np.testing.assert_allclose(grads[0], data[0] - data[2], rtol=1e-6)
    assert not np.any(grads[1]) and not np.any(grads[2])
    v = data[0]
    for _ in range(50):
        v = v - 0.1 * jax.grad(lambda v: loss(v, v, data[2]).sum())(v)
    assert np.abs(v - data[2]).max() < 0.02


def test_bug_103_the_gradients_of_the_three_kl_estimators():
    ref, theta = jnp.log(f32(0.5, 0.5)), jnp.log(4.0)
    pi = np.array([0.8, 0.2])

    def expected(theta, estimator):
        return jnp.sum(pi * estimator(jax.nn.log_softmax(jnp.stack([theta, 0.0])), ref))

    right = {kernels.kl_k1: 0.0, kernels.kl_k2: 0.221807, kernels.kl_k3: 0.3}
    for estimator, slope in right.items():
        np.testing.assert_allclose(jax.grad(expected)(theta, estimator), slope, atol=1e-6)
    for estimator in (kernels.kl_k1, kernels.kl_k3):
        np.testing.assert_allclose(expected(theta, estimator), 0.192745, atol=1e-6)


def test_success_nll_is_zero_on_failures():
    found, grad = jax.value_and_grad(lambda x: kernels.success_nll(x, np.array([True, False])).sum())(f32(-2, -3))
    assert found == 2 and list(grad) == [-1, 0]
