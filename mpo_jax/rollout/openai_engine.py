"""An OpenAI-compatible server as an engine: token ids in, token ids and log-probabilities out, or a refusal.

What such servers say of the ids that they sampled differs. Three ways are read: `token_ids` beside `token_logprobs`
(vLLM with `return_token_ids`), tokens written as `token_id:17` (vLLM, SGLang), and a list of `{id, logprob}`
(llama.cpp). A server that says it in none of them is refused: text is never made into ids again.
"""

import concurrent.futures
import dataclasses
import json
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import urllib3

from mpo_jax.rollout.protocol import Generation
from mpo_jax.store.episode import LOGPROB_TOLERANCE

log = logging.getLogger(__name__)


class EngineRefused(RuntimeError):
    """The server cannot be trained with, or does not answer; the message names it and what was expected."""


@dataclasses.dataclass(frozen=True)
class Server:
    """Where turns are sampled.

    Attributes:
      url: up to and including `/v1`.
      model: the server's name of it.
      vocab_size: an id from it on in an answer is refused.
      stop_ids: ids that end a turn, the template's end of turn the first.
      key: sent as a bearer token.
      weights_path: (parameters, version) to the file or folder that the server is to read them from, for servers that
        have `POST /update_weights_from_disk` (SGLang, `experiments.serve`); None where the weights stay as they are.
      timeout: seconds for one turn.
    """

    url: str
    model: str
    vocab_size: int
    stop_ids: tuple[int, ...]
    key: str | None = None
    weights_path: Callable[[Any, int], str] | None = None
    timeout: float = 600.0


class OpenAIEngine:
    """Samples turns on a server; each request holds its whole context, of which the server caches what it can.

    Everything that would cut off the policy's distribution is switched off in the request, so that the
    log-probabilities are those of the distribution that was sampled from.

    Attributes:
      num_slots: requests side by side.
      context_length, max_turn_tokens: as in `Sampler`.
      version: of the weights that the server was last told to load; before that -1, so that it is told, or 0 where
        they stay as they are.
      exact: always.
    """

    exact = True

    def __init__(self, server: Server, *, num_slots: int, context_length: int, max_turn_tokens: int):
        """Connects to nothing yet; the arguments are told above."""
        self.server, self.num_slots, self.version = server, num_slots, -1 if server.weights_path else 0
        self.context_length, self.max_turn_tokens = context_length, max_turn_tokens
        self._url, key = server.url.rstrip("/"), server.key
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        # A turn that was lost on the way can be asked for again: its seed and context make it the same turn.
        retries = urllib3.Retry(3, backoff_factor=0.5, status_forcelist=(502, 503, 504), allowed_methods=None)
        self._http = urllib3.PoolManager(maxsize=num_slots, headers=headers, timeout=server.timeout, retries=retries)
        self._threads = concurrent.futures.ThreadPoolExecutor(num_slots, thread_name_prefix="engine")
        self._contexts: dict[int, list[int]] = {}
        self._under_way: dict[int, concurrent.futures.Future] = {}

    def generate(self, new_tokens: dict[int, list[int]], seeds: dict[int, int]) -> dict[int, Generation]:
        """Appends ids to the context of each named slot, asks for a turn there, and returns those that have ended.

        Raises:
          ValueError: a turn under way, no id to append, or a context that would not hold them and one more token.
          EngineRefused: the server failed, refused, or answered what cannot be trained on.
        """
        for slot, ids in new_tokens.items():
            context = self._contexts.setdefault(slot, [])
            room = self.context_length - len(context)
            if slot in self._under_way or not 0 < len(ids) < room:
                raise ValueError(f"slot {slot}: {len(ids)} new tokens; expected 1 to {room - 1}, and no turn under way")
            context += ids
            self._under_way[slot] = self._threads.submit(self._turn, list(context), seeds[slot])
        concurrent.futures.wait(self._under_way.values(), return_when=concurrent.futures.FIRST_COMPLETED)
        ended = {slot: self._under_way.pop(slot) for slot, turn in list(self._under_way.items()) if turn.done()}
        generations = {slot: turn.result() for slot, turn in ended.items()}
        for slot, generation in generations.items():
            self._contexts[slot] += generation.tokens
        return generations

    def free(self, slot: int) -> None:
        """Forgets the slot's context; a turn that is under way there is not waited for."""
        self._contexts.pop(slot, None)
        if turn := self._under_way.pop(slot, None):
            turn.cancel()

    def load(self, params: Any, version: int) -> None:
        """Has the server read new weights from its disk.

        Raises:
          EngineRefused: it has no way to, or failed.
        """
        if self.server.weights_path is None:
            raise EngineRefused(f"{self._url}: no way to give it weights of version {version}: no weights_path is set")
        root = self._url.removesuffix("/v1")
        answer = self._post(
            f"{root}/update_weights_from_disk", {"model_path": self.server.weights_path(params, version)}
        )
        if not answer.get("success", False):
            raise EngineRefused(f"{root}: it did not take weights of version {version}: {answer}")
        self.version = version

    def _turn(self, context: list[int], seed: int) -> Generation:
        limit = min(self.max_turn_tokens, self.context_length - len(context))
        request = {
            "model": self.server.model,
            "prompt": context,
            "max_tokens": limit,
            "seed": seed & 0x7FFFFFFF,
            "logprobs": 1,
            "stop_token_ids": list(self.server.stop_ids),
            # The policy itself, whatever the server or the model's own settings would like better.
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0,
            # Ids as each kind of server gives them.
            "return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False,
        }  # fmt: skip
        answer = self._post(f"{self._url}/completions", request)
        return read_completion(answer, context, limit, self.server.vocab_size, self.server.stop_ids, server=self._url)

    def _post(self, url: str, body: dict) -> dict:
        try:
            answer = self._http.request("POST", url, body=json.dumps(body))
        except urllib3.exceptions.HTTPError as error:
            raise EngineRefused(f"{url}: no answer: {error}") from error
        if answer.status != 200:
            raise EngineRefused(f"{url}: status {answer.status}: {answer.data[:500].decode(errors='replace')}")
        try:
            found = json.loads(answer.data)
        except (ValueError, RecursionError) as error:
            raise EngineRefused(f"{url}: {len(answer.data)} bytes that are no JSON: {error}") from error
        if not isinstance(found, dict):
            raise EngineRefused(f"{url}: expected a JSON object, got {type(found).__name__}")
        return found


def read_completion(
    answer: dict, prompt: list[int], limit: int, vocab_size: int, stop_ids: tuple[int, ...], *, server: str
) -> Generation:
    """The turn in a server's answer.

    Args:
      answer: of `/v1/completions`.
      prompt: the ids that were sent.
      limit: most ids that were asked for.
      vocab_size: ids from it on are refused.
      stop_ids: ids that end a turn.
      server: named in errors.

    Returns:
      The sampled ids, a stop id included, and their log-probabilities.

    Raises:
      EngineRefused: ids or log-probabilities are missing, do not go together, or are out of range; the server read
        another prompt than was sent; or it stopped without the id that it stopped at.
    """
    try:
        (choice,) = answer["choices"]
        tokens, logprobs = _sampled(choice)
        reason, read = choice["finish_reason"], choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        counted = (answer.get("usage") or {}).get("prompt_tokens", len(prompt))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineRefused(
            f"{server}: no token ids with their log-probabilities in its answer ({type(error).__name__}: {error}); "
            "text is not made into ids again"
        ) from error
    if (read is not None and read != prompt) or counted != len(prompt):
        raise EngineRefused(
            f"{server}: it read another prompt than the {len(prompt)} ids that were sent (it: {counted})"
        )
    wrong = [i for i in tokens if type(i) is not int or not 0 <= i < vocab_size]
    if wrong or not 0 < len(tokens) <= limit:
        raise EngineRefused(f"{server}: {len(tokens)} ids, wrong {wrong[:3]}; expected 1 to {limit} below {vocab_size}")
    numbers = [x if isinstance(x, int | float) else math.nan for x in logprobs]
    if len(numbers) != len(tokens) or not all(math.isfinite(x) and x <= LOGPROB_TOLERANCE for x in numbers):
        raise EngineRefused(
            f"{server}: log-probabilities {logprobs[:3]}… do not go with {len(tokens)} ids: at most 0 each"
        )
    stopped = tokens[-1] in stop_ids
    if reason not in ("stop", "length") or (reason == "stop" and not stopped):
        raise EngineRefused(f"{server}: it ended by {reason!r} without the id that ended it, one of {stop_ids}")
    return Generation(tokens, [min(float(x), 0.0) for x in numbers], "stop" if stopped else "length")


def _sampled(choice: dict) -> tuple[list, list]:
    """The ids and log-probabilities of a choice, in whichever of the three ways it has them."""
    details = choice["logprobs"]
    if "content" in details:
        return [entry["id"] for entry in details["content"]], [entry["logprob"] for entry in details["content"]]
    if isinstance(choice.get("token_ids"), list):
        return choice["token_ids"], list(details["token_logprobs"])
    return [int(re.fullmatch(r"token_id:(\d+)", token)[1]) for token in details["tokens"]], list(
        details["token_logprobs"]
    )
