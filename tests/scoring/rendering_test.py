"""Messages to ids: which of them count as the agent's own."""

import itertools

import pytest
import tokenizers
from models import chats

from mpo_jax.models.tokenizer import ChatTokenizer, train_bpe
from mpo_jax.scoring.rendering import keep_last, render
from mpo_jax.scoring.transcripts import Message, Tokens, Transcript

OURS = ChatTokenizer(train_bpe(["Hello there, a small text"], 262))
BOTH = pytest.mark.parametrize("tokenizer", [OURS, chats.tokenizer()], ids=["ours", "bare"])


def transcript(*said, **fields):
    messages = [Message(role=role, text=text, action=role == "assistant") for role, text in said]
    return Transcript(episode_id="e", task_id="t", messages=messages, **fields)


@BOTH
def test_bug_011_an_action_ends_where_it_ends_though_it_comes_first(tokenizer):
    # One action, then the user: the bug took an end of 0 for "no end" and marked all of the rest.
    found = render(transcript(("assistant", "Hi"), ("user", "seven more tokens of text")), tokenizer)
    owners = [0] * found.messages.count(0) + [1] * found.messages.count(1)
    assert found.messages == owners and found.messages.count(1) >= 7
    assert not any(mine for mine, owner in zip(found.mask, owners, strict=True) if owner == 1)
    (span,) = [len(list(group)) for mine, group in itertools.groupby(found.mask) if mine]
    assert span >= 1
    ids = Tokens(ids=[5] * 8, messages=[0] + [1] * 7, mask=[True] + [False] * 7)
    assert render(transcript(("assistant", "H"), ("user", "i"), tokens=ids), tokenizer) == ids


@BOTH
@pytest.mark.parametrize("text", ["Hello", "\nHello", ""])
def test_bug_013_no_action_is_without_a_token(tokenizer, text):
    """The frame is ours, not the template's: there are no markers that it could lack."""
    found = render(transcript(("user", "q"), ("assistant", text)), tokenizer)
    own = [i for i, mine in zip(found.ids, found.mask, strict=True) if mine]
    assert own and set(found.messages[found.mask.index(True) :]) == {1}
    bare = tokenizer if isinstance(tokenizer, tokenizers.Tokenizer) else tokenizer.tokenizer
    assert text.strip().lower() in bare.decode(own).lower()
    assert any(keep_last(found, len(own)).mask)


@pytest.mark.parametrize("template", ["<|im_start|> $A", "<|im_start|> $A <|endoftext|>", "$A <|endoftext|>", "$A"])
def test_a_transcript_has_the_token_that_begins_a_text_and_none_that_ends_one(template):
    """BUG-112's sibling: the ends of a tokenizer that adds both stood before the first message."""
    bare = tokenizers.Tokenizer.from_str(chats.tokenizer().to_str())
    special = [(name, bare.token_to_id(name)) for name in ("<|im_start|>", "<|endoftext|>") if name in template]
    bare.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    begins = [bare.token_to_id("<|im_start|>")] * template.startswith("<|im_start|>")
    found = render(transcript(("user", "q"), ("assistant", "a")), bare)
    plain = bare.encode("[user]: q\n[assistant]: a\n", add_special_tokens=False)
    assert found.ids[: len(begins)] == begins
    assert bare.decode(found.ids[len(begins) :], skip_special_tokens=False) == bare.decode(plain.ids)
