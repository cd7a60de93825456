"""Somebody else's agent loop as an environment: it asks a model over HTTP, and the model it asks is our policy.

Whoever drives a model through OpenAI's chat protocol (`verifiers` of either generation, and most agent frameworks) can
be turned inside out so: each of its requests is an observation, the policy's turn is the reply.
"""

import http.server
import json
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from mpo_jax.environments.text import AnyText, cut
from mpo_jax.environments.tools import describe_tools, read_turn

MAXIMAL_REQUEST = 1 << 24  # bytes
Outcome = tuple[str, float, dict[str, Any]]  # what is shown at the end, the reward, and the info


class HarnessFailed(RuntimeError):
    """The harness raised or fell silent; the message says which."""


class ChatHarness(gymnasium.Env):
    """Runs a harness in a thread, against a server on loopback that answers with the actions.

    Its requests are answered one at a time, in the order in which they come.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own convention

    def __init__(
        self, run: Callable[[str, int], Outcome], *, name: str = "harness", seconds: float = 60.0, turn_limit: int = 100
    ):
        """Starts the server.

        Args:
          run: (URL of the server with its version, number of the task) -> outcome; called once an episode.
          name: task n is called "name/n".
          seconds: that the harness may take between a reply and its next request or its end.
          turn_limit: turns after which an episode is truncated.
        """
        self._run, self._name, self._seconds, self._turn_limit = run, name, seconds, turn_limit
        self._episode, self._turns = 0, 0
        self._events: queue.Queue = queue.Queue()
        self._pending: queue.Queue | None = None
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.observation_space, self.action_space = AnyText(), AnyText()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode; `options={"task": n}` is task number n, else `seed` is.

        Returns:
          What the first request says, with its tools, and info: task_id, success.

        Raises:
          HarnessFailed: it ended or fell silent before it asked.
        """
        super().reset(seed=seed)
        self._abandon()
        self._episode, self._turns, self._events = self._episode + 1, 0, queue.Queue()
        self._task = (options or {}).get("task", seed) or 0
        arguments = (self._events, f"http://127.0.0.1:{self._server.server_port}/{self._episode}/v1", self._task)
        threading.Thread(target=self._play, args=arguments, daemon=True).start()
        event = self._next()
        if not isinstance(event, dict):
            raise HarnessFailed(f"the harness ended before it asked for anything: {event[0]}")
        tools = [tool["function"] for tool in event.get("tools") or [] if "function" in tool]
        told = f"{describe_tools(tools)}\n\n" if tools else ""
        return cut(told + _texts(event["messages"])), self._info({})

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answers the request that waits, and shows the next one or the end."""
        if self._pending is None:
            raise RuntimeError("no episode is under way: call reset first")
        self._turns += 1
        self._pending.put(action)
        self._pending = None
        event = self._next()
        if not isinstance(event, dict):
            text, reward, info = event
            return cut(text), float(reward), True, False, self._info(info)
        truncated = self._turns >= self._turn_limit
        said = event["messages"]
        last = max((i for i, message in enumerate(said) if message.get("role") == "assistant"), default=-1)
        return cut(_texts(said[last + 1 :])), 0.0, False, truncated, self._info({})

    def close(self) -> None:
        """Ends the server, and whatever waits for it."""
        self._abandon()
        self._server.shutdown()
        self._server.server_close()

    def ask(self, episode: int, body: dict[str, Any]) -> str | None:
        """Called for each request: waits for the action; None where the episode is over."""
        if episode != self._episode:
            return None
        answer: queue.Queue = queue.Queue()
        self._events.put((body, answer))
        return answer.get()

    def _play(self, events: queue.Queue, url: str, task: int) -> None:
        try:
            events.put((self._run(url, task), None))
        except Exception as error:
            events.put((error, None))

    def _next(self) -> dict[str, Any] | Outcome:
        try:
            event, self._pending = self._events.get(timeout=self._seconds)
        except queue.Empty:
            self._abandon()
            raise HarnessFailed(f"the harness was silent for {self._seconds} s") from None
        if isinstance(event, Exception):
            raise HarnessFailed(f"{type(event).__name__}: {event}") from event
        return event

    def _abandon(self) -> None:
        """Tells the harness of an unfinished episode that nobody answers any more."""
        self._episode += 1
        if self._pending is not None:
            self._pending.put(None)
            self._pending = None

    def _info(self, info: dict[str, Any]) -> dict[str, Any]:
        return {"task_id": f"{self._name}/{self._task}", "success": False} | info


def _handler(harness: ChatHarness) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            episode, _, path = self.path.strip("/").partition("/")
            if size > MAXIMAL_REQUEST or path != "v1/chat/completions" or not episode.isdigit():
                return self._send(404, {"error": {"message": f"expected /v1/chat/completions, not {path}"}})
            try:
                body = json.loads(self.rfile.read(size))
                _texts(body["messages"])
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                return self._send(400, {"error": {"message": f"no chat request: {error}"}})
            action = harness.ask(int(episode), body)
            if action is None:
                return self._send(410, {"error": {"message": "the episode is over"}})
            reply = _reply(action, body)
            return self._stream(reply) if body.get("stream") else self._send(200, reply)

        def _send(self, status: int, body: dict[str, Any]) -> None:
            self._write(status, "application/json", json.dumps(body).encode())

        def _stream(self, reply: dict[str, Any]) -> None:
            """The whole reply as one event, as the protocol streams it."""
            choice = reply["choices"][0]
            calls = [{"index": i} | call for i, call in enumerate(choice["message"].get("tool_calls", []))]
            delta = choice["message"] | ({"tool_calls": calls} if calls else {})
            chunk = reply | {"object": "chat.completion.chunk"}
            chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]
            self._write(200, "text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

        def _write(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def _reply(action: str, body: dict[str, Any]) -> dict[str, Any]:
    """A chat completion with the text and calls of an action; calls that cannot be read stay text. Counts no tokens."""
    try:
        said, calls = read_turn(action)
    except ValueError:
        said, calls = action, []
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{len(body['messages'])}_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for i, call in enumerate(calls)
        ]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {
        "id": "chatcmpl-policy", "object": "chat.completion", "created": 0, "model": str(body.get("model", "policy")),
        "choices": [choice], "usage": usage,
    }  # fmt: skip


def _texts(messages: Sequence[dict[str, Any]]) -> str:
    """The messages' texts, a blank line between two; parts that are no text are named."""
    texts = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "\n".join(part.get("text") or f"[{part.get('type')}]" for part in content)
        texts.append(content)
    return "\n\n".join(filter(None, texts))
