"""Whatever a tool answers, an episode is lost at most: never the worker, and nothing is tokenised by the megabyte."""

import math

import gymnasium
import pytest
from fakes import Letters, ScriptedEngine, say

from mpo_jax.environments.text import MAXIMAL_TEXT
from mpo_jax.rollout.agent import run_episodes
from mpo_jax.rollout.conversation import Job, Limits
from mpo_jax.rollout.observations import observe
from mpo_jax.rollout.worker import Rollout, run_groups
from mpo_jax.store.episode import decode, encode
from mpo_jax.store.sqlite import EpisodeStore

FINE = ("on", 0.0, False, False, {})
BAD = {
    "half a surrogate pair": ("\ud800", 0.0, False, False, {}),
    "no text": (None, 0.0, False, False, {}),
    "no mapping": ("on", 0.0, False, False, None),
    "no number": ("on", "much", False, False, {}),
    "no id": ("on", 0.0, False, False, {"state_id": -1}),
    "no id either": ("on", 0.0, False, False, {"state_id": 2**31}),
    "too few": ("on", 0.0),
}


class Scripted(gymnasium.Env):
    """Says what its task says, first and then; a task of another kind says `FINE` for ever."""

    def reset(self, *, seed=None, options=None):
        self.answer = options["answer"]
        return options.get("first", ("hi", {}))

    def step(self, action):
        return self.answer


class Counted(Letters):
    """Counts the characters that it is given to tokenise."""

    given = 0

    def render_prompt(self, text, limit=None):
        self.given = max(self.given, len(text))
        return super().render_prompt(text, limit)


def play(answer=FINE, *, tokenizer=None, **options):
    job = Job("e", 0, {"answer": answer} | options, environment_seed=0, seed=0)
    (episode,) = run_episodes(
        ScriptedEngine(say("a")), tokenizer or Letters(), Scripted, [job], limits=Limits(observation_tokens=10, turns=3)
    )
    return decode(encode(episode))


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_BUG_145_an_answer_that_is_none_fails_its_own_episode(answer):
    episode = play(answer)
    assert (len(episode.rewards), episode.end_reason) == (1, "truncated") and math.isnan(episode.rewards[0])
    assert "Error: " in episode.metadata["error"]


@pytest.mark.parametrize("first", [("\udfff", {}), ("hi", {"state_id": "seven"}), ("hi", []), "hi!", None])
def test_so_does_one_at_the_reset(first):
    episode = play(first=first)
    assert (episode.rewards, episode.end_reason) == ([], "truncated") and episode.metadata["error"]


def test_the_worker_goes_on(tmp_path):
    """Group 1 of three is broken: it is stored with its reasons, and the others are as they would have been."""
    store = EpisodeStore(tmp_path / "episodes.sqlite")
    end = ("on", 1.0, True, False, {})
    rollout = Rollout(
        engine=ScriptedEngine(say("a")),
        tokenizer=Letters(),
        make_environment=Scripted,
        task_stream=lambda group_id: {"answer": BAD["half a surrogate pair"] if group_id == 1 else end},
        group_size=2,
    )
    assert run_groups(rollout, store, 3) == 3
    errors = [episode.metadata.get("error", "") for episode in store.episodes()]
    assert ["surrogates not allowed" in error for error in errors] == [False, False, True, True, False, False]


def test_megabytes_are_cut_before_they_are_tokenised():
    tokenizer = Counted()
    big = "x" * 5_000_000
    episode = play((big, 0.0, False, False, {"page": big, "pages": [big], "few": ["y"]}), tokenizer=tokenizer)
    assert tokenizer.given == 640  # 64 characters for each of 10 ids
    assert len(encode(episode)) < 3 * MAXIMAL_TEXT
    assert len(episode.metadata["page"]) == MAXIMAL_TEXT and episode.metadata["page"].endswith("[cut]")
    assert "pages" not in episode.metadata and episode.metadata["few"] == ["y"]
    assert [len(text) for text in episode.metadata["observations"]] == [2, 640, 640, 640]


def test_equal_states_are_told_by_all_of_the_text():
    one, other = (observe("x" * 10_000 + end, {}, 10) for end in "ab")
    assert one.text == other.text and one.state_id != other.state_id


def test_notes_are_what_a_record_can_hold():
    info = {"a": "\ud800", "b": 2**70, "c": 1.5, 4: "no name", "d": object(), "\udc00": True, "task_id": "t\ud800"}
    observation = observe("on", info, 10)
    assert observation.notes == {"a": "\\ud800", "c": 1.5, "\\udc00": True}
    assert observation.task_id == "t\\ud800"


def test_an_error_is_told_in_characters():
    class Broken(Scripted):
        def step(self, action):
            raise OSError("bad byte \udc80 " + "x" * 10**6)

    job = Job("e", 0, {"answer": None}, environment_seed=0, seed=0)
    (episode,) = run_episodes(ScriptedEngine(say("a")), Letters(), Broken, [job])
    error = decode(encode(episode)).metadata["error"]
    assert error.startswith("OSError: bad byte \\udc80 x") and len(error) == MAXIMAL_TEXT
