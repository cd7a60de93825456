"""Transcripts, and the names that are put in them."""

import random
import re

from mpo_jax.environments.demonstrations import demonstrate, made_up_name, renamed
from mpo_jax.environments.questions import questions
from mpo_jax.environments.search import SearchEnvironment
from mpo_jax.environments.search_policy import ScriptedPolicy


def test_names_are_plain_and_various():
    rng = random.Random(0)
    names = [made_up_name(rng) for _ in range(2000)]
    assert all(re.fullmatch(r"[a-z]+( [a-z]+){0,2}", name) for name in names)
    assert len(set(names)) > 1700
    assert {len(name.split()) for name in names} == {1, 2, 3}


def test_renamed_takes_whole_words_longest_first_and_once():
    rename = {"guinea": "A", "papua new guinea": "guinea", "": "x", "n'djamena": "B"}
    assert renamed("Papua New Guinea, Guinea; guineas; N'Djamena", rename) == "guinea, A; guineas; B"
    assert renamed("text", {}) == "text"


def test_transcript_is_an_episode():
    question = questions("train")[0]
    transcript = demonstrate(question, ScriptedPolicy(), SearchEnvironment())
    assert transcript[0][0] == question.text
    assert transcript[-1][1] == f"answer {question.answer}"


def test_rename_is_consistent():
    rng = random.Random(0)
    for question in rng.sample(questions("train"), 100):
        rename = {entity: made_up_name(rng) for entity in question.entities}
        plain = demonstrate(question, ScriptedPolicy(), SearchEnvironment())
        changed = demonstrate(question, ScriptedPolicy(), SearchEnvironment(), rename)
        assert changed == [(renamed(seen, rename), renamed(done, rename)) for seen, done in plain]
        answered = changed[-1][1].replace("answer .", "answer ")  # an internet code is written .fr
        assert answered == f"answer {rename[question.answer]}"
        text = "\n".join(seen + "\n" + done for seen, done in changed)
        assert not any(
            re.search(rf"(?<!\w){re.escape(old)}(?!\w)", text) for old in rename if old.isalpha() and len(old) > 3
        )
