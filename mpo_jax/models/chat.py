"""A language model's tokenizer with its own chat template: rendered whole once, then only ever extended."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mpo_jax.models.chat_template import ChatTemplate, Message

# Stand for what is said and what is answered while a template is taken apart: private-use letters, in no vocabulary.
SAID, ANSWERED = "\ue0f1", "\ue0f2"


class TemplateTokenizer:
    """Text to ids and back, in the frame that the model's chat template gives it.

    The first prompt is what the template renders. After that nothing is rendered anew: a later observation is what the
    template puts after an end of turn, the text, and the header of the next answer. Templates rewrite the past
    (Qwen3's drops earlier thinking); a policy trained so would be trained on contexts that it never read.

    Text of the environment never becomes a special token, whatever it spells out.

    Attributes:
      end_of_turn: the id with which the template ends an answer.
      stop_ids: all ids that end a turn where they are sampled, `end_of_turn` the first.
      vocab_size: number of ids.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: ChatTemplate,
        *,
        preamble: Sequence[Message] = (),
        stop_ids: Iterable[int] = (),
    ):
        """Takes the template apart.

        Args:
          tokenizer: of the model.
          template: of the model.
          preamble: messages before the first text, such as the system's.
          stop_ids: other ids that end a turn.

        Raises:
          ValueError: the template drops or repeats what is said, has no special token at the end of an answer, or
            rewrites earlier turns otherwise than by dropping their thinking.
        """
        self.tokenizer, self.template, self.preamble = tokenizer, template, list(preamble)
        self.vocab_size: int = tokenizer.get_vocab_size()
        specials = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"\Z\A")
        self._answered = [_said("user", SAID), _said("assistant", ANSWERED)]
        end = self._special.match(self._after_answer(self._answered, add_generation_prompt=False))
        if end is None:
            raise ValueError("the chat template ends an answer with no special token of the tokenizer")
        self._end_text = end.group()
        self.end_of_turn: int = tokenizer.token_to_id(self._end_text)
        self.stop_ids = tuple(dict.fromkeys([self.end_of_turn, *stop_ids]))
        self._refuse_a_rewritten_past()

    @classmethod
    def load(cls, folder: Path | str) -> "TemplateTokenizer":
        """Reads `tokenizer.json`, the template and the ids that end a turn from a Hugging Face folder.

        Raises:
          ValueError: a file is missing or damaged, or there is no chat template; the message names it.
        """
        folder = Path(folder)
        try:
            tokenizer = tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text())
        except Exception as error:  # `tokenizers` raises no narrower one
            raise ValueError(f"{folder / 'tokenizer.json'}: no readable tokenizer: {error}") from error
        settings = _read_json(folder / "tokenizer_config.json")
        source, path = settings.get("chat_template"), folder / "chat_template.jinja"
        if path.exists():
            source = path.read_text()
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not source:
            raise ValueError(f"{folder}: no chat template in chat_template.jinja or tokenizer_config.json")
        variables = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in settings.items()
            if name in ("bos_token", "eos_token", "pad_token", "unk_token") and value is not None
        }
        ends = _read_json(folder / "generation_config.json").get("eos_token_id", [])
        try:
            return cls(tokenizer, ChatTemplate(source, variables), stop_ids=ends if isinstance(ends, list) else [ends])
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    @property
    def knows_tools(self) -> bool:
        """Whether the template tells of tools that it is given."""
        probe = dataclasses.replace(self.template, tools=[{"type": "function", "function": {"name": SAID}}])
        return SAID in probe.render([_said("user", "")], add_generation_prompt=True)

    def introduced(self, system: str = "", tools: Sequence[Mapping[str, Any]] = ()) -> "TemplateTokenizer":
        """The same, with a system message and tools before the first text."""
        return TemplateTokenizer(
            self.tokenizer,
            dataclasses.replace(self.template, tools=tools),
            preamble=[_said("system", system)] if system else [],
            stop_ids=self.stop_ids,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; a special token spelt out in it stays text."""
        return self._encode(text, specials=False)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def render_prompt(self, text: str, limit: int | None = None) -> list[int]:
        """Ids of all that comes before the first answer, its header included; of the text at most `limit`.

        Raises:
          ValueError: the template does not take the text as it is.
        """

        def render(said: str) -> str:
            return self.template.render([*self.preamble, _said("user", said)], add_generation_prompt=True)

        return self._in_frame(render, self._cut(text, limit))

    def render_observation(self, text: str, limit: int | None = None) -> list[int]:
        """Ids between two answers: what the template adds after an end of turn, the text, the next answer's header.

        Raises:
          ValueError: the template does not take the text as it is.
        """

        def render(said: str) -> str:
            return self._after_end([*self._answered, _said("user", said)], add_generation_prompt=True)

        return self._in_frame(render, self._cut(text, limit))

    def render_hint(self, text: str) -> list[int]:
        """A privileged hint, to be read before an observation; no rollout ever contains one."""

        def render(said: str) -> str:
            whole = self._after_end([*self._answered, _said("user", said)], add_generation_prompt=False)
            return whole[: whole.rindex(self._end_text) + len(self._end_text)]

        return self._in_frame(render, f"hint: {text}")

    def _after_answer(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """What the template renders after the answer of a conversation; a text after it may hold any letter."""
        whole = self.template.render([*self.preamble, *messages], add_generation_prompt=add_generation_prompt)
        if ANSWERED not in whole:
            raise ValueError("the chat template drops an earlier answer")
        return whole.partition(ANSWERED)[2]

    def _after_end(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return self._after_answer(messages, add_generation_prompt=add_generation_prompt).removeprefix(self._end_text)

    def _in_frame(self, render: Any, text: str) -> list[int]:
        """Ids of render(text), in which only the frame's own special tokens are special.

        The frame is render's of a letter that stands for the text. Between two special tokens the frame's words and
        the text are encoded as one, since a tokenizer merges over their border.
        """
        parts, whole = render(SAID).split(SAID), render(text)
        if len(parts) != 2:
            raise ValueError(f"the chat template renders what is said {len(parts) - 1} times, expected once")
        before, after = parts
        if len(whole) < len(before) + len(after) or not (whole.startswith(before) and whole.endswith(after)):
            raise ValueError(f"the chat template frames {text[:40]!r} otherwise than other texts")
        start = max((match.end() for match in self._special.finditer(before)), default=0)
        first = self._special.search(after)
        end = len(whole) - len(after) + (len(after) if first is None else first.start())
        return [
            *self._encode(whole[:start], specials=True),
            *self._encode(whole[start:end], specials=False),
            *self._encode(whole[end:], specials=True),
        ]

    def _encode(self, text: str, *, specials: bool) -> list[int]:
        self.tokenizer.encode_special_tokens = not specials
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _cut(self, text: str, limit: int | None) -> str:
        """The longest beginning of a text, of those that end where its first `limit` ids or fewer do, that fits."""
        self.tokenizer.encode_special_tokens = True
        while limit is not None and len(found := self.tokenizer.encode(text, add_special_tokens=False)) > limit:
            text = text[: min(found.offsets[limit][0], len(text) - 1)]
        return text

    def _refuse_a_rewritten_past(self) -> None:
        """Holds three turns of appending against the template's rendering of the whole."""
        turns, messages, appended = ("first", "second", "third"), [*self.preamble], ""
        for turn in turns:
            messages.append(_said("user", f"{turn} text"))
            if not appended:
                appended = self.template.render(messages, add_generation_prompt=True)
            else:
                appended += self._after_end([*self._answered, messages[-1]], add_generation_prompt=True)
            whole = self.template.render(messages, add_generation_prompt=True)
            if _without_empty_thinking(whole) != _without_empty_thinking(appended):
                raise ValueError(
                    f"the chat template is not append-only: up to the {turn} text it renders {whole!r}, "
                    f"where appending gives {appended!r}"
                )
            messages.append(_said("assistant", f"{turn} answer"))
            appended += f"{turn} answer{self._end_text}"


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _without_empty_thinking(text: str) -> str:
    return re.sub(r"<think>\s*</think>\s*", "", text)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path}: no readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found
