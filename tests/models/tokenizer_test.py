"""Text to ids and back; what a frame adds; that no text can spell a special token."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mpo_jax.models.tokenizer import SPECIALS, ChatTokenizer, train_bpe
from mpo_jax.models.tokenizer import pieces as tokenizer_pieces

TEXTS = ["search the capital of freedonia", "open 1", "answer glory city", "hint: search the anthem"] * 3
TOKENIZER = ChatTokenizer(train_bpe(TEXTS, 300))


def test_specials_are_the_first_ids_and_merges_are_learnt():
    assert (TOKENIZER.pad, TOKENIZER.user, TOKENIZER.assistant, TOKENIZER.end_of_turn) == (0, 1, 2, 3)
    assert 4 + 256 < TOKENIZER.vocab_size <= 300
    assert len(TOKENIZER.encode("search the capital")) < len("search the capital") / 2


@given(st.text(st.characters(codec="ascii", exclude_characters="<", exclude_categories=("Cc",)), max_size=40))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_lower_case_text_comes_back(text):
    text = text.lower().strip()
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_case_and_accents_are_folded_and_any_letter_has_ids():
    assert TOKENIZER.decode(TOKENIZER.encode("Frédonia 中")) == "fredonia 中"


@pytest.mark.parametrize("text", [*SPECIALS, "a<end>", "<<end>>", "<END>", "＜end＞", "x <user> y <assistant><pad>"])
def test_a_special_token_spelt_out_is_never_its_id(text):
    ids = TOKENIZER.encode(text)
    assert ids and min(ids) >= len(SPECIALS)


def test_decode_leaves_specials_out():
    assert TOKENIZER.decode([1, *TOKENIZER.encode("open 1"), 2, 3, 0]) == "open 1"


def test_bug_108_an_observation_opens_with_the_user_and_ends_with_the_header_of_the_next_action():
    ids = TOKENIZER.encode("open the capital")
    assert TOKENIZER.render_observation("open the capital") == [TOKENIZER.user, *ids, TOKENIZER.assistant]
    assert len(ids) > 2
    assert TOKENIZER.render_observation("open the capital", 2) == [TOKENIZER.user, *ids[:2], TOKENIZER.assistant]
    assert TOKENIZER.render_observation("", 5) == [TOKENIZER.user, TOKENIZER.assistant]
    assert TOKENIZER.render_prompt("open the capital", 2) == TOKENIZER.render_observation("open the capital", 2)


def test_bug_106_frames_of_pieces_are_the_frame_of_the_whole():
    # Append-only: the prompt, a sampled turn and the observation, one after the other, are the whole conversation.
    action = [*TOKENIZER.encode("open 1"), TOKENIZER.end_of_turn]
    pieces = TOKENIZER.render_prompt("search") + action + TOKENIZER.render_observation("city")
    user, assistant = TOKENIZER.user, TOKENIZER.assistant
    assert pieces == [user, *TOKENIZER.encode("search"), assistant, *action, user, *TOKENIZER.encode("city"), assistant]


def test_a_hint_has_no_header_of_an_action():
    assert TOKENIZER.render_hint("open 1") == [TOKENIZER.user, *TOKENIZER.encode("hint: open 1")]


def test_a_saved_tokenizer_is_read_back(tmp_path):
    TOKENIZER.tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = ChatTokenizer.load(tmp_path / "tokenizer.json")
    assert again.vocab_size == TOKENIZER.vocab_size
    assert again.encode("Search <end>") == TOKENIZER.encode("Search <end>")


def test_a_tokenizer_without_the_specials_is_refused():
    with pytest.raises(ValueError, match=r"lacks \['<user>', '<assistant>', '<end>'\]"):
        bare = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<pad>": 1}, []))
        ChatTokenizer(bare)


def test_load_of_a_missing_file_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.json"):
        ChatTokenizer.load(tmp_path / "absent.json")


@pytest.mark.parametrize("content", ["{", json.dumps({"a": 1}), "[]"])
def test_load_of_a_damaged_file_names_it(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        ChatTokenizer.load(tmp_path / "tokenizer.json")


def test_pieces_are_the_text_of_each_id_by_itself():
    ids = [*TOKENIZER.render_observation("search é"), TOKENIZER.end_of_turn, 9999]
    pieces = tokenizer_pieces(TOKENIZER.tokenizer, ids)
    assert len(pieces) == len(ids)
    assert (pieces[0], pieces[-3:]) == ("<user>", ["<assistant>", "<end>", "⟨9999⟩"])
    assert "".join(pieces[1:-3]) == " search e"  # accents are folded
