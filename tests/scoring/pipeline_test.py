"""A file to a table: the numbers against a plain forward pass, interruptions, and what is cut or missing."""

import tracemalloc

import numpy as np
import pytest
from models import tiny

from mpo_jax.models import huggingface, pretrained
from mpo_jax.scoring import likelihoods, pipeline, rendering, sources, tables
from mpo_jax.scoring.episode_scores import Aggregation
from mpo_jax.scoring.likelihoods import Evaluator, Likelihoods
from mpo_jax.scoring.pipeline import Job
from mpo_jax.scoring.transcripts import Tokens
from scoring import files


@pytest.fixture(scope="module")
def model():
    return pretrained.load("search_tiny")


def alone(config, params, tokens, k):
    """Likelihoods of one episode in float64, from the whole table of its log-probs, nothing packed or tiled."""
    ids = np.array(tokens.ids)
    log_p = tiny.oracle(config, params, ids)[:-1]
    log_p = log_p - log_p.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    logprobs = np.take_along_axis(log_p, ids[1:, None], axis=1)[:, 0]
    entropy = -(np.exp(log_p) * log_p).sum(1)
    top = np.sort(log_p, axis=1)[:, -k:].mean(1)
    certainty = -np.log(log_p.shape[1]) - log_p.mean(1)
    return [x[np.array(tokens.mask)[1:]] for x in (logprobs, entropy, top, certainty)]


def test_packed_rows_say_what_an_episode_alone_says():
    rng, config = np.random.default_rng(0), tiny.config()
    params = tiny.params(config)
    episodes = []
    for length in (5, 200, 90, 2, 160):
        ids, acted = rng.integers(0, config.vocab_size, length).tolist(), rng.random(length - 1) < 0.5
        episodes.append(Tokens(ids, [0] * length, [False, *acted.tolist()]))
    found = Evaluator(config, params, k=3, max_tokens=256, batch_tokens=512)(episodes)
    for tokens, one in zip(episodes, found, strict=True):
        for values, expected in zip(one, alone(config, params, tokens, 3), strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-4)


def test_rows_open_at_a_power_of_two_and_take_what_fits():
    rows = likelihoods.pack_rows([300, 10, 250, 700, 200, 1000], largest=1000)
    assert [(row.capacity, row.members) for row in rows] == [(1000, [5]), (1000, [3, 0]), (256, [2]), (256, [4, 1])]


def uniform(vocabulary):
    """A source that gives every token the same log-prob, and counts its calls."""

    def source(episodes):
        source.calls += 1
        values = [np.full(sum(tokens.mask), -np.log(vocabulary), np.float32) for tokens in episodes]
        return [Likelihoods(x, -x, x, 0 * x) for x in values]

    source.calls = 0
    return source


def unasked(name):
    raise AssertionError(f"model {name} was loaded")


@pytest.fixture
def episodes(tmp_path):
    rows = [{"messages": files.chat("a", "b c d"), "reward": n % 2, "task_id": n // 2} for n in range(6)]
    return str(files.write_lines(tmp_path / "x.jsonl", [*rows, {"messages": 3}]))


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_scores_from_two_models(tmp_path, model, episodes, ending):
    output = tmp_path / f"out.{ending}"
    named = {"policy": uniform(2), "reference": uniform(8)}
    job = Job(episodes, "messages", str(output), "policy", "reference", aggregation=Aggregation(beta=0.5))
    found = pipeline.score(job, named.__getitem__, lambda: model.tokenizer)
    assert found["episodes"] == 6
    assert "x.jsonl:7" in found["unreadable"][0]
    rows = list(tables.read_table(output))
    episode = [row for row in rows if row["level"] == "episode"]
    # Every token's score is β (log 8 − log 2) = log 2, and so is every mean.
    np.testing.assert_allclose([row["score"] for row in rows], np.log(2), rtol=1e-5)
    assert [row["reward"] for row in episode] == [0, 1, 0, 1, 0, 1]
    np.testing.assert_allclose(episode[0]["negative_perplexity"], -2, rtol=1e-5)
    np.testing.assert_allclose(episode[0]["deepconf_lowest"], np.log(2), rtol=1e-5)
    np.testing.assert_allclose(episode[0]["compat_self_certainty"], -np.log(2), rtol=1e-5)
    assert {row["step"] for row in rows if row["level"] == "step"} == {2, 4}
    assert not (tmp_path / f"out.{ending}.work").exists()


def test_the_top_k_form_compares_the_highest_log_probs(tmp_path, model, episodes):
    def source(top):
        def evaluate(chunk):
            sizes = [sum(tokens.mask) for tokens in chunk]
            return [Likelihoods(*(np.full(n, x, np.float32) for x in (-1.0, 1.0, top, 0.0))) for n in sizes]

        return evaluate

    form = Aggregation(top_k=True)
    job = Job(episodes, "messages", str(tmp_path / "out.jsonl"), "p", "r", aggregation=form)
    pipeline.score(job, {"p": source(-5.0), "r": source(-3.0)}.__getitem__, lambda: model.tokenizer)
    assert {row["score"] for row in tables.read_table(job.output)} == {-2.0}


def test_an_interrupted_run_goes_on_and_another_job_does_not(tmp_path, model, episodes, monkeypatch):
    monkeypatch.setattr(pipeline, "CHUNK", 2)
    job = Job(episodes, "messages", str(tmp_path / "out.csv"), "policy", "reference")
    policy = uniform(2)

    def dies(name):
        if name == "reference":
            raise KeyboardInterrupt
        return policy

    with pytest.raises(KeyboardInterrupt):
        pipeline.score(job, dies, lambda: model.tokenizer)
    assert policy.calls == 3
    other = Job(episodes, "messages", job.output, "policy", "reference", max_tokens=9)
    with pytest.raises(ValueError, match="max_tokens is 4096, here 9"):
        pipeline.score(other, dies, lambda: model.tokenizer)

    found = np.load(tmp_path / "out.csv.work" / "policy-000001.npy")
    np.save(tmp_path / "out.csv.work" / "policy-000001.npy", found[:, 1:])
    with pytest.raises(ValueError, match=r"policy-000001\.npy is of other episodes"):
        pipeline.score(job, {"reference": uniform(8)}.__getitem__, lambda: model.tokenizer)
    np.save(tmp_path / "out.csv.work" / "policy-000001.npy", found)

    def resumed(name):
        raise AssertionError(f"the results of {name} are on disk")

    found = pipeline.score(job, resumed, lambda: model.tokenizer)
    assert found["episodes"] == 6


def test_a_job_that_got_nowhere_does_not_block_its_output(tmp_path, model, episodes):
    """A name that was mistyped, and then put right, is another job of the same output."""
    output = str(tmp_path / "out.csv")
    with pytest.raises(ValueError, match="no such file"):
        pipeline.score(Job(f"{episodes}?", "messages", output, "policy"), unasked, lambda: model.tokenizer)
    found = pipeline.score(Job(episodes, "messages", output, "policy"), lambda _: uniform(2), lambda: model.tokenizer)
    assert found["episodes"] == 6


def test_long_episodes_make_short_chunks(tmp_path, model, episodes, monkeypatch):
    length = len(rendering.render(next(iter(pipeline.readers.read(episodes, "messages", []))), model.tokenizer).ids)
    monkeypatch.setattr(pipeline, "CHUNK_TOKENS", 2 * length + 1)
    policy = uniform(2)
    job = Job(episodes, "messages", str(tmp_path / "out.csv"), "policy")
    pipeline.score(job, lambda name: policy, lambda: model.tokenizer)
    assert policy.calls == 3  # six episodes, two of which fit
    monkeypatch.setattr(pipeline, "CHUNK_TOKENS", length - 1)
    pipeline.score(job, lambda name: policy, lambda: model.tokenizer)
    assert policy.calls == 3 + 6  # one that is longer makes a chunk of its own


def test_recorded_log_probs_need_no_model(tmp_path):
    messages = files.chat("a", "b")
    messages[2] |= {"logprobs": [-1.0, -2.0], "ref_logprobs": [-2.0, -5.0]}
    messages[4] |= {"logprobs": [-1.0], "ref_logprobs": [-0.5]}
    path = files.write_lines(tmp_path / "x.jsonl", [messages, files.chat("no log-probs")])
    job = Job(str(path), "messages", str(tmp_path / "out.jsonl"), None, None, levels=("step", "episode"))
    found = pipeline.score(job, unasked, None)
    assert "messages[2].logprobs is missing" in found["unreadable"][0]
    rows = list(tables.read_table(job.output))
    # Steps: (-1.5) - (-3.5) = 2 and -1 - (-0.5) = -0.5; their mean is .75.
    assert [row["score"] for row in rows] == [2.0, -0.5, 0.75]


def test_memory_does_not_grow_with_the_number_of_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "CHUNK", 8)
    messages = files.chat("a", "b c d")
    for index in (2, 4):
        messages[index] |= {"logprobs": [-1.0] * 50, "ref_logprobs": [-2.0] * 50}

    def peak(number):
        path = files.write_lines(tmp_path / "x.jsonl", [{"messages": messages, "reward": 1}] * number)
        tracemalloc.start()
        pipeline.score(Job(str(path), "messages", str(tmp_path / "out.csv"), None, None), unasked, None)
        _, found = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return found

    peak(2)  # compiles
    few, many = (min(peak(number) for _ in range(3)) for number in (16, 96))  # other threads allocate as well
    assert many < few + 80 * 1000  # ids are kept, to tell them apart; an episode is 10 kB


def test_what_is_cut_off_scores_0_and_counts(tmp_path, model):
    path = files.write_lines(tmp_path / "x.jsonl", [files.chat("a b c", "d e f")])
    tokens = rendering.render(next(iter(pipeline.readers.read(path, "messages", []))), model.tokenizer)
    kept = sum(owner == 4 for owner in tokens.messages)
    job = Job(str(path), "messages", str(tmp_path / "out.jsonl"), "p", "r", max_tokens=kept, levels=("step", "episode"))
    pipeline.score(job, {"p": uniform(2), "r": uniform(8)}.__getitem__, lambda: model.tokenizer)
    first, second, episode = tables.read_table(job.output)
    assert (first["score"], first["truncated"], first["num_tokens"]) == (0, 1, 0)
    assert second["truncated"] == 0
    np.testing.assert_allclose([second["score"], episode["score"]], [np.log(4), np.log(4) / 2], rtol=1e-5)


def test_long_episodes_are_passed_over_where_only_whole_ones_are_wanted(tmp_path, model):
    path = files.write_lines(tmp_path / "x.jsonl", [files.chat("a b c d e f g h"), files.chat("a")])
    long, short = pipeline.readers.read(path, "messages", [])
    limit, most = (len(rendering.render(one, model.tokenizer).ids) for one in (short, long))
    job = Job(str(path), "messages", str(tmp_path / "out.csv"), "p", max_tokens=limit, whole=True)
    found = pipeline.score(job, lambda name: uniform(2), lambda: model.tokenizer)
    assert found["episodes"] == 1
    assert f"episode '1': {most} tokens, expected at most {limit}" in found["unreadable"][0]


def test_jobs_that_make_no_sense_are_refused(tmp_path, episodes):
    with pytest.raises(ValueError, match="top-k form needs a model"):
        Job(episodes, "messages", "x.csv", None, "r", aggregation=Aggregation(top_k=True))
    with pytest.raises(ValueError, match="tokens is 'median'"):
        Aggregation(tokens="median")
    with pytest.raises(ValueError, match="a table ends in"):
        pipeline.score(Job(episodes, "messages", str(tmp_path / "x.txt")), unasked, None)


def test_frames_of_our_tokenizer_and_of_a_bare_one(tmp_path, model):
    path = files.write_lines(tmp_path / "x.jsonl", [files.chat("a")])
    (transcript,) = pipeline.readers.read(path, "messages", [])
    ours = model.tokenizer
    found = rendering.render(transcript, ours)
    said, asked, done = (ours.encode(message.text) for message in transcript.messages)
    assert found.ids == [ours.user, *said, ours.user, *asked, ours.assistant, *done, ours.end_of_turn]
    assert found.mask == [False] * (len(found.ids) - len(done) - 1) + [True] * (len(done) + 1)
    bare = rendering.render(transcript, ours.tokenizer)
    text = ours.tokenizer.decode([i for i, mine in zip(bare.ids, bare.mask, strict=True) if mine])
    assert text.split() == ["a"]  # the role before it is not the agent's


def test_another_models_ids_are_refused(tmp_path, model):
    row = files.verifiers_row(prompts=((1, 99_999), (1, 99_999, 3, 4, 5, 6)))
    path = files.write_lines(tmp_path / "x.jsonl", [row])
    job = Job(str(path), "verifiers", str(tmp_path / "out.csv"), "p")
    with pytest.raises(ValueError, match="not one of 1 episodes"):
        pipeline.score(job, unasked, lambda: model.tokenizer)


def test_hugging_face_folders_need_no_chat_template(tmp_path, model):
    """A base model, as references are; its text is a plain transcript."""
    config = tiny.config(vocab_size=model.config.vocab_size)
    params = tiny.params(config)
    folder = tmp_path / "base"
    huggingface.save(folder, config, params, dtype=np.float32)
    model.tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer = sources.load_tokenizer(str(folder))
    path = files.write_lines(tmp_path / "x.jsonl", [files.chat("a <end>", "b")])
    job = Job(str(path), "messages", str(tmp_path / "out.jsonl"), str(folder), levels=("token",), top_k=0)
    pipeline.score(job, lambda name: sources.load_source(name, tokenizer, top_k=0, max_tokens=256), lambda: tokenizer)
    (transcript,) = pipeline.readers.read(path, "messages", [])
    tokens = rendering.render(transcript, tokenizer)
    assert not set(tokens.ids) & {tokenizer.token_to_id(name) for name in ("<end>", "<user>")}
    found = [row["logprob"] for row in tables.read_table(job.output)]
    np.testing.assert_allclose(found, alone(config, params, tokens, 1)[0], rtol=1e-3, atol=1e-4)
