"""The environment: rewards, limits, what is shown, and actions that are none."""

import subprocess
import sys

import pytest
from gymnasium.utils.env_checker import check_env

from mpo_jax.environments.corpus import Corpus, Document
from mpo_jax.environments.questions import Hop, Question, questions
from mpo_jax.environments.search import NO_HITS, UNKNOWN_ACTION, SearchEnvironment, normalise_answer

FIELDS = (
    ("capital name", "Glory City"),
    ("national anthem name", '"Hail, Hail Freedonia" (Land of the Brave and Free)'),
)
CORPUS = Corpus([Document("Freedonia", "Government", FIELDS)])
QUESTION = Question(
    task_id="one",
    template="capital",
    text="what is the capital of freedonia?",
    answer="glory city",
    hops=(Hop("capital", "freedonia"),),
    entities=("freedonia", "glory city"),
    countries=("freedonia",),
    split="train",
)


def started(**settings) -> SearchEnvironment:
    environment = SearchEnvironment(questions=[QUESTION], corpus=CORPUS, **settings)
    environment.reset()
    return environment


def test_gymnasium_accepts_it():
    check_env(SearchEnvironment(), skip_render_check=True)


def test_reset_draws_from_its_split_and_repeats_by_seed():
    environment = SearchEnvironment("held_out")
    draws = [environment.reset(seed=seed)[0] for seed in (1, 2, 1)]
    assert draws[0] == draws[2] != draws[1]
    assert set(draws) <= {question.text for question in questions("held_out")}
    assert environment.reset(options={"question": QUESTION})[0] == QUESTION.text


@pytest.mark.parametrize(
    ("answer", "reward"), [("Glory City", 1.0), ("the glory-city.", 1.0), ("glory", 0.0), ("", 0.0)]
)
def test_answer_ends_the_episode(answer, reward):
    _, given, terminated, truncated, info = started().step(f"answer {answer}")
    assert (given, terminated, truncated) == (reward, True, False)
    assert info["success"] is (reward == 1.0) and info["end_reason"] == "answer" and info["task_id"] == "one"


def test_search_shows_a_line_a_hit_and_open_shows_more():
    environment = started(snippet_words=5)
    assert environment.step("search anthem")[0] == '1 freedonia government: national anthem name: "hail, hail ..'
    assert environment.step("open 1")[0] == (
        'freedonia government: national anthem name: "hail, hail freedonia" (land of the brave and free)'
    )
    environment.step("search capital")
    assert environment.step("open 1")[0].startswith("freedonia government: capital name: glory city ; national anthem")


def test_open_is_cut_to_its_words():
    environment = started(open_words=4)
    environment.step("search capital")
    assert environment.step("open 1")[0] == "freedonia government: capital name: glory city .."


def test_turn_limit_truncates():
    environment = started(turn_limit=2)
    assert environment.step("search capital")[2:4] == (False, False)
    _, reward, terminated, truncated, info = environment.step("search capital")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["end_reason"] == "turn_limit" and info["success"] is False
    environment.reset()
    environment.step("search capital")
    assert environment.step("answer glory city")[1:4] == (1.0, True, False)


def test_steps_out_of_turn_raise():
    with pytest.raises(RuntimeError, match="reset"):
        SearchEnvironment().step("search x")
    environment = started()
    environment.step("answer x")
    with pytest.raises(RuntimeError, match="reset"):
        environment.step("search x")


@pytest.mark.parametrize(
    "action", ["", " ", "hello", "open", "open x", "open 0", "open -1", "open ²", "☃ é", "\0", "x" * 99999]
)
def test_other_actions_are_unknown_and_cost_a_turn(action):
    environment = started(turn_limit=1)
    observation, reward, _, truncated, _ = environment.step(action)
    assert (observation, reward, truncated) == (UNKNOWN_ACTION, 0.0, True)


@pytest.mark.parametrize(
    "action", ["open 1", "search", "search ☃", "search zzz", 'search "((', "search " + "zz " * 9999]
)
def test_nothing_found(action):
    assert started().step(action)[0] == NO_HITS


def test_equal_states_have_equal_ids_in_every_process():
    ids = [started().step("search capital")[4]["state_id"] for _ in range(2)]
    assert ids[0] == ids[1] != started().step("search anthem")[4]["state_id"]
    assert 0 <= ids[0] < 2**31
    script = (
        "from mpo_jax.environments.search import SearchEnvironment as E;"
        "from mpo_jax.environments.questions import questions as q;"
        "print(E().reset(options={'question': q('train')[0]})[1]['state_id'])"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(printed) == SearchEnvironment().reset(options={"question": questions("train")[0]})[1]["state_id"]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Gambia", "gambia"),
        ("São Tomé", "sao tome"),
        ("Port-au-Prince", "port au prince"),
        ("N'Djamena!", "ndjamena"),
        ("a", ""),
    ],
)
def test_normalise_answer(text, normal):
    assert normalise_answer(text) == normal == normalise_answer(normal)
