"""Text that is passed on until a marker comes, and what is read behind the marker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nerite.transports.openai.tools.call_reader import CallReader
from nerite.transports.openai.tools.parser import BrokenCall, Event, held

MOST_SPACE: Final = 1024
"""Characters of white space that wait for what comes after them: it is looked at again each time."""


class Waiting:
    """Text before a marker. White space next to calls belongs to nobody, if it is not more than that."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""
        self._end = ""
        self._dropping = False

    def drop(self, end: str = "") -> None:
        """Leave out the white space that comes now, and ``end`` if it is there."""
        self._end = end
        self._dropping = True

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take text; return what is certain, and what stands behind the marker if that has come."""
        self._held += text
        if self._dropping and not self._dropped():
            return "", None
        at = self._held.find(self._marker)
        if at >= 0:
            before, rest = self._held[:at].rstrip(), self._held[at + len(self._marker) :]
            self._held = ""
            return before, rest
        kept = len(self._held) - held(self._held, self._marker)
        said = self._held[:kept].rstrip()
        if kept - len(said) > MOST_SPACE:
            said = self._held[:kept]
        self._held = self._held[len(said) :]
        return said, None

    def _dropped(self) -> bool:
        """Drop what is to be dropped; return whether that is over."""
        self._held = self._held.lstrip()
        if self._end and self._held.startswith(self._end):
            self._held = self._held[len(self._end) :].lstrip()
            self._end = ""
        if not self._held or (self._end and self._end.startswith(self._held)):
            return False
        self._dropping = False
        return True

    def finish(self) -> str:
        """Return what was held back: no marker comes any more."""
        text, self._held = self._held, ""
        return "" if self._dropping and self._end.startswith(text) else text


class Attempt:
    """What begins as a call, and is text again where it turns out to be none."""

    def __init__(self, before: str, new_id: Callable[[], str], *, strict: bool = False) -> None:
        """``before`` is what stood before it, such as the marker. ``strict``: a call has arguments."""
        self._raw = [before]
        self._reader = CallReader(new_id, strict=strict)
        self.over = False
        self.failed = False

    def feed(self, text: str, events: list[Event]) -> str:
        """Take text, and add to the events; return what stands behind the call when it is ``over``."""
        at = 0
        while at < len(text):
            begun, before = self._reader.begun, at
            try:
                at, found = self._reader.take(text, at)
            except BrokenCall:
                if self._reader.begun:
                    raise
                self.over = self.failed = True
                events.append("".join(self._raw) + text[at])
                return text[at + 1 :]
            events += found
            if not begun:
                self._raw.append(text[before:at])
            if self._reader.done:
                self.over = True
                return text[at:]
        return ""

    def finish(self) -> list[Event]:
        """Return what was held back: there is no more text."""
        return [] if self._reader.begun else ["".join(self._raw)]
