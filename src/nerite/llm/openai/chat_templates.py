"""Chat templates in Hugging Face's format: from messages to the prompt that a model was trained on.

They come with models, so they run in a sandbox, in which nothing that they are given can be changed. They are programs,
and what a client sends says how long they run: a loop over the messages in a loop over the messages takes its time. So
a short chat is rendered where it arrives, for so long as takes no longer than to have another process do it; what takes
longer is given up there, and rendered in a helper process, which has a time limit.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

from nerite.config.mistake import nearest
from nerite.core.errors import NeriteError, Unsupported
from nerite.llm.openai import tool_families
from nerite.llm.openai.fields import ApiError
from nerite.llm.openai.requests import ChatRequest, first_image, not_taken
from nerite.llm.openai.sampling import Sampling, SamplingSetting
from nerite.llm.openai.tool_calls import ToolParser
from nerite.llm.openai.tool_families import GuidedCall, GuidedCalls, ToolCallFamily

if TYPE_CHECKING:
    from jinja2 import Environment

    from nerite.models.running_version import RunningVersion
    from nerite.server import InferenceServer

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


# Where a model's chat template is: in its parameter, in its version directory, or among those that we bring.

PARAMETER: Final = "CHAT_TEMPLATE"
_OURS: Final = Path(__file__).with_name("templates")
NAMES: Final = tuple(sorted(path.stem for path in _OURS.glob("*.jinja")))
"""The templates that we bring."""
PLAIN: Final = "plain"
_FILE: Final = "chat_template.jinja"
_TOKENIZER: Final = "tokenizer_config.json"
_ENGINE: Final = "model.json"
_FOR_TOOLS: Final = "tool_use"
"""The name of a template for chats with tools, where a tokenizer has several."""


class FoundTemplate(NamedTuple):
    """A template, unread by anybody."""

    source: str
    with_tools: str
    """For chats with tools."""
    origin: str
    words: dict[str, str]
    """Such as ``bos_token``."""
    model_s_own: bool
    """False where nothing was found, and it is the plain one."""
    plain: bool = False
    """It knows of no special tokens."""


def find_template(version: Path | None, parameter: str) -> FoundTemplate:
    """Return the template of a model. Raises ``ApiError`` for files that are not what they should be.

    ``version`` is the directory of its version, ``parameter`` a file's name in it, or one of ``NAMES``.
    """
    folder = _checkpoint(version)
    tokenizer = _tokenizer(folder)
    words = _words(tokenizer)
    if parameter:
        path = version / parameter if version is not None else None
        if path is not None and _inside(version, path) and path.is_file():
            source = _text(path)
            return FoundTemplate(source, source, str(path), words, True)
        if parameter not in NAMES:
            meant = nearest(parameter, NAMES)
            hint = f" Did you mean '{meant}'?" if meant else ""
            raise _wrong(
                f"the parameter {PARAMETER} of its configuration is '{parameter}', which is neither a file in "
                f"{version} nor one of {', '.join(NAMES)}.{hint}"
            )
        source = _text(_OURS / f"{parameter}.jinja")
        return FoundTemplate(source, source, f"built-in '{parameter}'", words, True, parameter == PLAIN)
    if folder is not None and (folder / _FILE).is_file():
        source = _text(folder / _FILE)
        return FoundTemplate(source, source, str(folder / _FILE), words, True)
    given = tokenizer.get("chat_template")
    if given:
        named = _named(given)
        source = named.get("default") or next(iter(named.values()))
        return FoundTemplate(source, named.get(_FOR_TOOLS, source), f"{folder}/{_TOKENIZER}", words, True)
    source = _text(_OURS / f"{PLAIN}.jinja")
    return FoundTemplate(source, source, f"built-in '{PLAIN}'", words, False, True)


def _inside(folder: Path | None, path: Path) -> bool:
    return folder is not None and path.resolve().is_relative_to(folder.resolve())


def _checkpoint(version: Path | None) -> Path | None:
    """Return where a model's own files are: in the version directory, or where vLLM's ``model.json`` has them."""
    if version is None or not (version / _ENGINE).is_file():
        return version
    engine = _object(version / _ENGINE)
    for key in ("tokenizer", "model"):
        place = engine.get(key)
        if isinstance(place, str) and Path(place).is_dir():
            return Path(place)
    return version


def _tokenizer(folder: Path | None) -> dict[str, Any]:
    if folder is None or not (folder / _TOKENIZER).is_file():
        return {}
    return _object(folder / _TOKENIZER)


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise _wrong(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _wrong(f"{path} is not an object")
    return found


def _words(tokenizer: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens: each is a string, or an object with one."""
    words = {}
    for name, value in tokenizer.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            words[name] = text
    return words


def _named(given: Any) -> dict[str, str]:
    """Return the templates of a tokenizer by name: it has one, or a list of them."""
    if isinstance(given, str):
        return {"default": given}
    try:
        return {str(each["name"]): str(each["template"]) for each in given}
    except (TypeError, KeyError):
        raise _wrong(f"'chat_template' in {_TOKENIZER} is neither a string nor a list of names and templates") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(f"{path} cannot be read: {error}") from None


def _wrong(what: str) -> ApiError:
    return ApiError(f"The model has no usable chat template: {what}", None, "bad_chat_template", 500)


# What a model needs for chats besides its tensors: a template for the prompt, and a reader of its tool calls.

_log = logging.getLogger("nerite.http")
PARSER: Final = "TOOL_CALL_PARSER"


class ChatModel:
    """One model's template and parser."""

    def __init__(self, name: str, version: Path | None, template: str, family: str) -> None:
        """``template`` and ``family`` are parameters of its configuration. Raises ``ApiError`` for wrong ones."""
        found = find_template(version, template)
        if not found.model_s_own:
            _log.warning(
                "model '%s' has no chat template: its prompts are the plain one's. Put chat_template.jinja or "
                "tokenizer_config.json into %s, or name one with the parameter %s",
                name,
                version,
                PARAMETER,
            )
        self._name = name
        self._template = ChatTemplate(found.source, found.origin, found.words)
        self._with_tools = (
            self._template
            if found.with_tools == found.source
            else ChatTemplate(found.with_tools, found.origin, found.words)
        )
        self._family = self._find(family) if family else None
        self.adds_special = found.plain
        """Whether the tokenizer is to add special tokens to a prompt. Any but the plain template has written them."""

    def _find(self, family: str) -> ToolCallFamily:
        found = tool_families.ALL.get(family)
        if found is None:
            meant = nearest(family, tool_families.ALL)
            hint = f" Did you mean '{meant}'?" if meant else ""
            raise ApiError(
                f"The parameter {PARSER} of model '{self._name}' is '{family}'; it may be "
                f"{', '.join(tool_families.ALL)}.{hint}",
                None,
                "bad_tool_call_parser",
                500,
            )
        return found

    def template(self, asked: ChatRequest) -> ChatTemplate:
        """Return what makes the prompt of a chat. Raises ``ApiError`` for one that the model cannot be asked."""
        if asked.choice == "auto" and self._family is None:
            raise ApiError(
                f'"auto" tool choice requires a tool call parser: set the parameter {PARSER} in the configuration of '
                f"model '{self._name}' to one of {', '.join(tool_families.ALL)}",
                "tools",
                "unsupported_parameter",
            )
        return self._template if asked.choice == "none" else self._with_tools

    def prepare(self, asked: ChatRequest, sampling: Sampling) -> None:
        """Add to what an engine is told.

        A chat that names no limit has none but the context; engines have one for what says nothing. And where what the
        parser looks for is a special token, they leave it out unless they are asked not to.
        """
        sampling.setdefault("max_tokens", SamplingSetting(None, "max_tokens"))
        if asked.choice == "auto" and self._family is not None and self._family.special:
            sampling.setdefault("skip_special_tokens", SamplingSetting(False, "tools"))

    def parser(self, asked: ChatRequest) -> ToolParser | None:
        """Return what reads the text of one choice, None where it is nothing but text."""
        if asked.choice == "named":
            return GuidedCall(asked.tool, self._new_id)
        if asked.choice == "required":
            return GuidedCalls(self._new_id)
        return self._family.parser() if self._family is not None and asked.choice != "none" else None

    def _new_id(self) -> str:
        return (self._family or tool_families.DEFAULT).new_id()


class ChatModels:
    """Looks up a model's template and parser when its first chat comes, once for each that is loaded."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._known: WeakKeyDictionary[RunningVersion, ChatModel] = WeakKeyDictionary()

    def of(self, running: RunningVersion) -> ChatModel:
        """Return what is known of a model. Raises ``NeriteError`` for files and parameters that are wrong."""
        known = self._known.get(running)
        if known is None:
            parameters = running.config_json.get("parameters", {})

            def parameter(key: str) -> str:
                return str(parameters.get(key, {}).get("string_value", ""))

            version = self._server.version_directory(running)
            known = ChatModel(running.name, version, parameter(PARAMETER), parameter(PARSER))
            self._known[running] = known
        return known
