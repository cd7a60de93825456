"""The chat template of a language model: jinja, as Hugging Face's folders and GGUF files carry it."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Message = Mapping[str, Any]  # role, content, and what else a template reads


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template with what every rendering of it is given.

    Attributes:
      source: the jinja text; it runs in a sandbox.
      variables: names that it reads, such as `bos_token`, `eos_token` or `enable_thinking`.
      tools: JSON schemas of the functions on offer, for templates that know tools.
    """

    source: str
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation, with the header of the next answer if asked for.

        Raises:
          ValueError: the template is no jinja, or refuses these messages.
        """
        given = {**self.variables, "messages": messages, "tools": list(self.tools) or None}
        try:
            return _compile(self.source).render(given, add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template cannot render a conversation of {roles}: {error}") from error


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(source)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja's own filter escapes for HTML


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class _Generation(jinja2.ext.Extension):
    """Lets `{% generation %} … {% endgeneration %}`, which mark what a policy says, through as they are."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
