"""The tokenizer of a GGUF file, rebuilt from its vocabulary and merges."""

from collections.abc import Mapping
from typing import Any

import gguf
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mpo_jax.models.chat import TemplateTokenizer
from mpo_jax.models.chat_template import ChatTemplate

CONTROL, USER_DEFINED = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED

# How text is split before merging. The file has the name only; the patterns are those of the models that bear it.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_NAMED = {  # by the names that templates read
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = tokenizers.Regex(_WORDS % digits)
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


# By `tokenizer.ggml.pre`: normaliser, splitting, and whether a word that is a token needs no merges.
_SPLITTING = {
    "smollm": (None, _single_digits, False),
    "qwen2": (normalizers.NFC, lambda: _words(r"\p{N}"), False),
    "llama-bpe": (None, lambda: _words(r"\p{N}{1,3}"), True),
    "gpt-2": (None, lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), False),
}


def read(fields: Mapping[str, gguf.ReaderField]) -> TemplateTokenizer:
    """The tokenizer, the chat template and the ids that end a turn, from the fields of a file's reader.

    Raises:
      ValueError: a tokenizer other than byte-level BPE, an unknown way of splitting, or no template.
    """
    metadata = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    tokenizer = build(metadata)
    if "tokenizer.chat_template" not in metadata:
        raise ValueError("no tokenizer.chat_template")
    variables = {variable: tokenizer.id_to_token(metadata[key]) for variable, key in _NAMED.items() if key in metadata}
    template = ChatTemplate(metadata["tokenizer.chat_template"], variables)
    return TemplateTokenizer(tokenizer, template, stop_ids=[metadata[key] for key in _ENDS if key in metadata])


def build(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that a file's `tokenizer.ggml.…` entries describe.

    Raises:
      ValueError: an entry is missing or of a kind that is not known here; the message names it.
    """

    def entry(name: str) -> Any:
        if f"tokenizer.ggml.{name}" not in metadata:
            raise ValueError(f"no tokenizer.ggml.{name}")
        return metadata[f"tokenizer.ggml.{name}"]

    if (kind := entry("model")) != "gpt2":
        raise ValueError(f"tokenizer.ggml.model is {kind!r}, expected 'gpt2' (byte-level BPE)")
    if (splitting := entry("pre")) not in _SPLITTING:
        raise ValueError(f"tokenizer.ggml.pre is {splitting!r}, expected one of {sorted(_SPLITTING)}")
    normalizer, pre_tokenizer, ignore_merges = _SPLITTING[splitting]
    tokens, kinds = entry("tokens"), entry("token_type")
    merges = [tuple(merge.split(" ")) for merge in entry("merges")]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens has {len(tokens) - len(vocabulary)} texts twice")
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer(), decoders.ByteLevel()
    added = [(text, kind) for text, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens(
        [tokenizers.AddedToken(text, special=kind == CONTROL, normalized=False) for text, kind in added]
    )
    return tokenizer
