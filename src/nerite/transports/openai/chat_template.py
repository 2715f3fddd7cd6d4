"""Chat templates in Hugging Face's format: from messages to the prompt that a model was trained on.

They come with models, so they run in a sandbox, in which nothing that they are given can be changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from nerite.core.errors import NeriteError, Unsupported
from nerite.transports.openai.errors import ApiError

if TYPE_CHECKING:
    from jinja2 import Environment

Clock = Callable[[], datetime]


class ChatTemplate:
    """A template, and the words that it has for the beginning and the end."""

    def __init__(self, source: str, origin: str, words: Mapping[str, str], clock: Clock = datetime.now) -> None:
        """``origin`` is where it is from, for errors; ``words`` are such as ``bos_token``.

        Raises ``Unsupported`` where jinja2 is missing, and ``ApiError`` for what is no template.
        """
        import_jinja()
        from jinja2 import TemplateError

        self.origin = origin
        self._words = {"bos_token": "", "eos_token": "", **words}
        self._clock = clock
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ApiError(f"The chat template ({origin}) is wrong: {error}", None, "bad_chat_template", 500) from None

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any], variables: Mapping[str, Any] | None = None
    ) -> str:
        """Return the prompt. Raises ``ApiError`` with what the template says of messages that it does not take."""
        given = {
            **self._words,
            "add_generation_prompt": True,
            "strftime_now": lambda form: self._clock().strftime(form),
            "documents": None,
            **(variables or {}),
            "messages": messages,
            "tools": tools or None,
        }
        try:
            return self._template.render(given)
        except NeriteError:
            raise
        except Exception as error:  # it is a program, and may fail in any way
            raise _refused(f"the chat template ({self.origin}) failed: {error}") from None


def import_jinja() -> None:
    """Raise ``Unsupported`` where jinja2 is missing."""
    try:
        import jinja2  # noqa: F401  # heavy, and only chats need it
    except ImportError as error:
        raise Unsupported(
            f"unable to import jinja2 ({error}), which chats need: pip install 'nerite[openai]'"
        ) from None


def _refused(message: str) -> ApiError:
    return ApiError(message, "messages", "invalid_value")


def _raise(message: str) -> NoReturn:
    raise _refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Return JSON as models were trained on it: Jinja's own filter is for pages, and hides ``<`` and ``'``."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


@cache
def _environment() -> Environment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what a model is trained to write. Here it is what it encloses."""

        tags = {"generation"}  # noqa: RUF012  # as Jinja wants it

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment
