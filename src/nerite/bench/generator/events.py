"""Event streams as they come: when each event with content came, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from nerite.client.error import text_in


class Events:
    """The events of one answer of the generate extension: each is a response."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When the events with content came."""
        self.tokens = 0
        """How many tokens the server says there were; 0 if it does not."""
        self.error = ""
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take what came at a time."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and event != b"[DONE]":
                self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        try:
            # Numbers may be NaN here, which makes an event no JSON for this reader; it is a response all the same.
            document = orjson.loads(event) if event.startswith(b'{"error"') or self._looks_inside else {}
        except orjson.JSONDecodeError:
            self.error = "an event is no JSON"
            return
        if "error" in document:
            self.error = text_in(document["error"])
        elif self._has_content(document):
            self.times.append(now)

    _looks_inside = False

    def _has_content(self, document: Mapping[str, Any]) -> bool:
        return True


class ChatEvents(Events):
    """The events of a completion under ``/v1``: chunks, of which the first and the last may be empty."""

    _looks_inside = True

    def _has_content(self, document: Mapping[str, Any]) -> bool:
        usage = document.get("usage")
        if usage:
            self.tokens = int(usage.get("completion_tokens") or 0)
        for choice in document.get("choices") or ():
            delta = choice.get("delta") or {}
            if choice.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
                return True
        return False
