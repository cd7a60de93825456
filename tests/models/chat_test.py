"""Chat templates: the first prompt is the template's, what follows is appended, and no text spells a special token."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from models import chats
from models.chats import chat, say, whole
from mpo_jax.models.chat import TemplateTokenizer
from mpo_jax.models.chat_template import ChatTemplate
from mpo_jax.rollout.protocol import Tokenizer

PLAIN, THINKING = chat(chats.PLAIN), chat(chats.THINKING)
TEXTS = ["What is\nthe capital?", "  two blanks ", "\n\nlines\n", "", "Café 中文 2026"]
BEGIN, START, END = (chats.tokenizer().token_to_id(text) for text in chats.SPECIALS)


def test_it_is_a_tokenizer_of_the_agent_loop():
    assert isinstance(PLAIN, Tokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_the_first_prompt_is_what_the_template_renders(text):
    for made in (PLAIN, THINKING):
        assert made.render_prompt(text) == whole(made, [say("user", text)])
        introduced = made.introduced("Be brief.")
        assert introduced.render_prompt(text) == whole(made, [say("system", "Be brief."), say("user", text)])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("made", [PLAIN, THINKING], ids=["plain", "thinking"])
def test_bug_106_108_pieces_appended_are_the_template_of_the_whole(made, text):
    messages, ids = [say("user", "first")], made.render_prompt("first")
    for answer in ("one", "The capital is Paris."):
        messages += [say("assistant", answer), say("user", text)]
        ids += [*made.encode(answer), made.end_of_turn, *made.render_observation(text)]
        assert ids == whole(made, messages)
    newline = made.encode("\n")
    assert made.render_observation(text)[: len(newline) + 1] == [*newline, START]
    header = made.encode("assistant\n")
    assert ids[-len(header) :] == header  # the header of the next answer is there


def test_bug_109_thinking_that_the_template_drops_stays_in_the_context():
    answer = "<think>\nhm\n</think>\n\nParis"
    messages = [say("user", "q"), say("assistant", answer), say("user", "sure?")]
    appended = [*THINKING.render_prompt("q"), *THINKING.encode(answer), END, *THINKING.render_observation("sure?")]
    assert THINKING.decode(appended).count("hm") == 1 and THINKING.decode(whole(THINKING, messages)).count("hm") == 0
    without = [*THINKING.render_prompt("q"), *THINKING.encode("Paris"), END, *THINKING.render_observation("sure?")]
    assert without == whole(THINKING, messages)


def test_bug_111_an_empty_thinking_block_is_opened_once_a_turn_and_kept():
    quiet = chat(chats.THINKING, enable_thinking=False)
    block = "<think>\n\n</think>\n\n"
    text = quiet.decode(quiet.render_prompt("q") + quiet.encode("a") + [END] + quiet.render_observation("r"))
    assert text.count(block) == 2 and text.endswith(f"assistant\n{block}")


def test_tools_are_rendered_by_the_template():
    tool = {"type": "function", "function": {"name": "search", "description": "déjà <vu>"}}
    made = THINKING.introduced("Be brief.", [tool])
    assert made.render_prompt("q") == whole(made, [say("system", "Be brief."), say("user", "q")])
    assert json.dumps(tool, ensure_ascii=False) in made.decode(made.render_prompt("q"))
    assert THINKING.knows_tools and not PLAIN.knows_tools


@given(st.lists(st.sampled_from([*chats.SPECIALS, "<", "|", "im", " ", "a"]), max_size=6).map("".join))
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_a_special_token_spelt_out_stays_text_and_is_kept(text):
    for render in (PLAIN.render_prompt, PLAIN.render_observation):
        ids, empty = render(f"x{text}x"), render("")
        assert [i for i in ids if i in (BEGIN, START, END)] == [i for i in empty if i in (BEGIN, START, END)]
        assert f"x{text}x" in PLAIN.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("letter", ["\ue0f1", "\ue0f2"])  # as icon fonts of web pages have them
def test_letters_that_take_the_template_apart_are_text_where_the_environment_says_them(letter):
    for made in (PLAIN, THINKING):
        for render in (made.render_prompt, made.render_observation, made.render_hint):
            assert made.decode(render(f"a {letter} b")) == made.decode(render("a x b")).replace(
                "a x b", f"a {letter} b"
            )


@pytest.mark.parametrize("limit", [1, 2, 5, 40])
@pytest.mark.parametrize("text", ["The capital is Paris. " * 4, "中文" * 9, "a\n\n\nb " * 8])
def test_of_a_long_text_a_beginning_is_read_in_a_whole_frame(text, limit):
    for render in (PLAIN.render_prompt, PLAIN.render_observation):
        ids, frame = render(text, limit), len(render(""))
        assert frame <= len(ids) <= frame + limit
        assert text[: limit // 3] in PLAIN.decode(ids)  # a letter takes 3 ids at most
        assert ids[-3:] == render("")[-3:]
    assert PLAIN.render_prompt("short", 100) == PLAIN.render_prompt("short")


def test_a_hint_is_a_message_of_its_own_without_the_header_of_an_answer():
    hint = PLAIN.render_hint("open 1")
    assert PLAIN.tokenizer.decode(hint, skip_special_tokens=False) == "\n<|im_start|>user\nhint: open 1<|im_end|>"


def test_bug_112_a_template_that_spells_the_first_token_gets_one():
    made = chat("{{ bos_token }}" + chats.PLAIN, bos_token="<|endoftext|>")
    assert made.render_prompt("q").count(BEGIN) == 1 and BEGIN not in made.render_observation("r")


def test_bug_115_the_end_of_a_turn_is_the_templates_and_others_may_stop_too():
    made = TemplateTokenizer(chats.tokenizer(), ChatTemplate(chats.PLAIN, {}), stop_ids=[BEGIN, END])
    assert made.end_of_turn == END and made.stop_ids == (END, BEGIN)


def test_a_template_that_strips_is_followed():
    made = chat(chats.PLAIN.replace("m.content", "m.content | trim"))
    assert made.render_prompt("  q\n") == whole(made, [say("user", "  q\n")]) == made.render_prompt("q")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content }}", "drops an earlier answer"),
        ("{% for m in messages %}{{ m.content }} {% endfor %}", "no special token"),
        (chats.PLAIN + "{{ messages | length }}", "not append-only: up to the second text"),
        (chats.PLAIN.replace("messages %}", "messages[-3:] %}"), "not append-only: up to the third text"),
        ("{% for m in messages %}", "cannot render a conversation of user, assistant"),
        ("{{ raise_exception('no ' + messages[0].role) }}", "cannot render .*: no user"),
    ],
)
def test_a_template_that_cannot_be_extended_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        chat(source)


def test_a_text_that_the_template_treats_otherwise_is_refused():
    made = chat("{% if messages[-1].content == 'x' %}!{% endif %}" + chats.PLAIN)
    with pytest.raises(ValueError, match="frames 'x' otherwise"):
        made.render_prompt("x")


def test_a_marked_answer_is_rendered_as_it_is():
    marked = chats.PLAIN.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert chat(marked).render_prompt("q") == PLAIN.render_prompt("q")


def folder_of(path, **settings):
    chats.tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": chats.PLAIN} | settings))
    return path


@pytest.mark.parametrize("place", ["string", "list", "file"])
def test_a_folder_of_hugging_face_is_read(tmp_path, place):
    listed = [{"name": "rag", "template": "{{ x }}"}, {"name": "default", "template": chats.PLAIN}]
    folder_of(tmp_path, chat_template={"string": chats.PLAIN, "list": listed, "file": "{{ old }}"}[place])
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}" + chats.PLAIN)
        folder_of(tmp_path, bos_token={"content": "<|endoftext|>", "lstrip": False})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, BEGIN]}))
    made = TemplateTokenizer.load(tmp_path)
    assert made.stop_ids == (END, BEGIN)
    assert made.render_prompt("q") == [BEGIN] * (place == "file") + PLAIN.render_prompt("q")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: no readable tokenizer"),
        ("tokenizer_config.json", "{}", "no chat template"),
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json: expected a JSON object, got list"),
        ("generation_config.json", "{", r"generation_config\.json: no readable JSON"),
        ("chat_template.jinja", "{% if %}", "cannot render"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(tmp_path, file, content, message):
    (folder_of(tmp_path) / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        TemplateTokenizer.load(tmp_path)


def test_decoding_leaves_special_tokens_out_and_keeps_the_rest():
    ids = [START, *PLAIN.encode(" a\n"), chats.tokenizer().token_to_id("<think>"), END]
    assert PLAIN.decode(ids) == " a\n<think>"
    assert isinstance(PLAIN.tokenizer, tokenizers.Tokenizer)
