"""Parsers for the tool call formats of model families: the values of ``TOOL_CALL_PARSER``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from nerite.llm.openai import tool_blocks
from nerite.llm.openai.reasoning_parsers import HarmonyParser
from nerite.llm.openai.tool_blocks import BlockParser, PythonicParser, Schemas
from nerite.llm.openai.tool_calls import (
    MAX_SPACE,
    BrokenCall,
    CallReader,
    Event,
    JsonReader,
    MarkerSearch,
    ReasoningText,
    TentativeCall,
    ToolArguments,
    ToolCall,
    ToolParser,
    held,
    new_id,
)

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"


class HermesParser:
    """Parser for Hermes, Qwen and the like: ``<tool_call>{"name": …, "arguments": …}</tool_call>`` within text."""

    def __init__(self) -> None:
        self._search = MarkerSearch(_BEGIN)
        self._attempt: TentativeCall | None = None

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain. Raises ``BrokenCall``."""
        events: list[Event] = []
        rest: str | None = text
        while rest:
            if self._attempt is None:
                passed, rest = self._search.feed(rest)
                if passed:
                    events.append(passed)
                if rest is not None:
                    self._attempt = TentativeCall(_BEGIN, new_id)
            else:
                rest = self._attempt.feed(rest, events)
                if self._attempt.over:
                    if not self._attempt.failed:
                        self._search.drop(_END)
                    self._attempt = None
        return events

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text."""
        if self._attempt is not None:
            return self._attempt.finish()
        text = self._search.finish()
        return [text] if text else []


_TAG: Final = "<|python_tag|>"


class Llama3Parser:
    """Parser for Llama 3: ``{"name": …, "parameters": …}``, several of them separated by semicolons, or text.

    An object at the beginning, after ``<|python_tag|>`` or after another call is a call if it looks like one.
    """

    def __init__(self) -> None:
        self._search = MarkerSearch(_TAG)
        self._attempt: TentativeCall | None = None
        self._fresh = True
        """Whether a call may begin here."""
        self._called = False
        self._space = ""
        """White space before the current position."""

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain. Raises ``BrokenCall``."""
        events: list[Event] = []
        rest: str | None = text
        while rest:
            if self._attempt is not None:
                rest = self._attempt.feed(rest, events)
                if self._attempt.over:
                    self._fresh = self._called = not self._attempt.failed
                    self._attempt = None
            elif self._fresh:
                rest = self._begin(rest)
            else:
                passed, rest = self._search.feed(rest)
                if passed:
                    events.append(passed)
                self._fresh = rest is not None
        return events

    def _begin(self, text: str) -> str:
        """Handle text where a call may begin; return the text that is left."""
        stripped = text.lstrip(" \t\r\n;" if self._called else " \t\r\n")
        if not self._called:
            self._space += text[: len(text) - len(stripped)]
        if not stripped and len(self._space) <= MAX_SPACE:
            return ""
        before, self._space, self._fresh = self._space, "", False
        if stripped.startswith("{"):
            self._attempt = TentativeCall("" if self._called else before, new_id, strict=True)
            return stripped
        if self._called:
            self._search.drop()
        return stripped if self._called else before + stripped

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text."""
        if self._attempt is not None:
            return self._attempt.finish()
        text = ("" if self._called else self._space) + self._search.finish()
        return [text] if text else []


# Forced calls: structured output constrains the whole text to their schema.


class GuidedCall:
    """Parser for a text that is the arguments of one function."""

    def __init__(self, name: str, new_id: Callable[[], str]) -> None:
        self._name = name
        self._new_id = new_id
        self._json = JsonReader()

    @property
    def done(self) -> bool:
        """Whether the arguments are complete."""
        return self._json.done

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain. Raises ``BrokenCall``."""
        events: list[Event] = []
        self.take(text, events)
        return events

    def take(self, text: str, events: list[Event]) -> str:
        """Parse what belongs to the arguments, and add its events; return the text after them."""
        if not self._json.done and not self._json.depth:
            text = text.lstrip()
            if text and text[0] != "{":
                raise BrokenCall(f"{text[0]!r} where an object should be")
            if text:
                events.append(ToolCall(self._new_id(), self._name))
        if not text or self._json.done:
            return text
        at, passed = self._json.take_all(text)
        events.append(ToolArguments(passed))
        return text[at:]

    def finish(self) -> list[Event]:
        """Return no events: nothing is held back."""
        return []


class GuidedCalls:
    """Parser for a text that is a list of calls."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._call: CallReader | None = None
        self._open = False
        self.done = False
        """The list is complete."""

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain. Raises ``BrokenCall``."""
        events: list[Event] = []
        self.take(text, events)
        return events

    def take(self, text: str, events: list[Event]) -> str:
        """Parse what belongs to the list, and add its events; return the text after it."""
        at = 0
        while at < len(text) and not self.done:
            if self._call is None:
                self._between_calls(text[at])
            if self._call is None:
                at += 1
                continue
            at, found = self._call.take(text, at)
            events += found
            if self._call.done:
                self._call = None
        return text[at:]

    def _between_calls(self, char: str) -> None:
        if char.isspace() or (char == "," and self._open):
            return
        if char == "[" and not self._open:
            self._open = True
        elif char == "]" and self._open:
            self.done = True
        elif char == "{" and self._open:
            self._call = CallReader(self._new_id)
        else:
            raise BrokenCall(f"{char!r} where a list of calls should be")

    def finish(self) -> list[Event]:
        """Return no events: an incomplete call without a name is dropped."""
        return []


class ListParser:
    """Parser for a list of calls after a marker, and before another one that may be missing, within text."""

    def __init__(self, begin: str, end: str = "", new_id: Callable[[], str] = new_id) -> None:
        self._begin = begin
        self._end = end
        self._new_id = new_id
        self._search = MarkerSearch(begin)
        self._behind: str | None = None
        """Text after the marker, until it is clear what it is; None outside of that."""
        self._calls: GuidedCalls | GuidedCall | None = None

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain. Raises ``BrokenCall``."""
        events: list[Event] = []
        rest: str | None = text
        while rest:
            if self._calls is not None:
                rest = self._calls.take(rest, events)
                if self._calls.done:
                    self._calls = None
                    self._search.drop(self._end)
            elif self._behind is not None:
                behind, self._behind = self._behind + rest, None
                rest = self._begin_calls(behind, events)
            else:
                passed, rest = self._search.feed(rest)
                if passed:
                    events.append(passed)
                if rest is not None:
                    self._behind = ""
        return events

    def _begin_calls(self, behind: str, events: list[Event]) -> str:
        """Decide whether calls follow the marker; return the text that is left."""
        stripped = behind.lstrip()
        if stripped.startswith("["):
            self._calls = GuidedCalls(self._new_id)
            return stripped
        if len(behind) <= MAX_SPACE and self._may_begin(stripped):
            self._behind = behind
        else:
            events.append(self._begin + behind)
        return ""

    def _may_begin(self, text: str) -> bool:
        """Return whether calls may begin with this text, which is not the beginning of a list."""
        return not text

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text."""
        text = self._search.finish() if self._behind is None else self._begin + self._behind
        return [text] if text else []


_BEFORE_ARGUMENTS: Final = "[ARGS]"


def mistral_id() -> str:
    """Return an id in the form that Mistral's templates require."""
    return new_id(9, "")


class MistralParser(ListParser):
    """Parser for Mistral: after each ``[TOOL_CALLS]`` in the text, a list of calls or a name and its arguments."""

    def __init__(self) -> None:
        super().__init__("[TOOL_CALLS]", new_id=mistral_id)

    def _begin_calls(self, behind: str, events: list[Event]) -> str:
        name, brace, arguments = behind.lstrip().partition("{")
        if not brace or name.startswith("["):
            return super()._begin_calls(behind, events)
        name = name.strip().removesuffix(_BEFORE_ARGUMENTS).strip()
        if not name or any(char.isspace() for char in name):
            raise BrokenCall(f"{name!r} is not the name of a function")
        self._calls = GuidedCall(name, mistral_id)
        return brace + arguments

    def _may_begin(self, text: str) -> bool:
        return True


class CommandRParser:
    """Parser for Command R: a list of calls between action markers, and text between response markers."""

    def __init__(self) -> None:
        self._list = ListParser("<|START_ACTION|>", "<|END_ACTION|>")
        self._held = ""

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain. Raises ``BrokenCall``."""
        return self._list.feed(self._without(text))

    def _without(self, text: str, *, last: bool = False) -> str:
        """Return the text without the markers of responses."""
        self._held += text
        for marker in _RESPONSE:
            self._held = self._held.replace(marker, "")
        kept = 0 if last else max(held(self._held, marker) for marker in _RESPONSE)
        clear = len(self._held) - kept
        text, self._held = self._held[:clear], self._held[clear:]
        return text

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text."""
        return self._list.feed(self._without("", last=True)) + self._list.finish()


_RESPONSE: Final = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class FilteredEvents:
    """Passes on the text of another parser, its thoughts if they are wanted, and all calls or the first one."""

    def __init__(self, parser: ToolParser, *, single: bool, thoughts: bool) -> None:
        """``single``: pass on the first call only."""
        self._parser = parser
        self._most = 1 if single else math.inf
        self._thoughts = thoughts
        self._calls = 0

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain. Raises ``BrokenCall``."""
        return self._kept(self._parser.feed(text))

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text."""
        return self._kept(self._parser.finish())

    def _kept(self, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if isinstance(event, ReasoningText):
                if self._thoughts:
                    kept.append(event)
                continue
            self._calls += isinstance(event, ToolCall)
            if isinstance(event, str) or self._calls <= self._most:
                kept.append(event)
        return kept


class ToolCallFamily(NamedTuple):
    """Tool call format of a family of models."""

    parser: Callable[[Schemas], ToolParser]
    """Creates the parser of one choice, given the schema of the arguments of each tool."""
    new_id: Callable[[], str] = new_id
    special: bool = False
    """Whether the marker is a special token, which engines omit from text by default."""
    thinks: bool = False
    """Whether the parser separates thoughts, too."""


def _plain(parser: Callable[[], ToolParser]) -> Callable[[Schemas], ToolParser]:
    return lambda _: parser()


_HERMES: Final = ToolCallFamily(_plain(HermesParser))
_LLAMA: Final = ToolCallFamily(_plain(Llama3Parser), special=True)
_DEEPSEEK: Final = ToolCallFamily(partial(BlockParser, *tool_blocks.DEEPSEEK, tool_blocks.read_deepseek), special=True)
_LIST: Final = ToolCallFamily(_plain(partial(ListParser, "<|tool_call|>", "<|/tool_call|>")), special=True)
_COMMAND: Final = ToolCallFamily(_plain(CommandRParser), special=True)
_HARMONY: Final = ToolCallFamily(_plain(HarmonyParser), special=True, thinks=True)
_GLM: Final = ToolCallFamily(partial(BlockParser, *tool_blocks.XML, tool_blocks.read_glm))
_CODER: Final = ToolCallFamily(partial(BlockParser, *tool_blocks.XML, tool_blocks.read_qwen_coder))
_GEMMA: Final = ToolCallFamily(
    partial(BlockParser, *tool_blocks.FUNCTION_GEMMA, tool_blocks.read_function_gemma), special=True
)
ALL: Final[Mapping[str, ToolCallFamily]] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "llama3": _LLAMA,
    "llama3_json": _LLAMA,
    "mistral": ToolCallFamily(_plain(MistralParser), mistral_id, special=True),
    "deepseek": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "granite": _LIST,
    "phi4": _LIST,
    "functools": ToolCallFamily(_plain(partial(ListParser, "functools"))),
    "command": _COMMAND,
    "harmony": _HARMONY,
    "openai": _HARMONY,
    "glm45": _GLM,
    "qwen3_coder": _CODER,
    "functiongemma": _GEMMA,
    "pythonic": ToolCallFamily(_plain(PythonicParser)),
}
DEFAULT: Final = ALL["hermes"]
"""Used for forced calls if the model's family is unknown."""
_SIGNS: Final = (
    ("<|channel|>", "harmony"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    (tool_blocks.DEEPSEEK[0], "deepseek"),
    ("<|START_ACTION|>", "command"),
    ("[TOOL_CALLS]", "mistral"),
    ("<start_function_call>", "functiongemma"),
    ("<|python_tag|>", "llama3"),
    ("<|tool_call|>", "granite"),
    ("functools[", "functools"),
    ("<tool_call>", "hermes"),
    ("<|start_header_id|>", "llama3"),
    ("<start_of_turn>", "pythonic"),
)
"""What stands in the chat templates of a family, the most specific first."""


def family_of(template: str) -> str:
    """Return the name of the family whose calls a chat template with tools renders; empty if it has none."""
    if "tools" not in template:
        return ""
    return next((name for sign, name in _SIGNS if sign in template), "")
