"""Hermes, Qwen and those that were trained like them: ``<tool_call>{"name": …, "arguments": …}</tool_call>``."""

from __future__ import annotations

from typing import Final

from nerite.transports.openai.tools.parser import Event, new_id
from nerite.transports.openai.tools.waiting import Attempt, Waiting

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"


class HermesParser:
    """Text, and any number of calls between tags."""

    def __init__(self) -> None:
        self._waiting = Waiting(_BEGIN)
        self._attempt: Attempt | None = None

    def feed(self, text: str) -> list[Event]:
        """Take text; return what is certain by now. Raises ``BrokenCall``."""
        events: list[Event] = []
        rest: str | None = text
        while rest:
            if self._attempt is None:
                said, rest = self._waiting.feed(rest)
                if said:
                    events.append(said)
                if rest is not None:
                    self._attempt = Attempt(_BEGIN, new_id)
            else:
                rest = self._attempt.feed(rest, events)
                if self._attempt.over:
                    if not self._attempt.failed:
                        self._waiting.drop(_END)
                    self._attempt = None
        return events

    def finish(self) -> list[Event]:
        """Return what was held back: there is no more text."""
        if self._attempt is not None:
            return self._attempt.finish()
        text = self._waiting.finish()
        return [text] if text else []
