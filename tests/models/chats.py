"""A small byte-level tokenizer with chat templates written for the tests: a plain one, and one that drops thinking."""

import functools

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mpo_jax.models.chat import TemplateTokenizer
from mpo_jax.models.chat_template import ChatTemplate

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEXT = "What is the capital of France? The capital is Paris. search the user\n\n system\n assistant\n hint: 2026 {}"

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Like Qwen3's: tools in the system's message; of an earlier answer only what follows its thinking.
THINKING = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}Tools:
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}<|im_end|>
{{- '\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first and tools %}{% continue %}{% endif %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}
{%- else %}{{ m.content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""


@functools.cache
def tokenizer():
    """A byte-level BPE that is cut up as Qwen's, by the `tokenizers` library alone."""
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    made.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    made.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in WORDS])
    return made


def chat(source=PLAIN, **variables):
    return TemplateTokenizer(tokenizer(), ChatTemplate(source, variables))


def whole(chat, messages):
    """Ids of the template's own rendering of a conversation, special tokens recognised wherever they are."""
    text = chat.template.render(messages, add_generation_prompt=True)
    fresh = tokenizers.Tokenizer.from_str(tokenizer().to_str())
    return fresh.encode(text, add_special_tokens=False).ids


def say(role, content):
    return {"role": role, "content": content}
