"""The agent loop, followed by hand on scripted episodes."""

import dataclasses
import math
import threading
import time
import types

import pytest
from fakes import END, Counting, Letters, ScriptedEngine, say
from models import chats

from mpo_jax.rollout import conversation
from mpo_jax.rollout.agent import run_episodes
from mpo_jax.rollout.conversation import Job, Limits, derive_seed
from mpo_jax.rollout.protocol import Generation
from mpo_jax.store.episode import validate

LETTERS = Letters()


def job(index=0, **options):
    return Job(episode_id=f"e{index}", group_id=index, options=options, environment_seed=1, seed=100 + index)


def run(engine, *jobs, **settings):
    episodes = list(run_episodes(engine, LETTERS, Counting, jobs, **settings))
    for episode in episodes:
        validate(episode)
    assert engine.contexts == {}, "every slot is freed"
    return episodes


def text(ids):
    return LETTERS.decode(ids).replace(chr(END), "$")


def test_BUG_004_BUG_006_BUG_008_mask_is_true_on_sampled_ids_only_the_end_of_turn_included():
    (episode,) = run(ScriptedEngine(say("ab")), job(turns=2))
    assert text(episode.tokens) == "<hi>ab$\n<abab>ab$"
    assert episode.action_mask == [False] * 4 + [True] * 3 + [False] * 7 + [True] * 3
    assert episode.executable_mask == episode.action_mask
    assert episode.turn_ids == [0] * 7 + [1] * 10  # the observation belongs to the turn that it precedes
    assert episode.logprobs == [0.0] * 4 + [-1.0, -2.0, -3.0] + [0.0] * 7 + [-1.0, -2.0, -3.0]
    assert (episode.rewards, episode.state_ids, episode.end_reason) == ([0.0, 1.0], [7, 8], "terminated")
    assert (episode.task_id, episode.metadata["question"], episode.metadata["success"]) == ("count", "why", True)
    assert episode.metadata["actions"] == ["ab", "ab"]
    assert episode.metadata["observations"] == ["hi", "abab", "abab"]
    assert "unprintable" not in episode.metadata


def test_BUG_015_a_trailing_observation_is_in_no_list():
    (episode,) = run(ScriptedEngine(say("a")), job(turns=1))
    assert text(episode.tokens) == "<hi>a$"


def test_BUG_105_BUG_114_stored_ids_are_the_context_of_the_engine():
    class Lossy(Letters):  # encode(decode(ids)) differs from ids: 200 and "ab" are the same text
        def decode(self, ids):
            return "".join("ab" if i == 200 else chr(i) for i in ids)

    contexts = []

    def script(context, seed):
        contexts.append(context)
        return [200, 1, END]

    engine = ScriptedEngine(script)
    (episode,) = run_episodes(engine, Lossy(), Counting, [job(turns=3)])
    assert episode.tokens == [*contexts[-1], 200, 1, END]
    assert episode.metadata["actions"][0] == "ab\x01"
    assert sum(episode.action_mask) == 9
    ends = [len(context) for context in contexts]
    assert all(contexts[2][:end] == context for end, context in zip(ends, contexts, strict=True))


def test_BUG_017_a_reply_that_begins_with_a_newline_keeps_its_ids_and_its_mask():
    chat, library = chats.chat(), chats.tokenizer()
    end = library.token_to_id("<|im_end|>")
    sampled = [*library.encode("\n").ids, *library.encode("Paris").ids, end]
    (episode,) = run_episodes(ScriptedEngine(lambda *_: list(sampled)), chat, Counting, [job(turns=1)])
    header = chat.render_prompt("hi")
    assert episode.tokens == header + sampled
    assert episode.action_mask == [False] * len(header) + [True] * len(sampled)
    # Tokenised anew, the header's newline and the reply's are one token: no mask over those ids could tell them apart.
    again = library.encode(library.decode(episode.tokens, skip_special_tokens=False), add_special_tokens=False).ids
    assert len(again) == len(episode.tokens) - 1


def test_BUG_010_BUG_031_BUG_034_a_turn_cut_by_the_engine_gets_no_end_and_ends_the_episode_as_cut():
    def second_turn_is_cut(context, seed):
        return [21, 22, 23] if END in context else [5, END]

    cut, whole = run(ScriptedEngine(lambda c, s: [*c[1:2], 22, 23] if c[1] == ord("x") else [5, END]),
                     job(0, say="x", turns=1), job(1, say="much longer", turns=1))  # fmt: skip
    assert cut.tokens[-3:] == [ord("x"), 22, 23]
    assert (cut.action_mask[-3:], cut.logprobs[-3:]) == ([True] * 3, [-1.0, -2.0, -3.0])
    assert (cut.end_reason, cut.rewards) == ("token_limit", [1.0])  # the environment saw it and paid
    assert (whole.end_reason, whole.tokens[-1]) == ("terminated", END)
    (episode,) = run(ScriptedEngine(second_turn_is_cut), job(turns=3))
    assert (episode.end_reason, len(episode.rewards), episode.tokens[-3:]) == ("token_limit", 2, [21, 22, 23])


@pytest.mark.parametrize(("context_length", "turns"), [(4, 0), (5, 1), (14, 1), (15, 2)])
def test_BUG_037_the_engine_is_never_asked_for_0_tokens(context_length, turns):
    # "<hi>" are 4 ids, "ab$" 3, "\n<abab>" 7: the second turn begins at 14 and needs a context of 15
    engine = ScriptedEngine(say("ab"), context_length=context_length)
    (episode,) = run(engine, job(turns=9))
    assert (len(engine.calls), len(episode.rewards), episode.end_reason) == (turns, turns, "token_limit")
    assert len(episode.tokens) == {0: 0, 1: 7, 2: 17}[turns]


def test_limits_of_turns_of_the_environment_and_of_room():
    engine = ScriptedEngine(say("a"))
    assert run(engine, job(turns=9), limits=Limits(turns=2))[0].end_reason == "turn_limit"
    assert run(engine, job(turns=2), limits=Limits(turns=2))[0].end_reason == "terminated"
    assert run(engine, job(turns=2, truncated=True))[0].end_reason == "truncated"
    assert run(engine, job(), limits=Limits(action_tokens=997))[0].rewards == []
    with pytest.raises(ValueError, match="action_tokens is 0, expected at least 1"):
        Limits(action_tokens=0)
    with pytest.raises(ValueError, match="group_seconds is 0"):
        Limits(group_seconds=0.0)


def test_observations_are_cut_to_their_budget_and_the_template_stays_whole():
    (episode,) = run(ScriptedEngine(say("abc")), job(turns=2, say="0123456789"), limits=Limits(observation_tokens=4))
    assert text(episode.tokens) == "<0123>abc$\n<abca>abc$"


@pytest.mark.parametrize(("fail", "tokens", "rewards"), [("reset", "", 0), ("step", "<hi>a$", 1)])
def test_BUG_056_a_failed_environment_costs_its_own_episode_only(fail, tokens, rewards, caplog):
    failed, fine = sorted(run(ScriptedEngine(say("a")), job(0, fail=fail), job(1)), key=lambda e: e.episode_id)
    assert (text(failed.tokens), failed.end_reason) == (tokens, "truncated")
    assert len(failed.rewards) == rewards and all(map(math.isnan, failed.rewards))
    assert failed.metadata["error"] in ("OSError: no documents", "RuntimeError: tool crashed")
    assert len([r for r in caplog.records if "e0: the environment failed" in r.message]) == 1
    assert (fine.rewards, "error" in fine.metadata) == ([0.0, 1.0], False)


class Choosy(Letters):
    """A template that does not take every text."""

    def render_prompt(self, text, limit=None):
        if "!" in text:
            raise ValueError(f"the chat template frames {text!r} otherwise")
        return super().render_prompt(text, limit)


@pytest.mark.parametrize(("script", "said", "tokens", "rewards"), [("a", "h!", "", 0), ("!", "hi", "<hi>!$", 1)])
def test_a_text_that_the_template_does_not_take_costs_its_own_episode_only(script, said, tokens, rewards):
    """The environment answers "!" with "!!"."""
    engine, jobs = ScriptedEngine(say(script)), [job(0, say=said), job(1, turns=1)]
    failed, fine = sorted(run_episodes(engine, Choosy(), Counting, jobs), key=lambda e: e.episode_id)
    assert (text(failed.tokens), failed.end_reason) == (tokens, "truncated")
    assert len(failed.rewards) == rewards and all(map(math.isnan, failed.rewards))
    assert failed.metadata["error"].startswith("ValueError: the chat template frames")
    assert (fine.rewards, fine.end_reason) == ([1.0], "terminated")  # its last observation is framed for nobody


def random_words(context, seed):
    return [97 + (seed + n) % 26 for n in range(1 + seed % 5)] + [END]


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_what_an_episode_samples_does_not_depend_on_its_company(num_slots):
    jobs = [job(index, turns=1 + index % 4) for index in range(10)]
    engine = ScriptedEngine(random_words, num_slots=num_slots)
    together = {episode.episode_id: episode for episode in run(engine, *jobs)}
    alone = [run(ScriptedEngine(random_words, num_slots=1), one)[0] for one in jobs]
    assert [together[episode.episode_id] for episode in alone] == alone
    assert max(len(call) for call in engine.calls) == num_slots


def test_slots_are_refilled_between_turns():
    engine = ScriptedEngine(say("a"), num_slots=2)
    run(engine, job(0, turns=1), job(1, turns=3), job(2, turns=2))
    assert [len(call) for call in engine.calls] == [2, 2, 2]  # 0 and 1, then 2 in the place of 0


def test_a_turn_carries_the_oldest_version_that_may_have_sampled_it():
    engine = ScriptedEngine(say("a"))
    engine.version = 4

    def new_weights_during_the_first_turn(context, seed):
        engine.version = 5
        return [97, END]

    engine.script = new_weights_during_the_first_turn
    assert run(engine, job(turns=2))[0].versions == [4, 5]


def test_the_executable_part_is_marked_by_the_caller():
    (episode,) = run(
        ScriptedEngine(say("t>x")), job(turns=1), executable=lambda ids: [i > ids.index(62) for i in range(len(ids))]
    )
    assert episode.executable_mask == [False] * 4 + [False, False, True, True]


def test_told_to_stop_it_gives_up_what_is_running_and_frees_the_slots():
    engine = ScriptedEngine(say("a"))
    assert run(engine, job(turns=5), should_stop=lambda: len(engine.calls) == 2) == []


def test_an_engine_that_answers_wrongly_is_an_error():
    with pytest.raises(ValueError, match="2 tokens and 1 logprobs"):
        Generation([1, 2], [-0.5], "stop")
    with pytest.raises(ValueError, match="0 tokens"):
        Generation([], [], "length")
    engine = ScriptedEngine(say("a"))
    engine.generate = lambda new_tokens, seeds: {1: Generation([1], [-0.5], "stop")}
    with pytest.raises(ValueError, match=r"answered slots \[1\], expected some of \[0\]"):
        engine.contexts = {0: []}
        list(run_episodes(engine, LETTERS, Counting, [job()]))


class OneAtATime(ScriptedEngine):
    """Ends one turn a call, the longest under way first; every third call is interrupted and ends none."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.under_way = {}

    def generate(self, new_tokens, seeds):
        assert not new_tokens.keys() & self.under_way.keys(), "asked while under way"
        self.under_way |= super().generate(new_tokens, seeds)
        slot = next(iter(self.under_way))
        return {} if len(self.calls) % 3 == 0 else {slot: self.under_way.pop(slot)}

    def free(self, slot):
        super().free(slot)
        self.under_way.pop(slot, None)


@pytest.fixture
def clock(monkeypatch):
    """The agent's clock, which tells how often the engine was asked."""
    engines = []
    monkeypatch.setattr(conversation, "time", types.SimpleNamespace(monotonic=lambda: len(engines[0].calls)))
    return engines.append


@pytest.mark.parametrize("kind", [ScriptedEngine, OneAtATime])
def test_a_deadline_cuts_between_turns_and_what_was_earned_stays(clock, kind):
    """Two slots: e0 ends in time; e1 is cut after the call of its deadline, under way or not; e2 comes too late."""
    engine = kind(say("a"), num_slots=2)
    clock(engine)
    jobs = [job(0, turns=1), job(1, turns=99), job(2, turns=99)]
    episodes = run(engine, *(dataclasses.replace(one, deadline=3.5) for one in jobs))
    ended, cut, late = sorted(episodes, key=lambda e: e.episode_id)
    assert (ended.end_reason, ended.rewards) == ("terminated", [1.0]) and "deadline_passed" not in ended.metadata
    for episode in (cut, late):
        assert episode.end_reason == "truncated" and episode.metadata["deadline_passed"]
        assert set(episode.rewards) <= {0.0} and "error" not in episode.metadata
    assert len(engine.calls) == 4 and len(cut.rewards) == (4 if kind is ScriptedEngine else 1)


def test_one_whose_deadline_has_passed_is_not_begun(clock):
    engine = ScriptedEngine(say("a"))
    clock(engine)
    (episode,) = run(engine, dataclasses.replace(job(), deadline=-1.0))
    assert (episode.tokens, episode.rewards, engine.calls) == ([], [], [])
    assert episode.metadata == {"deadline_passed": True, "observations": [], "actions": []}


def test_an_engine_may_end_turns_one_by_one():
    jobs = [job(index, turns=1 + index % 3) for index in range(7)]
    expected = run(ScriptedEngine(random_words, num_slots=3), *jobs)
    found = run(OneAtATime(random_words, num_slots=3), *jobs)
    assert sorted(found, key=lambda e: e.episode_id) == sorted(expected, key=lambda e: e.episode_id)


def test_a_turn_that_new_weights_interrupt_carries_the_version_that_began_it():
    engine = OneAtATime(say("a"), num_slots=2)
    engine.version = 4
    plain = engine.generate

    def generate(new_tokens, seeds):
        answer = plain(new_tokens, seeds)
        engine.version = 5  # between two calls, while the other slot's turn is under way
        return answer

    engine.generate = generate
    assert sorted(e.versions for e in run(engine, job(0, turns=1), job(1, turns=1))) == [[4], [4]]


def test_seeds_differ_by_every_part_of_their_path():
    assert len({derive_seed(*path) for path in [(0, 1), (1, 0), (0, 0, 1), (0, 1, 1), (1, 1)]}) == 5
    assert derive_seed(3, 4) == derive_seed(3, 4) < 2**31


class Meeting(Counting):
    """Resets and steps end only when two environments are in one."""

    barrier = threading.Barrier(2, timeout=20)

    def reset(self, **arguments):
        self.barrier.wait()
        return super().reset(**arguments)

    def step(self, action):
        self.barrier.wait()
        return super().step(action)


def test_environments_are_at_work_side_by_side():
    jobs = [job(0, turns=3), job(1, turns=3)]
    episodes = list(run_episodes(ScriptedEngine(say("a")), LETTERS, Meeting, jobs, threads=2))
    assert [e.end_reason for e in episodes] == ["terminated"] * 2 and all("error" not in e.metadata for e in episodes)


class Waiting(Counting):
    """The slow one's first step ends when the releasing one's has."""

    released = threading.Event()

    def step(self, action):
        if self.options.get("slow"):
            assert self.released.wait(20), "held up the others"
        if self.options.get("releases"):
            self.released.set()
        return super().step(action)


def test_a_slow_environment_holds_nobody_up():
    jobs = [job(0, turns=1, slow=True), *(job(n, turns=2) for n in (1, 2)), job(3, turns=1, releases=True)]
    engine = ScriptedEngine(say("a"), num_slots=2)
    episodes = list(run_episodes(engine, LETTERS, Waiting, jobs, threads=2))
    assert sorted(e.episode_id for e in episodes) == ["e0", "e1", "e2", "e3"]
    assert [e.episode_id for e in episodes][:2] == ["e1", "e2"]
    assert all("error" not in e.metadata for e in episodes) and engine.contexts == {}


def test_a_deadline_that_passes_while_the_environment_is_at_work_waits_for_its_answer(clock):
    class Slow(Waiting):
        released = threading.Event()

        def step(self, action):
            answer = super().step(action)
            if self.options.get("say") == "quick" and self.left == 0:
                self.released.set()
            return answer

    engine = ScriptedEngine(say("a"), num_slots=2)
    clock(engine)
    jobs = [dataclasses.replace(job(0, turns=1, slow=True), deadline=1.5), job(1, turns=4, say="quick")]
    slow, _ = sorted(run_episodes(engine, LETTERS, Slow, jobs, threads=2), key=lambda e: e.episode_id)
    assert (slow.end_reason, slow.rewards) == ("terminated", [1.0])


def test_threads_change_no_episode():
    jobs = [job(index, turns=1 + index % 3, fail={4: "step", 5: "reset"}.get(index)) for index in range(7)]
    expected = run(ScriptedEngine(random_words, num_slots=3), *jobs)
    found = run(ScriptedEngine(random_words, num_slots=3), *jobs, threads=3)
    by_id = [sorted(map(repr, episodes)) for episodes in (found, expected)]  # repr, as NaN is not equal to itself
    assert by_id[0] == by_id[1] and "tool crashed" in "".join(by_id[0]) and "no documents" in "".join(by_id[0])


def test_told_to_stop_it_waits_for_the_environments_and_closes_them():
    told, log = threading.Event(), []

    class Telling(Counting):
        def step(self, action):
            if self.options.get("slow"):
                told.set()
                time.sleep(0.2)
                log.append("answers")
            return super().step(action)

        def close(self):
            log.append("closes")

    engine, jobs = ScriptedEngine(say("a"), context_length=10**6), [job(0, turns=2, slow=True), job(1, turns=10**5)]
    assert list(run_episodes(engine, LETTERS, Telling, jobs, threads=2, should_stop=told.is_set)) == []
    assert log == ["answers", "closes", "closes"] and engine.contexts == {}
