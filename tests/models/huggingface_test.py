"""Folders of `transformers`, read and written: bit for bit, into shards, and every misfit by its name."""

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import chats, peers, tiny
from mpo_jax.models import huggingface, layout, pretrained, weights
from mpo_jax.models.families import read_config, write_config
from mpo_jax.models.transformer import Critic

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 11)).astype(np.int32)
ALL = pytest.mark.parametrize("name", peers.FAMILIES)


@pytest.fixture
def folder(tmp_path):
    """A copy of the untied Qwen3, to be damaged."""
    return pathlib.Path(shutil.copytree(peers.folder("qwen3"), tmp_path / "model"))


def rewrite(folder, change):
    """Passes the stored tensors through `change`."""
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors")


def set_fields(folder, **changes):
    fields = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(fields))


def load(folder, **options):
    return huggingface.load(pathlib.Path(folder), **options)


@ALL
def test_bug_124_127_logits_of_a_folder_equal_those_of_transformers(name):
    config, params = load(peers.folder(name))
    positions = np.broadcast_to(np.arange(11, dtype=np.int32), TOKENS.shape)
    found = tiny.logits(config, params, TOKENS, positions, np.zeros_like(TOKENS))
    with peers.torch.no_grad():
        expected = peers.model(name)(peers.torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@ALL
def test_a_folder_comes_out_bit_for_bit_and_loads_in_transformers(name, tmp_path):
    config, params = load(peers.folder(name))
    huggingface.save(tmp_path, config, params, dtype=jnp.float32)
    theirs, ours = (load_file(f"{where}/model.safetensors") for where in (peers.folder(name), tmp_path))
    assert theirs.keys() == ours.keys()
    for key, x in theirs.items():
        assert x.dtype == ours[key].dtype and x.tobytes() == ours[key].tobytes(), key
    again = peers.transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for key, x in peers.model(name).state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[key].numpy(), x.numpy(), err_msg=key)
    assert read_config(again.config.to_dict()) == config
    with peers.torch.no_grad():
        before, after = (model(peers.torch.tensor(TOKENS)).logits for model in (peers.model(name), again.eval()))
    np.testing.assert_allclose(after.numpy(), before.numpy(), rtol=1e-5, atol=1e-5 * float(before.abs().max()))


@pytest.mark.parametrize("name", ["qwen3", "llama_tied"])
def test_a_critic_is_a_classifier_of_tokens_with_one_label(name, tmp_path):
    config, policy = load(peers.folder(name))
    params = tiny.stirred(pretrained.critic_params(config, policy))
    huggingface.save(tmp_path, config, params, dtype=jnp.float32)
    again = load(tmp_path, critic=True)
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    theirs = peers.transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)
    with peers.torch.no_grad():
        expected = theirs(peers.torch.tensor(TOKENS)).logits[..., 0].numpy()
    graph = nnx.graphdef(nnx.eval_shape(lambda: Critic(config, rngs=nnx.Rngs(0))))
    positions = np.broadcast_to(np.arange(11, dtype=np.int32), TOKENS.shape)
    values = jax.jit(lambda params: nnx.merge(graph, params)(TOKENS, positions, np.zeros_like(TOKENS)))(params)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_bug_126_bfloat16_comes_out_bit_for_bit_over_an_index_of_shards(tmp_path):
    peers.transformers.Qwen3ForCausalLM(peers.model("qwen3").config).bfloat16().save_pretrained(
        tmp_path / "theirs", max_shard_size="4KB"
    )
    config, params = load(tmp_path / "theirs")
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    huggingface.save(tmp_path / "ours", config, params, shard_bytes=4000)
    theirs, ours = (huggingface.safetensors(tmp_path / where) for where in ("theirs", "ours"))
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3 and index["weight_map"].keys() == theirs.shapes.keys()
    everything = slice(None), slice(None)
    for name, shape in theirs.shapes.items():
        x, y = (files.read(name, everything[: len(shape)]) for files in (theirs, ours))
        assert x.dtype == y.dtype == jnp.bfloat16 and x.tobytes() == y.tobytes(), name
    again = peers.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.dtype == peers.torch.bfloat16
    assert {x.dtype for x in jax.tree.leaves(load(tmp_path / "ours", dtype=jnp.bfloat16)[1])} == {jnp.dtype("bfloat16")}


def test_bug_126_slices_and_the_whole_agree_on_bfloat16_bytes(folder):
    # 0x3F80 is 1, 0xC000 is -2.
    numbers = np.array([0x3F80, 0xC000] * 8, np.uint16).view(jnp.bfloat16)
    rewrite(folder, lambda arrays: arrays.update({"model.norm.weight": numbers}))
    np.testing.assert_array_equal(weights.flatten(load(folder)[1])["final_norm.scale"], [1.0, -2.0] * 8)
    np.testing.assert_array_equal(huggingface.safetensors(folder).read("model.norm.weight", (slice(1, 3),)), [-2, 1])


NORM = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop(NORM), rf"missing tensor '{NORM}' \(1 missing in all\)"),
        (lambda a: a.update(stray=np.zeros(2, np.float32)), r"unexpected tensor 'stray' \(1 unexpected in all\)"),
        (
            lambda a: a.update({NORM: np.ascontiguousarray(a[NORM].T)}),
            rf"tensor '{NORM}' has shape \(16, 24\), expected \(24, 16\)",
        ),
        (lambda a: a.pop("lm_head.weight"), r"missing tensor 'lm_head.weight'"),
    ],
    ids=["missing", "extra", "bug_127_transposed", "bug_124_untied_without_head"],
)
def test_bug_124_a_tensor_that_does_not_fit_is_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        load(folder)
    with pytest.raises(ValueError, match=rf"{folder}.*{message}"):
        pretrained.load(folder)


def test_bug_124_a_tied_folder_may_hold_a_copy_of_the_table_and_no_other_head(folder):
    set_fields(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        load(folder)
    rewrite(folder, lambda a: a.update({"lm_head.weight": a["model.embed_tokens.weight"].copy()}))
    assert "output.kernel" not in weights.flatten(load(folder)[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"model_type is 'mamba', expected one of \['gemma3_text', 'llama'"),
        ({"attention_bias": True}, "attention_bias is True, only False is supported"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', only 'silu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type is 'dynamic'"),
    ],
)
def test_a_config_that_asks_for_more_is_refused(folder, changes, message):
    set_fields(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_config_without_a_field_names_it(folder):
    fields = json.loads((folder / "config.json").read_text())
    del fields["hidden_size"]
    with pytest.raises(ValueError, match=r"config\.json lacks 'hidden_size'"):
        read_config(fields)


def test_fields_of_older_versions_are_read():
    # Before version 5 theta stood alone, and head_dim and num_key_value_heads could be absent.
    fields = write_config(tiny.config(qk_norm=False, head_dim=4, num_kv_heads=4, rope_theta=5e5))
    del fields["rope_parameters"], fields["head_dim"], fields["num_key_value_heads"]
    assert read_config(fields | {"rope_theta": 5e5}) == tiny.config(
        qk_norm=False, head_dim=4, num_kv_heads=4, rope_theta=5e5
    )


def test_what_no_family_has_is_not_written(tmp_path):
    config = tiny.config(smeared_keys=True)
    with pytest.raises(ValueError, match="smeared_keys"):
        huggingface.save(tmp_path, config, tiny.params(config))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_or_damaged_file_is_one_error_that_names_the_folder(folder, name):
    chats.tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chats.PLAIN)
    assert pretrained.load(folder).tokenizer.vocab_size == chats.tokenizer().get_vocab_size()
    (folder / name).write_text("{")
    with pytest.raises(ValueError, match=str(folder)):
        pretrained.load(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name):
        pretrained.load(folder)


SHARDED = """
import pathlib, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.config.update("jax_num_cpu_devices", 8)
from mpo_jax.models import huggingface, layout, weights
folder = pathlib.Path(sys.argv[1])
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
asked = []
class Counting(layout.Safetensors):
    def read(self, name, index):
        x = super().read(name, index)
        asked.append((name, x.shape))
        return x
layout.Safetensors = Counting
def sharding(name, shape):
    fits = len(shape) == 2 and shape[0] % 4 == shape[1] % 2 == 0
    return NamedSharding(mesh, PartitionSpec("fsdp", "tensor") if fits else PartitionSpec())
config, params = huggingface.load(folder, sharding=sharding)
whole = {name: tuple(shape) for name, shape in huggingface.safetensors(folder).shapes.items()}
assert len(jax.devices()) == 8
kernel = params["blocks"][0]["mlp"]["up"]["kernel"].get_value()
assert kernel.sharding.spec == PartitionSpec("fsdp", "tensor") and kernel.addressable_shards[0].data.shape == (4, 12)
read = [shape for name, shape in asked if name == "model.layers.0.mlp.up_proj.weight"]
assert read == [(12, 4)] * 8, read  # no device's part was cut from the whole matrix
for name, x in weights.flatten(huggingface.load(folder)[1]).items():
    np.testing.assert_array_equal(weights.flatten(params)[name], x, err_msg=name)
"""


def test_each_device_reads_its_own_part():
    subprocess.run([sys.executable, "-c", SHARDED, peers.folder("qwen3")], check=True, timeout=120)


def test_every_parameter_has_a_place():
    for config in (
        tiny.config(),
        tiny.config(num_experts=4, experts_per_token=2, expert_width=8, dense_layers=(1,), qkv_bias=True),
    ):
        stored = [
            name
            for parameter in layout.names(pretrained.shapes(config))
            for name in layout.huggingface(config, parameter).names
        ]
        assert len(set(stored)) == len(stored)
    with pytest.raises(ValueError, match=r"'blocks.0.attention.smear' has no place"):
        layout.huggingface(tiny.config(), "blocks.0.attention.smear")
