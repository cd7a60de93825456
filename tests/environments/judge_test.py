"""A judge behind a server on loopback that answers, refuses, hangs, drips, or says too much."""

import contextlib
import http.server
import json
import threading
import time

import pytest

from mpo_jax.environments import judge as judge_module
from mpo_jax.environments.judge import Judge, JudgeError


def say(text):
    """A reply of the chat protocol."""
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode()


@contextlib.contextmanager
def server(*replies):
    """Serves (status, body) in turn, the last for ever; a number is a silence of that length. Keeps the requests."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, self.headers.get("Authorization"), body))
            reply = replies[min(len(requests), len(replies)) - 1]
            if isinstance(reply, float):
                time.sleep(reply)
                return
            with contextlib.suppress(OSError):  # the judge may have had enough
                self.send_response(reply[0])
                self.end_headers()
                self.wfile.write(reply[1])

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", requests
    finally:
        httpd.shutdown()
        httpd.server_close()


def test_the_verdict_is_the_last_line_of_the_reply():
    with server(say("I first thought\ncorrect: no\nbut it is.\n\n**Correct:** Yes")) as (url, requests):
        assert Judge(url, "m", key="secret")("capital of France?", "Paris.", "Paris") is True
    ((path, authorization, body),) = requests
    assert (path, authorization) == ("/v1/chat/completions", "Bearer secret")
    assert body["model"] == "m" and body["temperature"] == 0
    (message,) = body["messages"]
    assert message["role"] == "user" and all(x in message["content"] for x in ("capital of France?", "Paris."))


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("Correct: No.", False),
        ("`correct` : 'yes'", True),
        ("correct：yes", True),  # a full-width colon
        ("**Correct:**\n\nYes", True),
        ("- **correct:** yes, since both name Paris", True),
        ("**correct: no** (the years differ)", False),
        ("correct: no — and a line of its own", False),
    ],
)
def test_a_verdict_may_be_decorated_and_explained(line, verdict):
    with server(say(f"They are compared.\n{line}\n")) as (url, _):
        assert Judge(url, "m", attempts=1)("q", "r", "a") is verdict


@pytest.mark.parametrize(
    "reply", ["Yes, it is.", "correct: yes or no", "correct: yes/no", "correct: yesterday", "incorrect: no"]
)
def test_what_is_no_verdict_is_none(reply):
    with server(say(reply)) as (url, _), pytest.raises(JudgeError, match="a reply without a verdict"):
        Judge(url, "m", attempts=1)("q", "r", "a")


def test_a_reply_of_line_breaks_is_read_at_once():
    """Each line break began a search through all that followed: 20,000 of them took seconds, a megabyte hours."""
    with server(say("\n" * 200_000 + "correct: yes")) as (url, _):
        assert Judge(url, "m", attempts=1)("q", "r", "a") is True


def test_a_verdict_is_asked_for_once():
    with server(say("correct: no"), say("correct: yes")) as (url, requests):
        judge = Judge(url, "m")
        assert [judge("q", "r", "a"), judge("q", "r", "a"), judge("q", "other", "a")] == [False, False, True]
    assert len(requests) == 2 and requests[0][1] is None


@pytest.mark.parametrize("first", [(503, b"busy"), (429, b"slow down"), say("well"), (200, b"no json"), (200, b"{}")])
def test_a_failure_that_may_pass_is_tried_again(first):
    with server(first, say("correct: yes")) as (url, requests):
        assert Judge(url, "m", pause=0.0)("q", "r", "a") is True
    assert len(requests) == 2


def test_a_refusal_is_final_and_names_the_server():
    with (
        server((401, b"bad key")) as (url, requests),
        pytest.raises(JudgeError, match=rf"{url}/chat/completions: no verdict: HTTP 401: bad key"),
    ):
        Judge(url, "m", pause=0.0)("q", "r", "a")
    assert len(requests) == 1


def test_without_any_verdict_it_raises_and_asks_anew_the_next_time():
    with server(say("hm"), say("hm"), say("correct: yes")) as (url, _):
        judge = Judge(url, "m", attempts=2, pause=0.0)
        with pytest.raises(JudgeError, match="a reply without a verdict: 'hm'"):
            judge("q", "r", "a")
        assert judge("q", "r", "a") is True


def test_a_server_that_hangs_costs_its_timeout():
    with server(1.0) as (url, _):
        start = time.monotonic()
        with pytest.raises(JudgeError, match="no verdict"):
            Judge(url, "m", timeout=0.1, attempts=2, pause=0.0)("q", "r", "a")
        assert time.monotonic() - start < 0.8


def test_megabytes_are_refused(monkeypatch):
    monkeypatch.setattr(judge_module, "MAXIMAL_REPLY", 1000)
    with server((200, b"x" * 5000)) as (url, _), pytest.raises(JudgeError, match="more than 1000 bytes"):
        Judge(url, "m", attempts=1)("q", "r", "a")


def test_nobody_listens():
    with pytest.raises(JudgeError, match="refused"):
        Judge("http://127.0.0.1:9", "m", attempts=1)("q", "r", "a")


def test_other_urls_are_refused():
    with pytest.raises(ValueError, match=r"'file:///etc/passwd', expected http"):
        Judge("file:///etc/passwd", "m")
