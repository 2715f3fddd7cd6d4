"""Parsers that separate what a model thinks from what it answers: the values of ``REASONING_PARSER``.

A parser of thoughts comes before the parser of tool calls, which gets the answer only: a call that a model considers is
no call. Thoughts are passed on as they are generated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from nerite.llm.openai.tool_calls import (
    MAX_SPACE,
    BrokenCall,
    Event,
    JsonReader,
    ReasoningText,
    ToolArguments,
    ToolCall,
    ToolParser,
    held,
    new_id,
)


class ReasoningParser:
    """Parser for thoughts between two markers, before the answer."""

    def __init__(self, begin: str, end: str, answer: ToolParser | None, *, begun: bool) -> None:
        """``answer`` parses the answer. ``begun``: the prompt ends with the first marker."""
        self._begin = begin
        self._end = end
        self._answer = answer
        self._state: Callable[[str], list[Event]] = self._in_thought if begun else self._before
        self._held = ""
        self._fresh = True
        """Whether no thought was passed on, so that white space and a repeated marker are dropped."""

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain. Raises ``BrokenCall``."""
        if self._state == self._in_answer:
            return self._in_answer(text)
        self._held += text
        return self._state("")

    def _before(self, _: str) -> list[Event]:
        stripped = self._held.lstrip()
        if stripped.startswith(self._begin):
            self._state, self._held = self._in_thought, stripped[len(self._begin) :]
            return self._in_thought("")
        if self._begin.startswith(stripped) and len(self._held) <= MAX_SPACE:
            return []
        self._state = self._in_answer
        text, self._held = self._held, ""
        return self._in_answer(text)

    def _in_thought(self, _: str) -> list[Event]:
        if self._fresh:
            self._held = self._held.lstrip()
            if self._held.startswith(self._begin):
                self._held = self._held[len(self._begin) :].lstrip()
            if not self._held or self._begin.startswith(self._held):
                return []
        at = self._held.find(self._end)
        if at >= 0:
            thought, answer = self._held[:at].rstrip(), self._held[at + len(self._end) :]
            self._held, self._state = answer, self._behind
            return self._passed(thought) + self._behind("")
        clear = self._held[: len(self._held) - held(self._held, self._end)]
        certain = clear.rstrip()
        if len(clear) - len(certain) > MAX_SPACE:
            certain = clear
        self._held = self._held[len(certain) :]
        return self._passed(certain)

    def _passed(self, thought: str) -> list[Event]:
        if not thought:
            return []
        self._fresh = False
        return [ReasoningText(thought)]

    def _behind(self, _: str) -> list[Event]:
        """Drop the white space between the thought and the answer."""
        text = self._held.lstrip()
        self._held = ""
        if not text:
            return []
        self._state = self._in_answer
        return self._in_answer(text)

    def _in_answer(self, text: str) -> list[Event]:
        if self._answer is not None:
            return self._answer.feed(text)
        return [text] if text else []

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text."""
        text, self._held = self._held, ""
        events: list[Event] = []
        if text and self._state == self._in_thought:
            events = self._passed(text.rstrip())
        elif text:
            events = self._in_answer(text)
        return events + (self._answer.finish() if self._answer is not None else [])


_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL: Final = "<|channel|>"
_TO: Final = " to=functions."
_LONGEST_HEAD: Final = 1024


class HarmonyParser:
    """Parser for the messages of gpt-oss: analysis is a thought, commentary to a function a call, and the rest text.

    A message is ``<|channel|>analysis<|message|>…<|end|>``, and further ones begin with ``<|start|>assistant``.
    """

    def __init__(self) -> None:
        self._held = ""
        self._wrap: Callable[[str], Event] | None = None
        """Makes the events of the current message; None between messages."""
        self._arguments: JsonReader | None = None

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain. Raises ``BrokenCall``."""
        self._held += text
        events: list[Event] = []
        while self._held:
            before = len(self._held)
            if self._wrap is None:
                events += self._begin()
            else:
                events += self._content(self._wrap)
            if len(self._held) == before:
                break
        return events

    def _begin(self) -> list[Event]:
        """Handle the head of a message."""
        head, marker, rest = self._held.partition(_MESSAGE)
        if not marker:
            if len(head) <= _LONGEST_HEAD and ("<|" in head or "<|".startswith(head.strip())):
                return []
            self._held, self._wrap = head, str  # no head: text
            return []
        self._held = rest
        channel = head.rpartition(_CHANNEL)[2].strip()
        _, to, name = head.partition(_TO)
        if to:
            name = name.split("<|")[0].split()[0] if name.split("<|")[0].split() else ""
            if not name:
                raise BrokenCall("the call has no name")
            self._wrap, self._arguments = ToolArguments, JsonReader()
            return [ToolCall(new_id(), name)]
        self._wrap = ReasoningText if channel.startswith("analysis") else str
        return []

    def _content(self, wrap: Callable[[str], Event]) -> list[Event]:
        ends = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        at, mark = min(ends, default=(-1, ""))
        if at < 0:
            kept = len(self._held) - max(held(self._held, each) for each in _ENDS)
            text, self._held = self._held[:kept], self._held[kept:]
            return self._event(wrap, text)
        text, self._held = self._held[:at], self._held[at + len(mark) :]
        events = self._event(wrap, text)
        if self._arguments is not None and not self._arguments.done:
            raise BrokenCall("the arguments end too early")
        self._wrap = self._arguments = None
        return events

    def _event(self, wrap: Callable[[str], Event], text: str) -> list[Event]:
        if self._arguments is not None:
            text = self._arguments.take_all(text.lstrip() if not self._arguments.depth else text)[1]
        return [wrap(text)] if text else []

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text."""
        text, self._held = self._held, ""
        if self._wrap is None:
            return [text] if text and "<|" not in text else []
        return self._event(self._wrap, text)


class ReasoningMarkers(NamedTuple):
    """How the models of a family mark what they think."""

    begin: str
    end: str
    special: bool = False
    """Whether the markers are special tokens, which engines omit from text by default."""


HARMONY: Final = "harmony"
NONE: Final = "none"
ALL: Final = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]", special=True),
    "command": ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>", special=True),
    "seed": ReasoningMarkers("<seed:think>", "</seed:think>"),
    "granite": ReasoningMarkers("Here is my thought process:", "Here is my response:"),
}
NAMES: Final = (*ALL, HARMONY, NONE)


def reasoning_parser_of(template: str) -> str:
    """Return which of ``NAMES`` the models of a chat template think by."""
    if _CHANNEL in template and _MESSAGE in template:
        return HARMONY
    for name, markers in ALL.items():
        if markers.begin.rstrip(":") in template:
            return name
    return NONE
