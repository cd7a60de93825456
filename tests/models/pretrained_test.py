"""A model's folder, written and read; flat parameters; every way in which they may not fit is named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import tiny
from mpo_jax.models import pretrained, weights
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.models.tokenizer import ChatTokenizer, train_bpe

TOKENIZER = ChatTokenizer(train_bpe(["a small text"], 262))
CONFIG = tiny.config(vocab_size=TOKENIZER.vocab_size, tied_embeddings=False)
PARAMS = tiny.params(CONFIG)


@pytest.fixture
def folder(tmp_path):
    pretrained.save(tmp_path / "model", Pretrained(config=CONFIG, params=PARAMS, tokenizer=TOKENIZER))
    return tmp_path / "model"


def rewrite(folder, change):
    """Passes the stored tensors through `change`."""
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors")


def test_bug_126_a_folder_comes_back_rounded_to_bfloat16_once(folder):
    model = pretrained.load(folder)
    assert model.config == CONFIG
    assert model.tokenizer.encode("a text") == TOKENIZER.encode("a text")
    found, saved = weights.flatten(model.params), weights.flatten(PARAMS)
    assert found.keys() == saved.keys() and "output.kernel" in found
    for name, x in saved.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], x.astype(jnp.bfloat16).astype(np.float32), err_msg=name)
    again = folder.with_name("again")
    pretrained.save(again, model)
    jax.tree.map(np.testing.assert_array_equal, pretrained.load(str(again)).params, model.params)


def test_bug_126_bytes_of_bfloat16_are_read_as_numbers(folder):
    # 0x3F80 is 1, 0xC000 is -2.
    numbers = np.array([0x3F80, 0xC000] * 8, np.uint16).view(jnp.bfloat16)
    rewrite(folder, lambda arrays: arrays.update({"final_norm.scale": numbers}))
    found = weights.flatten(pretrained.load(folder).params)["final_norm.scale"]
    np.testing.assert_array_equal(found, [1.0, -2.0] * 8)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"model.*{name}"):
        pretrained.load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_file_is_a_value_error_that_names_the_folder(folder, name):
    (folder / name).write_text("{")
    with pytest.raises(ValueError) as error:
        pretrained.load(folder)
    assert str(folder) in str(error.value)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no_such_model"):
        pretrained.load("no_such_model")


@pytest.mark.parametrize("change", [{"colour": 1}, {"width": None}], ids=["foreign", "missing"])
def test_a_config_of_other_fields_names_them(folder, change):
    fields = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    with pytest.raises(ValueError, match=rf"model.*{next(iter(change))}"):
        pretrained.load(folder)


def test_a_tokenizer_of_another_size_is_refused(folder):
    other = train_bpe(["a small text with many more words"], 270)
    assert other.get_vocab_size() == 270
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=rf"tokenizer of 270 ids, model of {CONFIG.vocab_size}"):
        pretrained.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("blocks.1.mlp.up.kernel"), r"missing parameter 'blocks\.1\.mlp\.up\.kernel'"),
        (lambda a: a.update(head=np.zeros(2, np.float32)), "unexpected parameter 'head'"),
        (
            lambda a: a.update({"output.kernel": np.ascontiguousarray(a["output.kernel"].T)}),
            rf"'output\.kernel' has shape \({CONFIG.vocab_size}, 16\), expected \(16, {CONFIG.vocab_size}\)",
        ),
    ],
    ids=["missing", "extra", "bug_127_transposed"],
)
def test_bug_124_a_tensor_that_does_not_fit_is_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        pretrained.load(folder)


def test_bug_124_a_tied_model_refuses_a_head_and_an_untied_one_needs_it(folder):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"tied_embeddings": True}))
    with pytest.raises(ValueError, match=r"unexpected parameter 'output\.kernel'"):
        pretrained.load(folder)
    rewrite(folder, lambda arrays: arrays.pop("output.kernel"))
    assert "output.kernel" not in weights.flatten(pretrained.load(folder).params)
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"missing parameter 'output\.kernel'"):
        pretrained.load(folder)


def test_flat_parameters_have_dotted_names_and_come_back_in_the_types_of_the_structure():
    flat = weights.flatten(PARAMS)
    assert "blocks.0.attention.query_norm.scale" in flat and all(isinstance(x, np.ndarray) for x in flat.values())
    like = pretrained.shapes(CONFIG)
    back = weights.unflatten(like, {name: x.astype(np.float64) for name, x in flat.items()})
    assert jax.tree.structure(back) == jax.tree.structure(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, back, PARAMS)
    assert {x.dtype for x in jax.tree.leaves(back)} == {jnp.dtype("float32")}
    with pytest.raises(ValueError, match=r"'embedding\.embedding' \(1 names differ"):
        weights.unflatten(like, {k: v for k, v in flat.items() if k != "embedding.embedding"})
    with pytest.raises(ValueError, match=r"'final_norm\.scale' has shape \(15,\), expected \(16,\)"):
        weights.unflatten(like, flat | {"final_norm.scale": np.zeros(15)})


def test_bug_127_kernels_are_stored_input_first():
    # y = x @ W: W = [[1, 3], [2, 4]] is the transpose of an [out, in] matrix [[1, 2], [3, 4]], so [1, 1] gives [3, 7].
    layer = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    params = weights.unflatten(nnx.state(layer), {"kernel": np.array([[1, 2], [3, 4]]).T})
    nnx.update(layer, params)
    np.testing.assert_array_equal(layer(jnp.ones((1, 2))), [[3, 7]])


def test_critic_starts_with_the_trunk_of_the_policy_and_a_value_of_zero():
    found = weights.flatten(pretrained.critic_params(CONFIG, PARAMS))
    policy = {name: x for name, x in weights.flatten(PARAMS).items() if name != "output.kernel"}  # no head of its own
    assert found.keys() == {f"trunk.{name}" for name in policy} | {"value.kernel", "value.bias"}
    for name, x in policy.items():
        np.testing.assert_array_equal(found[f"trunk.{name}"], x, err_msg=name)
    assert not found["value.kernel"].any() and not found["value.bias"].any()
