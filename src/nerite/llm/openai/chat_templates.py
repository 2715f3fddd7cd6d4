"""Chat templates in Hugging Face's format, which turn messages into the prompt format that a model was trained on.

Templates come with models, so they run in a sandbox that cannot modify its inputs. They are programs whose run time
depends on what clients send, such as nested loops over the messages. So a short chat is rendered on the event loop with
a deadline of about the cost of handing it to another process; if that is exceeded, it is rendered in a helper process,
which has a time limit. Also here: where a model's template and tool call parser are found, and their cache per model.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

from nerite.config.mistake import nearest
from nerite.core.bounded_files import json_of, read_bounded
from nerite.core.errors import NeriteError, Unsupported
from nerite.llm.openai import reasoning_parsers, tool_parsers
from nerite.llm.openai.chat_requests import ChatRequest, first_image, not_taken
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.reasoning_parsers import HarmonyParser, ReasoningMarkers, ReasoningParser
from nerite.llm.openai.sampling import Sampling, SamplingSetting, is_guided
from nerite.llm.openai.tool_calls import ToolParser
from nerite.llm.openai.tool_parsers import FilteredEvents, GuidedCall, GuidedCalls, ToolCallFamily

if TYPE_CHECKING:
    from jinja2 import Environment

    from nerite.core.servable_version import ServableVersion
    from nerite.inference_entry import TransportEntry

Clock = Callable[[], datetime]
BRIEF: Final = 0.002
"""Seconds that ``render_briefly`` may take, plus the time of one loop iteration of the template.

A chat of four messages is rendered in 0.03 ms, one of a hundred in 0.6 ms. A helper process adds 0.3 ms, and handing it
the messages costs 0.2 ms of the event loop's time. So rendering a short chat on the loop is faster and hardly delays
others. Templates that take longer than this limit are rare or malicious.
"""


_LONGEST: Final = 64 * 1024
"""Characters of a template. The longest of common models have a quarter; compiling takes some microseconds each."""


class ChatTemplate:
    """A compiled template with the special tokens that it may use."""

    def __init__(self, source: str, origin: str, words: Mapping[str, str], clock: Clock = datetime.now) -> None:
        """``origin`` says where the template is from, for errors; ``words`` are special tokens such as ``bos_token``.

        Raises ``Unsupported`` if jinja2 is missing, and ``ApiError`` if the template is invalid.
        """
        import_jinja()
        from jinja2 import TemplateError

        self.source = source
        self.origin = origin
        self.words = words
        self._clock = clock
        if len(source) > _LONGEST:
            message = f"The chat template ({origin}) has {len(source)} characters; at most {_LONGEST} are compiled"
            raise ApiError(message, None, "bad_chat_template", 500)
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            message = f"The chat template ({origin}) is invalid: {error}"
            raise ApiError(message, None, "bad_chat_template", 500) from None

    def render(self, given: Mapping[str, Any]) -> str:
        """Return the prompt for the variables in ``given``: ``messages``, ``tools`` and any others.

        Raises ``ApiError`` with the template's own message if it rejects the messages, and for images if it fails on
        them: templates of text-only models expect each content to be text.
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
        except Exception as error:  # a template is a program, which may fail in any way
            if image := first_image(given.get("messages", ())):
                raise not_taken(image) from None
            raise _refused(f"the chat template ({self.origin}) failed: {error}") from None

    def render_briefly(self, given: Mapping[str, Any], seconds: float = BRIEF) -> str | None:
        """Return the same as ``render``, or None if it takes longer than ``seconds``. ``given`` must be small.

        Also returns None if a variable is neither a boolean nor a string: a number could make a template do much work.
        """
        if not all(isinstance(value, bool | str) for name, value in given.items() if name not in _CHAT_VARIABLES):
            return None
        _deadline.at = time.perf_counter() + seconds
        try:
            return self.render(given)
        except _TakesLonger:
            return None
        finally:
            _deadline.at = math.inf


_CHAT_VARIABLES: Final = frozenset({"messages", "tools"})


class _Deadline:
    """Time by which the running template must be finished."""

    at = math.inf


_deadline: Final = _Deadline()


class _TakesLonger(BaseException):
    """A template exceeds its deadline. Not an ``Exception``, which Jinja and templates' filters may catch."""


def import_jinja() -> None:
    """Raise ``Unsupported`` if jinja2 is missing."""
    try:
        import jinja2  # noqa: F401  # imported lazily: it is heavy and only chats need it
    except ImportError as error:
        raise Unsupported(
            f"unable to import jinja2 ({error}), which chats need: pip install 'nerite[openai]'"
        ) from None


def _refused(message: str) -> ApiError:
    return ApiError(message, "messages", "invalid_value")


def _raise(message: str) -> NoReturn:
    raise _refused(message)


_MOST: Final = 1_000_000
"""Characters, elements or bits that one operation of a template may make, and largest width of a text."""
_WIDTH: Final = re.compile(r"%[^%a-zA-Z]*(?:\d{5}|\*)")
"""A format that pads its value to ten thousand characters and more, or to a width that is an argument."""


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result may be too large: neither it nor its memory could be bounded by a deadline."""
    if operator == "%":
        large = isinstance(left, str) and _WIDTH.search(left) is not None
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        large = bits > _MOST
    else:
        number, repeated = (left, right) if isinstance(left, int) else (right, left)
        large = isinstance(number, int) and hasattr(repeated, "__len__") and len(repeated) * number > _MOST
    if large:
        raise _refused(f"the chat template makes a value of more than {_MOST} characters with '{operator}'")


def _check_arguments(given: Iterable[Any]) -> None:
    """Refuse arguments of a call or a filter that are widths or counts without end."""
    if any(isinstance(each, int) and each > _MOST for each in given):
        raise _refused(f"the chat template asks for more than {_MOST} characters or elements")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        _check_arguments((*arguments, *named.values()))
        return function(*arguments, **named)

    return bounded


_WIDENING: Final = ("batch", "center", "indent", "slice", "tojson", "wordwrap")
"""Filters that pad a text, or fill a list, to a number."""


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Return JSON as models were trained on it. Jinja's own filter is for HTML and escapes ``<`` and ``'``."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


@cache
def _environment() -> Environment:
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which marks text that models are trained to write. Renders its content unchanged."""

        tags = {"generation"}  # noqa: RUF012  # Jinja's interface

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Unfolded(CodeGenerator):
        """Computes nothing at compile time, when there is no deadline."""

        def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
            if not isinstance(node, nodes.TemplateData):
                raise nodes.Impossible
            return super()._output_child_to_const(node, frame, finalize)

    class Timed(ImmutableSandboxedEnvironment):
        """Environment that checks the deadline in each loop iteration and call of a macro, and the size of results."""

        code_generator_class = Unfolded
        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Compute an operation whose result is not too large."""
            _check_operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *arguments: Any, **named: Any) -> Any:
            """Call a function that is not asked for too much."""
            _check_arguments((*arguments, *named.values()))
            return super().call(__context, __obj, *arguments, **named)

        @property
        def turn(self) -> None:
            """Raise ``_TakesLonger`` after the deadline. A property, because the sandbox would intercept a call."""
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

    environment = Timed(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = _to_json
    environment.filters |= {name: _bounded(environment.filters[name]) for name in _WIDENING}
    del environment.globals["lipsum"], environment.filters["format"]
    environment.globals["raise_exception"] = _raise
    return environment


# Lookup of a model's chat template: named by its parameter, in its version directory, or built in

PARAMETER: Final = "CHAT_TEMPLATE"
_BUILT_IN: Final = Path(__file__).with_name("templates")
NAMES: Final = tuple(sorted(path.stem for path in _BUILT_IN.glob("*.jinja")))
"""The built-in templates."""
PLAIN: Final = "plain"
_FILE: Final = "chat_template.jinja"
_TOKENIZER: Final = "tokenizer_config.json"
_ENGINE: Final = "model.json"
_FOR_TOOLS: Final = "tool_use"
"""Name of the template for chats with tools, if a tokenizer has several templates."""


class FoundTemplate(NamedTuple):
    """The source of a template, not yet compiled."""

    source: str
    with_tools: str
    """Source for chats with tools."""
    origin: str
    words: dict[str, str]
    """Special tokens such as ``bos_token``."""
    model_s_own: bool
    """False if none was found and this is the built-in plain template."""
    plain: bool = False
    """Whether it is the plain template, which writes no special tokens."""


def find_template(version: Path | None, parameter: str) -> FoundTemplate:
    """Return the template of a model. Raises ``ApiError`` for invalid files.

    ``version`` is its version directory; ``parameter`` is the name of a file in it or one of ``NAMES``, or empty.
    """
    folder = checkpoint_directory(version)
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
            raise _no_template(
                f"the parameter {PARAMETER} of its configuration is '{parameter}', which is neither a file in "
                f"{version} nor one of {', '.join(NAMES)}.{hint}"
            )
        source = _text(_BUILT_IN / f"{parameter}.jinja")
        return FoundTemplate(source, source, f"built-in '{parameter}'", words, True, parameter == PLAIN)
    if folder is not None and (folder / _FILE).is_file():
        source = _text(folder / _FILE)
        return FoundTemplate(source, source, str(folder / _FILE), words, True)
    given = tokenizer.get("chat_template")
    if given:
        named = _named(given)
        source = named.get("default") or next(iter(named.values()))
        return FoundTemplate(source, named.get(_FOR_TOOLS, source), f"{folder}/{_TOKENIZER}", words, True)
    source = _text(_BUILT_IN / f"{PLAIN}.jinja")
    return FoundTemplate(source, source, f"built-in '{PLAIN}'", words, False, True)


def _inside(folder: Path | None, path: Path) -> bool:
    return folder is not None and path.resolve().is_relative_to(folder.resolve())


def checkpoint_directory(version: Path | None) -> Path | None:
    """Return the directory of a model's files: the version directory, or the one that vLLM's ``model.json`` names."""
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
        found = json_of(_text(path))
    except ValueError as error:
        raise _no_template(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _no_template(f"{path} is not an object")
    return found


def _words(tokenizer: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens, each of which is configured as a string or as an object with one."""
    words = {}
    for name, value in tokenizer.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            words[name] = text
    return words


def _named(given: Any) -> dict[str, str]:
    """Return the templates of a tokenizer by name. A tokenizer has one template or a list of them."""
    if isinstance(given, str):
        return {"default": given}
    try:
        return {str(each["name"]): str(each["template"]) for each in given}
    except (TypeError, KeyError):
        what = f"'chat_template' in {_TOKENIZER} is neither a string nor a list of names and templates"
        raise _no_template(what) from None


def _text(path: Path) -> str:
    try:
        return read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _no_template(f"{path} cannot be read: {error}") from None


def _no_template(what: str) -> ApiError:
    return ApiError(f"The model has no usable chat template: {what}", None, "bad_chat_template", 500)


# Chat settings of a model: template and tool call parser

_log = logging.getLogger("nerite.http")
PARSER: Final = "TOOL_CALL_PARSER"
THOUGHTS: Final = "REASONING_PARSER"
_FORCED: Final = ("named", "required")
_TAIL: Final = 64
"""Bytes at the end of a prompt that are searched for the beginning of a thought."""


class ChatModel:
    """Chat template, and parsers of tool calls and thoughts, of one model."""

    def __init__(self, name: str, version: Path | None, template: str, family: str = "", thinks: str = "") -> None:
        """``template``, ``family`` and ``thinks`` are configuration parameters; empty: as the template implies.

        Raises ``ApiError`` if they are invalid.
        """
        found = find_template(version, template)
        if not found.model_s_own:
            _log.warning(
                "model '%s' has no chat template, so the built-in plain one is used. Put chat_template.jinja or "
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
        family = family or tool_parsers.family_of(found.with_tools)
        self._family = self._find(family) if family not in ("", reasoning_parsers.NONE) else None
        self._thinks = thinks or reasoning_parsers.reasoning_parser_of(found.source)
        if self._thinks not in reasoning_parsers.NAMES:
            raise self._unknown(THOUGHTS, self._thinks, reasoning_parsers.NAMES, "bad_reasoning_parser")
        self.adds_special = found.plain
        """Whether the tokenizer must add special tokens to a prompt. All templates but the plain one write them."""

    def _find(self, family: str) -> ToolCallFamily:
        found = tool_parsers.ALL.get(family)
        if found is None:
            raise self._unknown(PARSER, family, tuple(tool_parsers.ALL), "bad_tool_call_parser")
        return found

    def _unknown(self, parameter: str, value: str, names: Sequence[str], code: str) -> ApiError:
        meant = nearest(value, names)
        hint = f" Did you mean '{meant}'?" if meant else ""
        return ApiError(
            f"The parameter {parameter} of model '{self._name}' is '{value}'; it must be one of "
            f"{', '.join(names)}.{hint}",
            None,
            code,
            500,
        )

    def template(self, asked: ChatRequest) -> ChatTemplate:
        """Return the template for a chat. Raises ``ApiError`` if the model does not support the chat's tools."""
        if asked.choice == "auto" and self._family is None:
            raise ApiError(
                f'"auto" tool choice requires a tool call parser: set the parameter {PARSER} in the configuration of '
                f"model '{self._name}' to one of {', '.join(tool_parsers.ALL)}",
                "tools",
                "unsupported_parameter",
            )
        return self._template if asked.choice == "none" else self._with_tools

    def prepare(self, asked: ChatRequest, sampling: Sampling, prompt: bytes | memoryview) -> None:
        """Set the sampling defaults of chats.

        A chat without a limit is limited only by the context, while engines have a default limit. If a parser looks
        for a special token, engines must not skip special tokens, as they do by default.
        """
        sampling.setdefault("max_tokens", SamplingSetting(None, "max_tokens"))
        calls = asked.choice == "auto" and self._family is not None and self._family.special
        markers = reasoning_parsers.ALL.get(self._thinks)
        thinks = self._thinks == reasoning_parsers.HARMONY or (markers is not None and markers.special)
        if calls or thinks:
            sampling.setdefault("skip_special_tokens", SamplingSetting(False, "tools" if calls else "messages"))

        if asked.budget and markers is not None and not is_guided(sampling) and asked.choice not in _FORCED:
            begun = self._is_begun(markers, prompt)
            budget = {"tokens": asked.budget, "begin": markers.begin, "end": markers.end, "begun": begun}
            sampling["thinking_budget"] = SamplingSetting(budget, "thinking_token_budget")

    @staticmethod
    def _is_begun(markers: ReasoningMarkers, prompt: bytes | memoryview) -> bool:
        """Return whether a prompt ends with the beginning of a thought."""
        return bytes(prompt[-_TAIL:]).rstrip().endswith(markers.begin.encode())

    def parser(self, asked: ChatRequest, prompt: bytes | memoryview) -> ToolParser | None:
        """Return the parser for one choice, which continues ``prompt``; None if its text is all there is."""
        if asked.choice == "named":
            return GuidedCall(asked.tool, self._new_id)
        if asked.choice == "required":
            return GuidedCalls(self._new_id)
        family = self._family if asked.choice != "none" else None
        parser = family.parser(asked.schemas) if family is not None else None
        if not (family is not None and family.thinks) and not is_guided(asked.wanted.sampling):
            parser = self._thinking(parser, prompt)
        if parser is None or (asked.thoughts and not asked.single):
            return parser
        return FilteredEvents(parser, single=asked.single, thoughts=asked.thoughts)

    def _thinking(self, answer: ToolParser | None, prompt: bytes | memoryview) -> ToolParser | None:
        """Return the parser of thoughts before an answer. A grammar holds from the first token: no thought fits."""
        if self._thinks == reasoning_parsers.HARMONY:
            return HarmonyParser()
        markers = reasoning_parsers.ALL.get(self._thinks)
        if markers is None:
            return answer
        return ReasoningParser(markers.begin, markers.end, answer, begun=self._is_begun(markers, prompt))

    def _new_id(self) -> str:
        return (self._family or tool_parsers.DEFAULT).new_id()


class ChatModels:
    """Cache of the chat settings of loaded models, filled lazily with a model's first chat."""

    def __init__(self, server: TransportEntry) -> None:
        self._server = server
        self._known: WeakKeyDictionary[ServableVersion, ChatModel] = WeakKeyDictionary()

    def of(self, running: ServableVersion) -> ChatModel:
        """Return the chat settings of a model. Raises ``NeriteError`` for invalid files and parameters."""
        known = self._known.get(running)
        if known is None:
            version = self._server.version_directory(running)
            parameters = (running.parameter(name) for name in (PARAMETER, PARSER, THOUGHTS))
            known = ChatModel(running.name, version, *parameters)
            self._known[running] = known
        return known
