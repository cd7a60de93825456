"""A server that echoes log-probs, as vLLM's completions do."""

import http.server
import json
import threading

import numpy as np
import pytest

from mpo_jax.scoring.sources import Server
from mpo_jax.scoring.transcripts import Tokens


@pytest.fixture
def address():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            echoed = [None, *(-float(i) for i in body["prompt"][1:])] if body["echo"] else []
            tops = [None, *({"a": -1.0, "b": -float(i)} for i in body["prompt"][1:])]
            logprobs = {"token_logprobs": [*echoed, -9.0], "top_logprobs": [*tops, {}]}  # the last one is sampled
            answer = {"choices": [{"logprobs": None if body.get("model") == "mute" else logprobs}]}
            status = 404 if body.get("model") == "absent" else 200
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


TOKENS = Tokens(ids=[7, 2, 3, 4], messages=[0, 0, 1, 1], mask=[False, False, True, True])


def test_prompt_log_probs_of_the_actions(address):
    (found,) = Server(address, top_k=2)([TOKENS])
    np.testing.assert_allclose(found.logprobs, [-3, -4])
    np.testing.assert_allclose(found.top, [-2, -2.5])  # means of -1 and -3, -1 and -4
    assert np.isnan(found.entropy).all()


@pytest.mark.parametrize(("model", "named"), [("absent", "404"), ("mute", "token_logprobs")])
def test_refusals_are_named(address, model, named):
    with pytest.raises(ValueError, match=named):
        Server(f"{address}#{model}")([TOKENS])


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="127"):
        Server("http://127.0.0.1:9")([TOKENS])
