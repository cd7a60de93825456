"""The forward pass against a float64 oracle; the cache, padding and packing against the plain pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import tiny
from mpo_jax.models import weights
from mpo_jax.models.rope import rotate
from mpo_jax.models.transformer import Cache, Critic

CONFIG = tiny.config()
BOTH = pytest.mark.parametrize("config", [CONFIG, tiny.config(smeared_keys=True)], ids=["plain", "smeared"])
TOKENS = np.random.default_rng(0).integers(0, 64, (3, 12)).astype(np.int32)


def plain(config, tokens, params=None):
    """Logits of whole rows, one sequence each."""
    tokens = np.asarray(tokens, np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    params = tiny.params(config) if params is None else params
    return np.asarray(tiny.logits(config, params, tokens, positions, np.zeros_like(tokens)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": False, "num_kv_heads": 1},
        {"qk_norm": False, "num_kv_heads": 4, "norm_epsilon": 0.1},
        {"smeared_keys": True},
    ],
    ids=["tied", "untied_one_kv_head", "no_qk_norm", "smeared"],
)
def test_bug_124_whole_forward_pass_equals_a_float64_oracle(changes):
    config = tiny.config(**changes)
    found = plain(config, TOKENS)
    expected = np.stack([tiny.oracle(config, tiny.params(config), row) for row in TOKENS])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert ("output.kernel" in weights.flatten(tiny.params(config))) is not config.tied_embeddings


def test_bug_124_gradient_of_a_tied_table_sums_its_two_uses():
    params, tokens = tiny.params(CONFIG), TOKENS[:1]
    rng = np.random.default_rng(1)
    mix = rng.normal(size=(12, 64))

    def total(params):
        return jnp.sum(tiny.forward(CONFIG, params, tokens, np.arange(12)[None], np.zeros_like(tokens))[0] * mix)

    found = weights.flatten(jax.jit(jax.grad(total))(params))["embedding.embedding"]
    flat = weights.flatten(params)
    for row in (tokens[0, 0], next(v for v in range(64) if v not in tokens)):  # used twice, used by the head alone
        step = np.zeros((64, 16))
        step[row] = rng.normal(size=16) * 1e-5
        near = [
            np.sum(
                mix
                * tiny.oracle(
                    CONFIG, flat | {"embedding.embedding": flat["embedding.embedding"] + sign * step}, tokens[0]
                )
            )
            for sign in (1, -1)
        ]
        np.testing.assert_allclose(np.sum(found * step), (near[0] - near[1]) / 2, rtol=1e-3)


@functools.partial(jax.jit, static_argnums=0, compiler_options=tiny.QUICK)
def append(config, params, cache, tokens, positions):
    model = nnx.merge(tiny.graph(config), params)
    hidden, cache = model(tokens, positions, cache=cache)
    return hidden @ model.head(), cache


@BOTH
@pytest.mark.parametrize("past", [0, 7], ids=["at_the_context", "past_the_context"])
def test_cache_of_ragged_appends_gives_the_uncached_logits(config, past):
    context = 12
    cache = Cache.empty(config, 3, context)
    lengths = np.zeros(3, int)
    found = np.zeros((3, context, 64))
    # Four appends of at most 5 tokens; a row without news idles, its slots are all past the context.
    for counts in ([5, 1, 0], [2, 0, 5], [4, 5, 1], [1, 4, 3]):
        tokens, positions = np.full((3, 5), 9, np.int32), np.full((3, 5), context + past, np.int32)
        for row, count in enumerate(counts):
            span = slice(lengths[row], lengths[row] + count)
            tokens[row, :count], positions[row, :count] = TOKENS[row, span], np.arange(context)[span]
        logits, cache = append(config, tiny.params(config), cache, tokens, positions)
        for row, count in enumerate(counts):
            found[row, lengths[row] : lengths[row] + count] = logits[row, :count]
            lengths[row] += count
    expected = plain(config, TOKENS)
    for row, length in enumerate(lengths):  # 12, 10 and 9 tokens
        np.testing.assert_allclose(found[row, :length], expected[row, :length], atol=1e-5, rtol=1e-5)
        for x in (*(np.moveaxis(keys, -1, -2) for keys in cache.keys), *cache.values):  # [B,K,C,H]
            assert not np.any(x[row, :, length:]), "what was dropped is not in the cache"
            assert np.all(np.any(x[row, :, :length], axis=(0, -1)))


@BOTH
def test_bug_119_alone_left_padded_and_right_padded_are_equal(config):
    sequence = TOKENS[0, :5].tolist()
    layouts = [[sequence], [None, None, None, sequence], [sequence, None, None, None]]
    batch = tiny.lay_out(layouts, 8)
    padded = tiny.logits(config, tiny.params(config), batch.tokens, batch.positions, batch.sequence_ids)
    alone = plain(config, [sequence])[0]
    for row, start in ((0, 0), (1, 3), (2, 0)):
        np.testing.assert_allclose(padded[row, start : start + 5], alone, atol=1e-5, rtol=1e-5)


@BOTH
def test_bug_121_a_packed_neighbour_changes_the_other_by_exactly_nothing(config):
    first, second = TOKENS[0, :4].tolist(), TOKENS[1, :4].tolist()
    changed = [(first[0] + 1) % 64, *first[1:]]
    batch = tiny.lay_out([[first, second], [changed, second]], 8, sequences=2)
    found = np.asarray(tiny.logits(config, tiny.params(config), batch.tokens, batch.positions, batch.sequence_ids))
    assert np.array_equal(found[0, 4:], found[1, 4:])
    assert np.all(np.any(found[0, :4] != found[1, :4], axis=-1)), "its own document does change"
    np.testing.assert_allclose(found[0, 4:], plain(config, [second])[0], atol=1e-5, rtol=1e-5)


def test_a_later_token_changes_no_earlier_logits():
    changed = TOKENS.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    before, after = plain(CONFIG, TOKENS), plain(CONFIG, changed)
    assert np.array_equal(before[:, :7], after[:, :7])
    assert np.all(np.any(before[:, 7:] != after[:, 7:], axis=-1))


def test_bug_129_frequencies_of_rotary_dim_4_and_theta_1e6_are_1_and_a_thousandth():
    # Pairs (0, 2) and (1, 3) start at angle 0 and turn by position·[1, .001]; theta 1e3 would give [1, .0316].
    x = jnp.broadcast_to(jnp.array([1.0, 1.0, 0.0, 0.0]), (1, 3, 1, 4))
    found = np.asarray(rotate(x, np.array([[0, 1, 500]]), 1e6))[0, :, 0]
    angles = np.array([0, 1, 500])[:, None] * np.array([1.0, 0.001])
    np.testing.assert_allclose(found, np.concatenate([np.cos(angles), np.sin(angles)], axis=1), atol=1e-6)


def test_rotated_products_depend_on_the_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(np.broadcast_to(rng.normal(size=8), (1, 4, 1, 8)), jnp.float32) for _ in range(2))
    far, near = np.array([[0, 5, 17, 20]]), np.array([[0, 2, 14, 10]])  # distances 0, 3, 3, 10
    products = np.sum(np.asarray(rotate(q, far, 100.0)) * np.asarray(rotate(k, near, 100.0)), axis=-1)[0, :, 0]
    np.testing.assert_allclose(products[1], products[2], rtol=1e-5)
    np.testing.assert_allclose(products[0], np.sum(q[0, 0] * k[0, 0]), rtol=1e-5)
    assert abs(products[3] - products[1]) > 1e-2 and abs(products[1] - products[0]) > 1e-2


def test_config_errors_name_the_numbers():
    with pytest.raises(ValueError, match=r"num_kv_heads=3 does not divide num_heads=4"):
        tiny.config(num_kv_heads=3)
    with pytest.raises(ValueError, match=r"head_dim=5 is odd"):
        tiny.config(head_dim=5)


def test_a_fresh_critic_values_everything_at_zero_and_has_a_trunk_of_its_own():
    critic = Critic(CONFIG, rngs=nnx.Rngs(0))
    values = nnx.jit(lambda critic: critic(TOKENS, np.broadcast_to(np.arange(12), (3, 12)), np.zeros_like(TOKENS)))(
        critic
    )
    assert values.shape == (3, 12) and not np.any(values)
    assert {name.split(".")[0] for name in weights.flatten(nnx.state(critic))} == {"trunk", "value"}


@pytest.mark.parametrize("more", [{}, {"num_experts": 4, "experts_per_token": 2, "expert_width": 8}])
def test_parameters_in_bfloat16_are_computed_with_in_bfloat16(more):
    config, tokens = tiny.config(**more), np.zeros((2, 6), np.int32)
    params = weights.shapes(config, jnp.bfloat16)

    def types(params):
        model = nnx.merge(tiny.graph(config), params)
        cache = Cache.empty(config, 2, 8, jnp.bfloat16)
        return model(tokens, tokens, tokens)[0], model(tokens, tokens, cache=cache)

    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(types, params))} == {jnp.dtype("bfloat16")}
