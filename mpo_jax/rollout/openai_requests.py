"""The bodies of requests by the OpenAI protocol, checked field by field."""

from typing import Literal

import msgspec

from mpo_jax.rollout.decoding import Decoding
from mpo_jax.rollout.engine import STOP_IDS


class Sampling(msgspec.Struct, kw_only=True):
    """What completions and chat share; fields that we do not know are passed over, as such servers do."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: list[int] = []
    stream: bool = False
    # What would change the distribution and is not here: refused where it is not neutral.
    n: Literal[1] = 1
    stop: str | list[str] | None = None
    min_p: float = 0
    presence_penalty: float = 0
    frequency_penalty: float = 0
    repetition_penalty: float = 1
    logit_bias: dict[str, float] | None = None
    echo: Literal[False] = False

    def decoding(self) -> Decoding:
        """How a turn is sampled.

        Raises:
          ValueError: a value out of its range, or one that this server has no way to honour.
        """
        neutral = {
            "stop": not self.stop,
            "min_p": self.min_p == 0,
            "presence_penalty": self.presence_penalty == 0,
            "frequency_penalty": self.frequency_penalty == 0,
            "repetition_penalty": self.repetition_penalty == 1,
            "logit_bias": not self.logit_bias,
        }
        for field in (field for field, is_neutral in neutral.items() if not is_neutral):
            raise ValueError(f"{field} is {getattr(self, field)}: this server samples without it")
        if len(self.stop_token_ids) >= STOP_IDS:
            raise ValueError(f"stop_token_ids: {len(self.stop_token_ids)} of them, expected at most {STOP_IDS - 1}")
        return Decoding(
            temperature=self.temperature,
            top_k=min(max(self.top_k, 0), 2**31 - 1),  # -1 is another way to say all
            top_p=self.top_p,
            stop_ids=tuple(self.stop_token_ids),
            max_tokens=self.max_tokens,
        )


class CompletionRequest(Sampling, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[int]
    logprobs: int | None = None


class Message(msgspec.Struct):
    """One of a chat."""

    role: Literal["user", "assistant"]
    content: str


class ChatRequest(Sampling, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False


class LoadRequest(msgspec.Struct):
    """The body of `/update_weights_from_disk`."""

    model_path: str
