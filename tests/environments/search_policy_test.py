"""The scripted policy: it reads only what it is shown, and fails as often as its noise says."""

import random

import msgspec

from mpo_jax.environments.data.build_questions import solvable
from mpo_jax.environments.questions import questions
from mpo_jax.environments.search import SearchEnvironment
from mpo_jax.environments.search_policy import ScriptedPolicy, read

SAMPLE = random.Random(0).sample(questions("train"), 400)


def success(noise: float) -> float:
    environment, policy = SearchEnvironment(), ScriptedPolicy(noise, random.Random(1))
    return sum(solvable(question, environment, policy) for question in SAMPLE) / len(SAMPLE)


def test_more_noise_means_less_success():
    rates = [success(noise) for noise in (0.0, 0.1, 0.3, 0.6, 1.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1.0
    assert 0.1 <= rates[2] <= 0.3
    assert rates[-1] < 0.05


def test_same_seed_same_actions():
    assert success(0.3) == success(0.3)


def test_policy_does_not_look_at_the_answer():
    environment, policy = SearchEnvironment(), ScriptedPolicy()
    for question in SAMPLE[:50]:
        blind = msgspec.structs.replace(question, answer="", entities=(), countries=(), text="")
        observation, over = environment.reset(options={"question": question})[0], False
        policy.reset(blind)
        while not over:
            observation, reward, terminated, truncated, _ = environment.step(policy.act(observation))
            over = terminated or truncated
        assert reward == 1.0


def test_read_parses_hits_and_documents():
    hits = read(
        "1 france government: capital name: paris\n2 isle of man people and society: population: 87,545 ..\nno hits"
    )
    assert [(h.number, h.country, h.section, h.field, h.text, h.cut) for h in hits] == [
        ("1", "france", "government", "capital name", "paris;", False),
        ("2", "isle of man", "people and society", "population", "87,545 ..", True),
    ]
    (document,) = read("france government: capital name: paris ; capital note: applies to ..")
    assert (document.number, document.text, document.cut) == (None, "paris;", False)
    assert read("what is the capital of france?") == []


def test_what_is_answered_stands_so_in_what_was_read():
    """Behind a space, so that it has the same ids in both places and copying suffices: ".fr", not "fr"."""
    environment, policy = SearchEnvironment(), ScriptedPolicy()
    for question in SAMPLE:
        seen, over = environment.reset(options={"question": question})[0], False
        policy.reset(question)
        action = policy.act(seen)
        while not over:
            observation, _, terminated, truncated, _ = environment.step(action)
            seen, over, last = seen + " " + observation.replace("\n", " "), terminated or truncated, action
            action = "" if over else policy.act(observation)
        assert f" {last.removeprefix('answer ')}" in seen
