"""Adapters against PEFT: its files read, ours read by it, merged to the same numbers."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import peers, tiny
from mpo_jax.models import huggingface, layout, lora, pretrained, weights

peft = pytest.importorskip("peft", reason="needs peft, of requirements-test.txt")
CONFIG = lora.LoraConfig(rank=3, alpha=6.0, targets=("query", "value", "down"))
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 11)).astype(np.int32)
SHAPE, BASE = huggingface.load(pathlib.Path(peers.folder("qwen3")))


def drawn(base=BASE):
    """Adapters with noise on both factors."""
    return tiny.stirred(lora.init(CONFIG, base, jax.random.key(0)))


def fresh_peer():
    return peers.transformers.AutoModelForCausalLM.from_pretrained(peers.folder("qwen3"))


def logits(params):
    positions = np.broadcast_to(np.arange(11, dtype=np.int32), TOKENS.shape)
    return tiny.logits(SHAPE, params, TOKENS, positions, np.zeros_like(TOKENS))


def test_new_adapters_change_nothing_and_train_alone():
    adapters = lora.init(CONFIG, BASE, jax.random.key(0))
    names = layout.names(adapters)
    assert names.keys() == {
        f"blocks.{layer}.{part}.lora_{factor}"
        for layer in (0, 1)
        for part in ("attention.query", "attention.value", "mlp.down")
        for factor in "ab"
    }
    assert names["blocks.0.attention.query.lora_a"].shape == (16, 3)
    assert names["blocks.0.attention.query.lora_b"].shape == (3, 24)
    bound = 1 / np.sqrt(16)
    assert bound / 2 < np.abs(names["blocks.0.attention.query.lora_a"]).max() <= bound
    jax.tree.map(np.testing.assert_array_equal, lora.merge(CONFIG, BASE, adapters), BASE)


def test_the_product_is_scaled_by_alpha_over_rank_and_differentiates():
    # W = 0, A = (1, 2)ᵀ, B = (3, 5), alpha / rank = 4: the change is 4 (3 5; 6 10).
    base = nnx.from_flat_state([(("blocks", 0, "query", "kernel"), nnx.Param(jnp.zeros((2, 2))))])
    a, b = jnp.array([[1.0], [2.0]]), jnp.array([[3.0, 5.0]])
    adapters = nnx.from_flat_state(
        [(("blocks", 0, "query", "lora_a"), nnx.Param(a)), (("blocks", 0, "query", "lora_b"), nnx.Param(b))]
    )
    config = lora.LoraConfig(rank=1, alpha=4.0)
    ((_, merged),) = layout.names(lora.merge(config, base, adapters)).items()
    np.testing.assert_allclose(merged, [[12, 20], [24, 40]])
    total = jax.grad(lambda own: jax.tree.leaves(lora.merge(config, base, own))[0].sum())(adapters)
    np.testing.assert_allclose(layout.names(total)["blocks.0.query.lora_a"], [[32], [32]])  # 4 (3 + 5)
    np.testing.assert_allclose(layout.names(total)["blocks.0.query.lora_b"], [[12, 12]])  # 4 (1 + 2)


def test_peft_loads_ours_and_computes_and_merges_the_same(tmp_path):
    adapters = drawn()
    lora.save(tmp_path, CONFIG, SHAPE, adapters)
    theirs = peft.PeftModel.from_pretrained(fresh_peer(), tmp_path)
    merged = lora.merge(CONFIG, BASE, adapters)
    with peers.torch.no_grad():
        expected = theirs(peers.torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits(merged), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    whole = theirs.merge_and_unload().state_dict()
    for name, x in layout.names(merged).items():
        for key, part in layout.huggingface(SHAPE, name).split(np.asarray(x)).items():
            np.testing.assert_allclose(part, whole[key].numpy(), atol=1e-6, err_msg=key)


def test_ours_loads_what_peft_saved_and_writes_it_bit_for_bit(tmp_path):
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(fresh_peer(), settings)
    with peers.torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_" in name:
                x.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "theirs")
    config, adapters = lora.load(tmp_path / "theirs", SHAPE, BASE)
    assert (config.rank, config.alpha, config.targets) == (3, 6, ("down", "query", "value"))
    lora.save(tmp_path / "ours", config, SHAPE, adapters)
    theirs, ours = (load_file(tmp_path / where / "adapter_model.safetensors") for where in ("theirs", "ours"))
    assert theirs.keys() == ours.keys() and len(ours) == 12
    for name, x in theirs.items():
        assert x.tobytes() == ours[name].tobytes(), name


def test_a_critics_adapters_carry_its_value_layer(tmp_path):
    base = pretrained.critic_params(SHAPE, BASE)
    adapters = drawn(base)
    assert {"value.kernel", "value.bias"} < layout.names(adapters).keys()
    merged = lora.merge(CONFIG, base, adapters)
    np.testing.assert_array_equal(
        layout.names(merged)["value.kernel"], layout.names(adapters)["value.kernel"], "trained whole"
    )
    lora.save(tmp_path, CONFIG, SHAPE, adapters)
    again = lora.load(tmp_path, SHAPE, base)[1]
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    peer = peers.transformers.AutoModelForTokenClassification.from_pretrained(peers.folder("qwen3"), num_labels=1)
    theirs = peft.PeftModel.from_pretrained(peer, tmp_path).merge_and_unload().state_dict()
    np.testing.assert_array_equal(theirs["score.weight"].numpy(), weights.flatten(merged)["value.kernel"].T)


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (lambda a: a.popitem(), {}, r"missing tensor 'base_model\.model\.model\.layers\."),
        (lambda a: a.update(stray=np.zeros(1, np.float32)), {}, "unexpected tensor 'stray'"),
        (lambda a: None, {"r": 4}, r"has shape \(3, 16\), expected \(4, 16\)|has shape \(24, 3\)|has shape \(3, 24\)"),
        (lambda a: None, {"use_dora": True}, "use_dora is True"),
        (lambda a: None, {"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, fields, message):
    lora.save(tmp_path, CONFIG, SHAPE, drawn())
    arrays = load_file(tmp_path / "adapter_model.safetensors")
    change(arrays)
    save_file(arrays, tmp_path / "adapter_model.safetensors")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        lora.load(tmp_path, SHAPE, BASE)


def test_settings_that_name_nothing_are_refused():
    with pytest.raises(ValueError, match="rank=0"):
        lora.LoraConfig(rank=0, alpha=1.0)
    with pytest.raises(ValueError, match=r"no kernel is named by the targets \('q_proj',\)"):
        lora.init(lora.LoraConfig(rank=1, alpha=1.0, targets=("q_proj",)), BASE, jax.random.key(0))
