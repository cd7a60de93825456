"""Our sampler behind the OpenAI protocol: completions, chat, models; log-probabilities, token ids, streaming.

Completions take token ids and give them, so that nothing is ever tokenised twice. Chat is for people and for
environments that speak text only: what an assistant said is made into ids again there. A stream carries a turn once
it is whole, since the engine gives turns.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
import tokenizers
from tornado import web

from mpo_jax.models.tokenizer import pieces
from mpo_jax.rollout.batcher import Batcher
from mpo_jax.rollout.openai_requests import ChatRequest, CompletionRequest, LoadRequest, Message, Sampling
from mpo_jax.rollout.protocol import Generation, Tokenizer

MAX_BODY_BYTES = 2**24
log = logging.getLogger(__name__)


class Service:
    """What the handlers share.

    Attributes:
      batcher: to the engine.
      tokenizer: of prompts that come as text.
      vocabulary: its ids, for the text of single ones.
      name: of the model.
      key: that clients must send; None asks for none.
      load: called with the path of weights that a client asks for; raises ValueError where it will not.

    Raises:
      ValueError: an empty key, which every client would have.
    """

    def __init__(
        self,
        batcher: Batcher,
        tokenizer: Tokenizer,
        vocabulary: tokenizers.Tokenizer,
        *,
        name: str,
        key: str | None = None,
        load: Callable[[str], None] | None = None,
    ):
        if key == "":
            raise ValueError("the key is empty, which every client would have")
        self.batcher, self.tokenizer, self.vocabulary = batcher, tokenizer, vocabulary
        self.name, self.key, self.load = name, key, load

    def ids_of_chat(self, messages: list[Message]) -> list[int]:
        """A conversation in the model's frame, up to where the assistant speaks.

        Raises:
          ValueError: it is not user, assistant, …, user.
        """
        roles = [message.role for message in messages]
        if not roles or roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            raise ValueError(f"messages: roles {roles}, expected user, assistant, …, user")
        ids = self.tokenizer.render_prompt(messages[0].content)
        for answer, question in zip(messages[1::2], messages[2::2], strict=True):
            ids += [*self.tokenizer.encode(answer.content), self.tokenizer.end_of_turn]
            ids += self.tokenizer.render_observation(question.content)
        return ids

    async def sample(self, prompt: list[int], request: Sampling) -> tuple[Generation, int]:
        """A turn, and the oldest version of the weights that can have sampled it.

        Raises:
          ValueError: what the request asks for cannot be had.
        """
        if request.model not in ("", self.name):
            raise ValueError(f"model is {request.model!r}, expected {self.name!r}")
        engine, size = self.batcher.engine, self.vocabulary.get_vocab_size()
        if not 0 < len(prompt) < engine.context_length:
            raise ValueError(f"prompt: {len(prompt)} ids, expected 1 to {engine.context_length - 1}")
        if not all(0 <= i < size for i in (*prompt, *request.stop_token_ids)):
            raise ValueError(f"prompt or stop_token_ids: an id outside 0..{size - 1}")
        seed = secrets.randbits(31) if request.seed is None else request.seed & 0x7FFFFFFF
        decoding, version = request.decoding(), engine.version
        generation = await self.batcher.sample(prompt, seed, decoding)
        return generation, min(version, engine.version)


class _Handler(web.RequestHandler):
    def initialize(self, service: Service) -> None:
        self.service = service

    def prepare(self) -> None:
        if self.service.key is not None:
            given = self.request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("latin-1"), self.service.key.encode()):
                self.refuse(401, "a key is needed: Authorization: Bearer …")
        # A page of another site, open in a browser on this machine, can send requests here too.
        elif not is_loopback(self.request.host_name) or "Origin" in self.request.headers:
            self.refuse(403, f"host {self.request.host_name!r} and browsers are served with a key only")

    def body(self, kind: type) -> Any:
        """The request's body.

        Raises:
          ValueError: it is no JSON of that kind.
        """
        try:
            return msgspec.json.decode(self.request.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"body of {len(self.request.body)} bytes: {error}") from error

    def refuse(self, status: int, message: str) -> None:
        self.set_status(status)
        self.finish({"error": {"message": message, "type": "invalid_request_error", "code": status}})

    def send(self, answer: dict, stream: bool, chunks: list[dict]) -> None:
        """The whole answer, or its chunks as server-sent events."""
        if not stream:
            self.finish(answer)
            return
        self.set_header("Content-Type", "text/event-stream")
        for chunk in chunks:
            self.write(f"data: {json.dumps(chunk)}\n\n")
        self.finish("data: [DONE]\n\n")


class _Completions(_Handler):
    async def post(self) -> None:
        try:
            request = self.body(CompletionRequest)
            prompt = (
                request.prompt if isinstance(request.prompt, list) else self.service.tokenizer.encode(request.prompt)
            )
            generation, version = await self.service.sample(prompt, request)
        except ValueError as error:
            return self.refuse(400, str(error))
        texts = pieces(self.service.vocabulary, generation.tokens)
        choice = {
            "index": 0,
            "text": self.service.tokenizer.decode(_said(generation)),
            "finish_reason": generation.finish_reason,
            "token_ids": generation.tokens,
            "prompt_token_ids": prompt,
            "logprobs": None if request.logprobs is None else {"tokens": texts, "token_logprobs": generation.logprobs},
        }
        answer = _answer("text_completion", self.service.name, version, [choice], prompt, generation)
        self.send(answer, request.stream, [answer])


class _Chat(_Handler):
    async def post(self) -> None:
        try:
            request = self.body(ChatRequest)
            request.max_tokens = request.max_completion_tokens or request.max_tokens
            prompt = self.service.ids_of_chat(request.messages)
            generation, version = await self.service.sample(prompt, request)
        except ValueError as error:
            return self.refuse(400, str(error))
        texts = pieces(self.service.vocabulary, generation.tokens)
        rows = zip(generation.tokens, texts, generation.logprobs, strict=True)
        content = [{"id": i, "token": text, "logprob": logprob, "top_logprobs": []} for i, text, logprob in rows]
        message = {"role": "assistant", "content": self.service.tokenizer.decode(_said(generation))}
        shared = {
            "index": 0,
            "finish_reason": generation.finish_reason,
            "logprobs": {"content": content} if request.logprobs else None,
        }
        name = self.service.name
        answer = _answer("chat.completion", name, version, [shared | {"message": message}], prompt, generation)
        chunk = answer | {"object": "chat.completion.chunk", "choices": [shared | {"delta": message}]}
        self.send(answer, request.stream, [chunk])


class _Models(_Handler):
    def get(self) -> None:
        model = {"id": self.service.name, "object": "model", "created": 0, "owned_by": "mpo_jax"}
        self.finish({"object": "list", "data": [model]})


class _Weights(_Handler):
    async def post(self) -> None:
        try:
            if self.service.load is None:
                raise ValueError("the weights of this server stay as they are")
            path, load = self.body(LoadRequest).model_path, self.service.load
            await self.service.batcher.between_calls(lambda: load(path))
        except ValueError as error:
            return self.refuse(400, str(error))
        self.finish({"success": True, "message": f"version {self.service.batcher.engine.version}"})


def _said(generation: Generation) -> list[int]:
    return generation.tokens[:-1] if generation.finish_reason == "stop" else generation.tokens


def _answer(kind: str, name: str, version: int, choices: list, prompt: list[int], generation: Generation) -> dict:
    read, said = len(prompt), len(generation.tokens)
    return {
        "id": f"{kind}-{secrets.token_hex(8)}",
        "object": kind,
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": f"weights-{version}",
        "choices": choices,
        "usage": {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said},
    }


def make_app(service: Service) -> web.Application:
    """The application of a service."""
    routes = {
        "/v1/completions": _Completions,
        "/v1/chat/completions": _Chat,
        "/v1/models": _Models,
        "/update_weights_from_disk": _Weights,
    }
    return web.Application([(path, handler, {"service": service}) for path, handler in routes.items()])


def is_loopback(host: str) -> bool:
    """Whether a host name can only mean this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def serve(service: Service, host: str, port: int, ready: Callable[[], None] = lambda: None) -> None:
    """Serves until cancelled; calls `ready` once it listens.

    Raises:
      ValueError: others than this machine would be served without a key.
      OSError: the address or the port cannot be had.
    """
    if service.key is None and not is_loopback(host):
        raise ValueError(f"host {host!r} is not this machine alone: a key is needed")
    server = make_app(service).listen(port, address=host, max_body_size=MAX_BODY_BYTES)
    ready()
    try:
        await asyncio.Event().wait()
    finally:
        server.stop()
