"""Where likelihoods come from: a model that is loaded here, or a server that has it."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from flax import nnx

from mpo_jax.models import huggingface, lora, pretrained
from mpo_jax.models.config import TransformerConfig
from mpo_jax.models.tokenizer import ChatTokenizer
from mpo_jax.scoring.likelihoods import Evaluator, Likelihoods
from mpo_jax.scoring.pipeline import Source
from mpo_jax.scoring.rendering import Tokenizer
from mpo_jax.scoring.transcripts import Tokens


def load_source(name: str, tokenizer: Tokenizer, *, top_k: int, max_tokens: int, base: str = "") -> Source:
    """What evaluates token ids.

    Args:
      name: a model that `pretrained.load` finds, a folder of adapters as PEFT saves them, or `http://host:port/v1` of
        an OpenAI-compatible server, with `#model` behind it where the server has several.
      tokenizer: whose ids are evaluated.
      top_k: k of the mean of the highest log-probs; 0 for none.
      max_tokens: of the longest episode.
      base: the model that adapters stand beside; empty for the one that their folder names.

    Raises:
      ValueError: there is no such model, or its tokenizer is another.
    """
    if name.startswith(("http://", "https://")):
        return Server(name, top_k=top_k)
    config, params = load_params(name, base)
    if _vocabulary(load_tokenizer(name, base)) != _vocabulary(tokenizer):
        raise ValueError(f"{name}: another tokenizer than that of the policy; their log-probs cannot be compared")
    return Evaluator(config, params, k=top_k, max_tokens=max_tokens)


def load_params(name: str, base: str = "") -> tuple[TransformerConfig, nnx.State]:
    """Shape and parameters of a model that is here, adapters merged into their base.

    Raises:
      ValueError: there is no such model.
    """
    path = pretrained.find(name)
    if lora.is_adapter(path):
        config, params = load_params(_base_of(path, base))
        settings, adapters = lora.load(path, config, params)
        return config, lora.merge(settings, params, adapters)
    if _is_hugging_face(path):
        return huggingface.load(path)  # a base model has no chat template, and needs none here
    model = pretrained.load(name)
    return model.config, model.params


def _base_of(adapter: Path, base: str) -> str:
    """The model that adapters stand beside: the given one, else the one that their folder names, if it is here."""
    named = base or lora.read_base_name(adapter)
    if not named or not pretrained.find(named).exists():
        raise ValueError(f"{adapter}: adapters of {named!r}, which is not here; give their base model as --base")
    if lora.is_adapter(pretrained.find(named)):
        raise ValueError(f"{adapter}: adapters of {named!r}, which are adapters themselves, expected a whole model")
    return named


def load_tokenizer(name: str, base: str = "") -> Tokenizer:
    """The tokenizer of a model: our own with its chat, a bare one of others; of adapters that of their base.

    Raises:
      ValueError: there is no such model, or its tokenizer cannot be read.
    """
    path = pretrained.find(name)
    if lora.is_adapter(path):
        return load_tokenizer(_base_of(path, base))
    if path.suffix == ".gguf":
        from mpo_jax.models import gguf, gguf_tokenizer  # their library is an extra

        try:
            bare = gguf_tokenizer.read(gguf.GgufFile(path).fields).tokenizer
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: no readable tokenizer: {error}") from error
    elif not _is_hugging_face(path):
        return ChatTokenizer.load(path / "tokenizer.json")
    else:
        try:
            bare = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # `tokenizers` raises no narrower one
            raise ValueError(f"{path / 'tokenizer.json'}: no readable tokenizer: {error}") from error
    bare.encode_special_tokens = True  # one that a text spells out stays text
    return bare


def _is_hugging_face(path: Path) -> bool:
    config = path / "config.json"
    try:
        return config.exists() and "model_type" in json.loads(config.read_text())
    except ValueError as error:
        raise ValueError(f"{config}: no JSON: {error}") from error


def _vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    return (tokenizer.tokenizer if isinstance(tokenizer, ChatTokenizer) else tokenizer).get_vocab()


class Server:
    """An OpenAI-compatible server that returns the log-probs of its prompt (vLLM, SGLang): `echo` with `logprobs`.

    It gives neither entropies nor certainties; `top` only as far as it returns alternatives.

    Args:
      address: `http://host:port/v1`, `#model` behind it where the server has several.
      top_k: how many alternatives to ask for.
      timeout: seconds that an answer may take.
    """

    def __init__(self, address: str, *, top_k: int = 0, timeout: float = 600.0):
        self.url, _, self.model = address.partition("#")
        self.top_k, self.timeout = top_k, timeout

    def __call__(self, episodes: Sequence[Tokens]) -> list[Likelihoods]:
        """Likelihoods of each episode's action tokens, a request an episode.

        Raises:
          ValueError: the server refuses, or its answer is not one log-prob a token.
        """
        return [self._evaluate(tokens) for tokens in episodes]

    def _evaluate(self, tokens: Tokens) -> Likelihoods:
        answer = self._post(
            {
                **({"model": self.model} if self.model else {}),
                "prompt": tokens.ids,
                "max_tokens": 1,  # some servers refuse 0; what is sampled is left out below
                "temperature": 0,
                "echo": True,
                "logprobs": max(self.top_k, 1),
            }
        )
        try:
            found = answer["choices"][0]["logprobs"]
            logprobs = [np.nan if x is None else x for x in found["token_logprobs"]]
            tops = [list(x.values()) if x else [np.nan] for x in found.get("top_logprobs") or [None] * len(logprobs)]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self.url}: an answer without choices[0].logprobs.token_logprobs: {error!r}") from error
        if len(logprobs) < len(tokens.ids):
            raise ValueError(
                f"{self.url}: {len(logprobs)} log-probs for {len(tokens.ids)} tokens: it does not echo them"
            )
        actions = np.flatnonzero(tokens.mask)
        unknown = np.full(len(actions), np.nan, np.float32)
        top = (
            np.array([np.mean(sorted(tops[i])[-self.top_k :]) for i in actions], np.float32) if self.top_k else unknown
        )
        return Likelihoods(np.array(logprobs, np.float32)[actions], unknown, top, unknown)

    def _post(self, body: dict) -> dict:
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return json.load(answer)
        except (urllib.error.URLError, TimeoutError, ValueError) as error:
            detail = error.read().decode(errors="replace")[:300] if isinstance(error, urllib.error.HTTPError) else ""
            raise ValueError(f"{self.url}: {error} {detail}".strip()) from error
