"""Made-up names: shown, understood, and without effect where none are given."""

import random

from mpo_jax.environments.questions import questions
from mpo_jax.environments.renaming import RenamedEnvironment, new_names
from mpo_jax.environments.search import SearchEnvironment
from mpo_jax.environments.search_policy import ScriptedPolicy

ENVIRONMENT = RenamedEnvironment(SearchEnvironment())


def play(question, rename):
    """What a noiseless policy that thinks in the real names reads, and its reward; its actions are put into the new."""
    plain, texts = SearchEnvironment(), []
    policy = ScriptedPolicy()
    observation, _ = plain.reset(options={"question": question})
    shown, _ = ENVIRONMENT.reset(options={"question": question, "rename": rename})
    policy.reset(question)
    over = False
    while not over:
        texts.append(shown)
        action = policy.act(observation)
        observation, _, terminated, truncated, _ = plain.step(action)
        for old, new in sorted(rename.items(), key=lambda pair: -len(pair[0])):
            action = action.replace(old, new)
        shown, reward, *_ = ENVIRONMENT.step(action)
        over = terminated or truncated
    return texts, reward


def test_an_answer_in_made_up_names_is_right_and_no_entity_shows_through():
    for question in questions("train")[:200:20]:
        entities = [entity for entity in question.entities if entity.isalpha() and len(entity) > 3]
        rename = {entity: f"qq{index}zz" for index, entity in enumerate(entities)}
        texts, reward = play(question, rename)
        assert reward == 1.0, question.text
        words = {word for text in texts for word in text.replace(":", " ").split()}
        assert not words & set(entities)


def test_without_names_nothing_changes():
    question = questions("train")[0]
    plain = SearchEnvironment()
    first = plain.reset(options={"question": question})
    assert ENVIRONMENT.reset(options={"question": question}) == first
    action = "search capital france"
    assert ENVIRONMENT.step(action) == plain.step(action)


def test_new_names_are_one_to_one_and_seeded():
    for question in questions("train")[:50]:
        names = new_names(question, random.Random(1))
        assert names.keys() == set(question.entities)
        assert len(set(names.values())) == len(names)
        assert names == new_names(question, random.Random(1))
