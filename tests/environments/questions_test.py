"""The packaged questions: how many, how long, split by country, and all of them solvable."""

import pytest

from mpo_jax.environments.data.build_questions import solvable
from mpo_jax.environments.questions import RELATIONS, country_split, quantity, questions
from mpo_jax.environments.search import SearchEnvironment
from mpo_jax.environments.search_policy import ScriptedPolicy

BOTH = questions("train") + questions("held_out")


def test_counts():
    assert len(questions("train")) >= 600
    assert len(questions("held_out")) >= 150
    assert len({question.template for question in BOTH}) >= 6
    assert {len(question.hops) for question in BOTH} == {2, 3, 4}
    assert sum("larger" in question.template for question in BOTH) <= 0.1 * len(BOTH)


def test_splits_share_no_country():
    for split in ("train", "held_out"):
        assert all(
            country_split(c) == question.split == split for question in questions(split) for c in question.countries
        )
    train, held_out = ({c for q in questions(split) for c in q.countries} for split in ("train", "held_out"))
    assert train and held_out and not train & held_out


def test_unknown_split_raises():
    with pytest.raises(ValueError, match="split"):
        questions("test")


def test_texts_are_short_plain_and_unique():
    for question in BOTH:
        assert len(question.text.split()) <= 20 and len(question.answer.split()) <= 4
        assert question.text.isascii() and question.text == question.text.lower()
        assert not set(question.answer) & set('()";:')
        assert question.answer in question.entities
    assert len({question.text for question in BOTH}) == len({question.task_id for question in BOTH}) == len(BOTH)


def test_scripted_policy_solves_every_question():
    environment, policy = SearchEnvironment(), ScriptedPolicy()
    assert [question.text for question in BOTH if not solvable(question, environment, policy)] == []


@pytest.mark.parametrize(
    ("relation", "text", "value"),
    [
        ("highest point", "Mont Blanc 4,807 m", "mont blanc"),
        ("highest point", "Mont Blanc 4,807", None),
        ("nationality", "Algerian(s);", "algerian"),
        ("nationality", "Algerian(s)", None),
        ("nationality", "Mosotho (singular), Basotho (plural);", "mosotho"),
        ("neighbour", "Spain 1,224 km;", "spain"),
        ("neighbour", "Spain 1,224 km, France 2 km;", None),
        ("independence year", "5 July 1962 (from France);", "1962"),
        ("telephone code", "country code - 213; landing point", "213"),
        ("internet code", ".dz;", "dz"),
        ("currency", "Algerian dinars (DZD) per US dollar - ++ 79.6", "algerian dinars"),
    ],
)
def test_values(relation, text, value):
    assert RELATIONS[relation].value(text) == value


def test_quantities():
    assert quantity("643,801 sq km") == 643801
    assert quantity("9.98 million sq km") == 9.98e6
    assert quantity("none") == 0
