"""The page's server: this machine only, one page, made anew."""

import asyncio

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from mpo_jax.viewer.server import make_app


def ask(*requests):
    """Answers (code, body) of a served page that says which group was asked for and how often."""
    asked = []

    def render(last):
        asked.append(last)
        return f"<p>{last}, {len(asked)}"

    async def use():
        socket, port = bind_unused_port()
        server = HTTPServer(make_app(render))
        server.add_socket(socket)
        client = AsyncHTTPClient()
        found = []
        for path, headers in requests:
            request = HTTPRequest(f"http://127.0.0.1:{port}{path}", headers=headers)
            answer = await client.fetch(request, raise_error=False)
            found.append((answer.code, answer.body.decode(), answer.headers))
        server.stop()
        return found

    return asyncio.run(use())


def test_the_page_is_made_anew_for_the_groups_asked_for():
    (code, first, headers), (_, second, _) = ask(("/", {}), ("/?last=7", {}))
    assert code == 200 and headers["Cache-Control"] == "no-store" and headers["Content-Type"].startswith("text/html")
    assert (first, second) == ("<p>None, 1", "<p>7, 2")


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/?last=-1", {}, 400),
        ("/?last=<script>", {}, 400),
        ("/etc/passwd", {}, 404),
        ("/", {"Host": "evil.example"}, 403),  # a name that resolves to this machine
        ("/", {"Host": "localhost:1"}, 200),
    ],
)
def test_other_requests_are_refused(path, headers, code):
    ((found, body, _),) = ask((path, headers))
    assert found == code and "<script>" not in body
