"""Every format by a handmade file, damage named and passed over, and the real files where they are."""

import pytest

from mpo_jax.scoring import readers
from mpo_jax.scoring.transcripts import Mistake, Tokens
from mpo_jax.store.episode import Episode
from mpo_jax.store.sqlite import EpisodeStore
from scoring import files


def read(path, kind):
    errors = []
    return list(readers.read(path, kind, errors)), errors


def test_messages_with_everything(tmp_path):
    call = {"id": "c", "function": {"name": "find", "arguments": '{"id": 1}'}}
    logprobs = {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []}]}
    messages = [
        {"role": "assistant", "content": "an example", "weight": 0},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "where "},
                {"type": "text", "text": "is it?"},
                {"type": "image", "text": None},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [call], "logprobs": logprobs, "ref_logprobs": [-1.5]},
        {"role": "assistant", "reasoning_content": "hm", "content": "there", "logprobs": [-0.1, -0.2], "score": 0.75},
    ]
    row = {"id": 3, "task_id": "t", "messages": messages, "reward": 1, "answer": "there", "scores": {"prm": 0.5}}
    (one,), errors = read(files.write_lines(tmp_path / "x.jsonl", [row]), "messages")
    assert not errors
    assert (one.episode_id, one.task_id, one.reward, one.answer, one.scores) == ("3", "t", 1.0, "there", {"prm": 0.5})
    assert [m.action for m in one.messages] == [False, False, True, True]
    assert [m.text for m in one.messages] == ["an example", "where is it?", 'find({"id": 1})', "hm\nthere"]
    assert [(m.logprobs, m.ref_logprobs, m.score) for m in one.messages[2:]] == [
        ([-0.5], [-1.5], None),
        ([-0.1, -0.2], None, 0.75),
    ]


def test_bare_lists_of_messages_are_grouped_by_their_prompt(tmp_path):
    rows = [files.chat("a"), files.chat("b", "c"), files.chat("a", prompt="who?")]
    found, errors = read(files.write_lines(tmp_path / "x.jsonl", rows), "messages")
    assert not errors
    assert [one.episode_id for one in found] == ["1", "2", "3"]
    assert found[0].task_id == found[1].task_id != found[2].task_id


def test_tau_bench(tmp_path):
    items = [files.tau_bench_item(3, 0, 1.0), files.tau_bench_item(3, 1, 0.0), files.tau_bench_item(3, 1, 0.0)]
    found, errors = read(files.write_json(tmp_path / "x.json", items), "tau_bench")
    assert not errors
    assert [one.episode_id for one in found] == ["3-0", "3-1", "3-1#2"]  # a resumed run held a trial twice
    assert [m.action for m in found[0].messages] == [False, False, True, True, False]
    assert found[0].messages[3].text == 'find({"id": 1})'


def test_tau2(tmp_path):
    found, errors = read(files.write_json(tmp_path / "x.json", files.tau2_file(1.0, None)), "tau2")
    assert not errors
    assert [(one.episode_id, one.task_id, one.reward) for one in found] == [
        ("sim0", "airline_3", 1.0),
        ("sim1", "airline_3", None),
    ]
    assert [m.action for m in found[0].messages] == [True, False, True, False]
    assert found[0].messages[2].text == 'find({"id": 1})'


def test_verifiers_results_with_tokens(tmp_path):
    (one,), errors = read(files.write_lines(tmp_path / "x.jsonl", [files.verifiers_row()]), "verifiers")
    assert not errors
    assert (one.task_id, one.reward) == ("7", 0.5)
    assert [m.action for m in one.messages] == [False, True, False, True]
    assert [m.logprobs for m in one.messages] == [None, [-0.5, -0.5], None, [-0.5]]
    mask = [False, False, True, True, False, False, True]
    assert one.tokens == Tokens(ids=[1, 2, 3, 4, 5, 6, 7], messages=[1] * 4 + [3] * 3, mask=mask)


def test_verifiers_results_whose_prompts_were_tokenised_again_have_text_only(tmp_path):
    row = files.verifiers_row(prompts=((1, 2), (1, 2, 8, 4, 5, 6)))
    (one,), _ = read(files.write_lines(tmp_path / "x.jsonl", [row]), "verifiers")
    assert one.tokens is None
    assert one.messages[1].logprobs == [-0.5, -0.5]


def test_verifiers_traces_take_the_branch_of_the_last_node(tmp_path):
    (one,), errors = read(files.write_lines(tmp_path / "x.jsonl", [files.verifiers_trace()]), "verifiers")
    assert not errors
    assert (one.episode_id, one.task_id, one.reward) == ("abc", "5", 1.0)  # 0.75 + 0.25
    assert [m.text for m in one.messages] == ["be brief", "where?", "here"]
    assert (one.messages[2].logprobs, one.messages[2].ref_logprobs) == ([-0.25], [-1.0])
    assert one.tokens == Tokens(ids=[1, 2, 3, 4], messages=[0, 1, 2, 2], mask=[False, False, False, True])


def test_who_and_when(tmp_path):
    files.write_json(tmp_path / "10.json", files.hand_crafted())
    files.write_json(tmp_path / "2.json", files.generated())
    found, errors = read(tmp_path, "who_and_when")
    assert not errors
    assert [one.episode_id for one in found] == ["2", "10"]
    assert [one.mistake for one in found] == [Mistake("Checker", 1), Mistake("Orchestrator", 2)]
    assert [m.agent for m in found[1].messages] == ["human", "Orchestrator", "Orchestrator", "WebSurfer"]
    assert [m.action for m in found[1].messages] == [False, True, True, True]
    assert [m.action for m in found[0].messages] == [True, True, True]


def test_our_store(tmp_path):
    episode = Episode(
        episode_id="g0-1",
        group_id=0,
        task_id="t",
        tokens=[5, 6, 7, 8, 9],
        action_mask=[False, True, False, True, True],
        executable_mask=[False, True, False, True, True],
        turn_ids=[0, 0, 1, 1, 1],
        logprobs=[0.0, -0.5, 0.0, -0.25, -0.125],
        rewards=[0.25, 0.5],
        state_ids=[0, 1],
        versions=[0, 0],
        end_reason="terminated",
        metadata={"observations": ["q", "hits"], "actions": ["search", "answer"]},
    )
    store = EpisodeStore(tmp_path / "x.sqlite")
    store.add(0, [episode])
    store.close()
    (one,), errors = read(tmp_path / "x.sqlite", "store")
    assert not errors
    assert (one.episode_id, one.reward, one.answer) == ("g0-1", 0.75, "answer")
    assert [m.text for m in one.messages] == ["q", "search", "hits", "answer"]
    assert [m.logprobs for m in one.messages] == [None, [-0.5], None, [-0.25, -0.125]]
    assert one.tokens == Tokens(ids=[5, 6, 7, 8, 9], messages=[0, 1, 2, 3, 3], mask=episode.action_mask)


@pytest.mark.parametrize("metadata", [{"observations": 5}, {"actions": ["go", 1.5]}, {"actions": "go"}, {}])
def test_metadata_of_our_store_may_be_anything(tmp_path, metadata):
    turn = {name: [value] for name, value in (("tokens", 5), ("action_mask", True), ("executable_mask", True))}
    turn |= {"turn_ids": [0], "logprobs": [-0.5], "rewards": [1.0], "state_ids": [0], "versions": [0]}
    rest = {"group_id": 0, "task_id": "t", "end_reason": "terminated", "metadata": metadata}
    store = EpisodeStore(tmp_path / "x.sqlite")
    none = {name: [] for name in turn}  # an episode that ended before its first turn
    store.add(0, [Episode(episode_id="a", **turn, **rest), Episode(episode_id="b", **none, **rest)])
    store.close()
    (one,), errors = read(tmp_path / "x.sqlite", "store")
    assert (one.episode_id, one.reward) == ("a", 1.0)
    assert errors == [f"{tmp_path / 'x.sqlite'}: episode 'b': no messages, expected at least one"]


def test_every_episode_has_a_name_of_its_own(tmp_path):
    rows = [{"id": name, "messages": files.chat("a")} for name in ("a", "a", "a#2", "a", "a#2")]
    found, _ = read(files.write_lines(tmp_path / "x.jsonl", rows), "messages")
    assert [one.episode_id for one in found] == ["a", "a#2", "a#2#2", "a#3", "a#2#3"]


@pytest.mark.parametrize("field", ["completion_mask", "completion_logprobs"])
@pytest.mark.parametrize("change", [lambda values: values[:-1], lambda values: [*values, values[-1]]])
def test_a_turn_whose_lists_differ_in_length_is_refused(tmp_path, field, change):
    row = files.verifiers_row()
    tokens = row["trajectory"][1]["tokens"]
    tokens[field] = change(tokens[field])
    found, errors = read(files.write_lines(tmp_path / "x.jsonl", [row]), "verifiers")
    assert not found and "x.jsonl:1: turn 1: ids, mask and log-probs of its completion have lengths [1, " in errors[0]


def test_a_trace_that_marks_tokens_of_others_is_refused(tmp_path):
    row = files.verifiers_trace()
    row["nodes"][1]["mask"] = [True]
    found, errors = read(files.write_lines(tmp_path / "x.jsonl", [row]), "verifiers")
    assert not found and errors[0].endswith("x.jsonl:1: tokens.mask is true in messages[1], which is no action")


@pytest.mark.parametrize("kind", ["messages", "verifiers", "tau_bench", "tau2"])
def test_a_folder_is_no_file(tmp_path, kind):
    with pytest.raises(ValueError, match=f"{tmp_path}: a folder, expected a"):
        read(tmp_path, kind)


def test_one_bad_episode_is_named_and_passed_over(tmp_path):
    good = {"messages": files.chat("a")}
    path = tmp_path / "x.jsonl"
    files.write_lines(path, [good, {"messages": [{"role": 3}]}, {"messages": []}, good])
    path.write_text(path.read_text() + '{"messages": [\n' + '{"reward": 1}\n')
    found, errors = read(path, "messages")
    assert [one.episode_id for one in found] == ["1", "4"]
    assert [error.split(": ")[0] for error in errors] == [f"{path}:{line}" for line in (2, 3, 5, 6)]
    for error, named in zip(errors, ("$.messages[0].role", "no messages", "no JSON", "`messages`"), strict=True):
        assert named in error


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"logprobs": [-0.5, float("nan")]}, "messages[2].logprobs[1]"),
        ({"logprobs": [0.5]}, "messages[2].logprobs[0]"),
        ({"logprobs": [-0.5], "ref_logprobs": [-0.5, -0.5]}, "messages[2].ref_logprobs has length 2"),
        ({"logprobs": [], "ref_logprobs": [-0.5]}, "messages[2].ref_logprobs has length 1, expected 0"),
    ],
)
def test_log_probs_that_are_none_are_refused(tmp_path, message, named):
    messages = files.chat("a")
    messages[-1] |= message
    found, errors = read(files.write_lines(tmp_path / "x.jsonl", [messages]), "messages")
    assert not found
    assert named in errors[0]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"messages": files.chat("a"), "reward": float("inf")}, "reward is inf"),
        ({"messages": [{"role": "assistant", "content": "a", "score": float("nan")}]}, r"messages[0].score is nan"),
        ({"messages": files.chat("a \ud800")}, r"messages[2] holds the lone surrogate '\ud800'"),
        ({"messages": files.chat("a"), "task_id": "\udfff"}, r"task holds the lone surrogate '\udfff'"),
    ],
)
def test_what_no_number_or_text_is_is_refused(tmp_path, row, named):
    found, errors = read(files.write_lines(tmp_path / "x.jsonl", [row, {"messages": files.chat("b")}]), "messages")
    assert len(found) == 1
    assert errors[0].startswith(f"{tmp_path / 'x.jsonl'}:1: ") and named in errors[0]


def test_what_is_nested_without_end_is_passed_over(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("[" * 200_000 + "\n" + "{}\n")
    found, errors = read(path, "messages")
    assert not found
    assert [error.split(": ")[0] for error in errors] == [f"{path}:1", f"{path}:2"]


def test_a_trace_whose_task_is_something_else_is_named(tmp_path):
    rows = [files.verifiers_trace() | {"task": {"data": "x"}}, files.verifiers_trace()]
    found, errors = read(files.write_lines(tmp_path / "x.jsonl", rows), "verifiers")
    assert [one.task_id for one in found] == ["5"]
    assert "$.task.data" in errors[0]


def test_a_file_that_cannot_be_read_is_passed_over(tmp_path):
    files.write_json(tmp_path / "1.json", files.hand_crafted(step="1"))
    (tmp_path / "2.json").mkdir()
    found, errors = read(tmp_path, "who_and_when")
    assert len(found) == 1
    assert errors == [f"{tmp_path / '2.json'}: cannot be read: Is a directory"]


@pytest.mark.parametrize("step", ["4", "-1", "one", None])
def test_labels_that_point_nowhere_are_refused(tmp_path, step):
    files.write_json(tmp_path / "1.json", files.hand_crafted(step=step))
    found, errors = read(tmp_path, "who_and_when")
    assert not found
    assert "mistake_step" in errors[0]


@pytest.mark.parametrize("kind", ["tau_bench", "tau2", "who_and_when"])
def test_files_that_are_something_else_are_an_error(tmp_path, kind):
    path = files.write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(ValueError, match="expected"):
        read(path if kind != "who_and_when" else files.write_json(tmp_path / "y.txt", 1), kind)
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "absent", kind)


def test_damaged_documents_name_their_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[{]")
    with pytest.raises(ValueError, match=r"x\.json: no JSON"):
        read(path, "tau_bench")


@pytest.mark.skipif(not (files.DATA / "who_and_when").is_dir(), reason="the Who&When files are not beside the checkout")
@pytest.mark.parametrize(
    ("split", "count", "mean", "longest", "differ"),
    [("Algorithm-Generated", 126, 8.7, 10, 3), ("Hand-Crafted", 58, 51.6, 130, 2)],
)
def test_all_of_who_and_when_loads(split, count, mean, longest, differ):
    found, errors = read(files.DATA / "who_and_when" / split, "who_and_when")
    assert not errors
    lengths = [len(one.messages) for one in found]
    assert (len(found), round(sum(lengths) / count, 1), max(lengths)) == (count, mean, longest)
    labels = [(one.messages[one.mistake.step], one.mistake.agent) for one in found]
    assert sum(agent not in message.role for message, agent in labels) == differ
    assert all(message.action for message, _ in labels)
