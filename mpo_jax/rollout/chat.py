"""A conversation in one slot of an engine: questions of a user, tools that the policy calls on its way to an answer."""

from collections.abc import Callable, Iterator
from typing import Literal

import gymnasium

from mpo_jax.models.chat import TemplateTokenizer
from mpo_jax.models.tool_calls import render_response
from mpo_jax.rollout.protocol import Engine

Speaker = Literal["assistant", "tool"]


class Chat:
    """A conversation that goes on over questions; its context is only appended to.

    Tools are an environment that reads tool calls: an action without one is the answer and ends its episode.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TemplateTokenizer,
        make_environment: Callable[[str], gymnasium.Env],
        *,
        observation_tokens: int = 512,
        seed: int = 0,
    ):
        """Takes the engine's first slot.

        Args:
          engine: samples.
          tokenizer: the engine's, with the system's message and the tools in its preamble.
          make_environment: question -> an environment whose one task is that question.
          observation_tokens: the longest question or tool's result; the rest is cut off.
          seed: of the sampling.
        """
        self._engine, self._tokenizer, self._make_environment = engine, tokenizer, make_environment
        self._limit, self._seed, self._begun = observation_tokens, seed, False
        self._missing: list[int] = []  # the end of a turn that the engine cut
        engine.free(0)

    def ask(self, question: str) -> Iterator[tuple[Speaker, str]]:
        """Says a question and yields what the policy and the tools say, up to the answer, which is the last.

        Raises:
          ValueError: the context is full.
        """
        environment = self._make_environment(question)
        environment.reset()
        render = self._tokenizer.render_observation if self._begun else self._tokenizer.render_prompt
        unread, self._begun = render(question, self._limit), True
        while True:
            said = self._sample(unread)
            yield "assistant", said
            observation, _, terminated, truncated, _ = environment.step(said)
            if terminated or truncated:
                return
            yield "tool", observation
            unread = self._tokenizer.render_observation(render_response(observation), self._limit)

    def _sample(self, unread: list[int]) -> str:
        turn = self._engine.generate({0: self._missing + unread}, {0: self._seed}).get(0)
        while turn is None:
            turn = self._engine.generate({}, {}).get(0)
        self._missing = [] if turn.finish_reason == "stop" else [self._tokenizer.end_of_turn]
        return self._tokenizer.decode(turn.tokens).strip()
