"""Chat templates in Hugging Face's format: from messages to the prompt that a model was trained on.

They come with models, so they run in a sandbox, in which nothing that they are given can be changed. They are programs,
and what a client sends says how long they run: a loop over the messages in a loop over the messages takes its time. So
a short chat is rendered where it arrives, for so long as takes no longer than to have another process do it; what takes
longer is given up there, and rendered in a helper process, which has a time limit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NoReturn

from nerite.core.errors import NeriteError, Unsupported
from nerite.transports.openai.errors import ApiError
from nerite.transports.openai.messages import first_image, not_taken

if TYPE_CHECKING:
    from jinja2 import Environment

Clock = Callable[[], datetime]
BRIEF: Final = 0.002
"""Seconds that ``render_briefly`` may take, and whatever one turn of a loop takes.

A chat of four messages is rendered in 0.03 ms, one of a hundred in 0.6 ms. A helper process answers 0.3 ms later than
that, and handing it the messages is 0.2 ms of the event loop's time. So a short chat is rendered sooner at once, and
for the others on the loop it hardly matters. What takes longer than this is rare, or means to.
"""


class ChatTemplate:
    """A template, and the words that it has for the beginning and the end."""

    def __init__(self, source: str, origin: str, words: Mapping[str, str], clock: Clock = datetime.now) -> None:
        """``origin`` is where it is from, for errors; ``words`` are such as ``bos_token``.

        Raises ``Unsupported`` where jinja2 is missing, and ``ApiError`` for what is no template.
        """
        import_jinja()
        from jinja2 import TemplateError

        self.source = source
        self.origin = origin
        self.words = words
        self._clock = clock
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ApiError(f"The chat template ({origin}) is wrong: {error}", None, "bad_chat_template", 500) from None

    def render(self, given: Mapping[str, Any]) -> str:
        """Return the prompt of what is ``given``: ``messages``, ``tools``, and any other variables.

        Raises ``ApiError`` with what the template says of messages that it does not take, and for images where it
        stumbles over them: those of models that see text alone expect each content to be text.
        """
        variables = {
            "bos_token": "",
            "eos_token": "",
            **self.words,
            "add_generation_prompt": True,
            "strftime_now": lambda form: self._clock().strftime(form),
            "documents": None,
            **given,
        }
        try:
            return self._template.render(variables)
        except NeriteError:
            raise
        except Exception as error:  # it is a program, and may fail in any way
            if image := first_image(given.get("messages", ())):
                raise not_taken(image) from None
            raise _refused(f"the chat template ({self.origin}) failed: {error}") from None

    def render_briefly(self, given: Mapping[str, Any], seconds: float = BRIEF) -> str | None:
        """Return the same; None if it takes longer. What is given is small.

        It is None also for variables that are more than a switch or a word: by a number a template may do much.
        """
        if not all(isinstance(value, bool | str) for name, value in given.items() if name not in _OF_A_CHAT):
            return None
        _deadline.at = time.perf_counter() + seconds
        try:
            return self.render(given)
        except _TakesLonger:
            return None
        finally:
            _deadline.at = math.inf


_OF_A_CHAT: Final = frozenset({"messages", "tools"})


class _Deadline:
    """When the template that runs has to be done."""

    at = math.inf


_deadline: Final = _Deadline()


class _TakesLonger(BaseException):
    """A template runs longer than it may. Not an ``Exception``, which Jinja and templates' filters may catch."""


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

    class Timed(ImmutableSandboxedEnvironment):
        """Has each turn of a loop, and each call of a macro, look at the time."""

        @property
        def turn(self) -> None:
            """Raise ``_TakesLonger`` if it is too late. A property: a call would be looked at by the sandbox."""
            if time.perf_counter() > _deadline.at:
                raise _TakesLonger

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            kinds = (nodes.For, nodes.Macro, nodes.CallBlock)
            repeated: list[Any] = [each for kind in kinds for each in tree.find_all(kind)]
            for each in repeated:
                look = nodes.ExprStmt(nodes.EnvironmentAttribute("turn"), lineno=each.lineno)
                each.body.insert(0, look.set_environment(self))
            return tree

    environment = Timed(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment
