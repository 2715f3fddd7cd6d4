"""A way through the words of a text, with the reports and the detours that a mistake needs."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from nerite.config.mistake import FieldPath, Mistake, Position
from nerite.config.tokens import Token, Tokenizer

OPENERS: Final = {"{": "}", "[": "]", "<": ">", "(": ")"}
CLOSERS: Final = frozenset(OPENERS.values())
_SEPARATORS: Final = frozenset(",;")
_MANY: Final = 20
"""Mistakes after which people do not read on."""


class Astray(Exception):
    """It cannot be told to what the next words belong: reading goes on with the next field of the configuration."""


def unfilled(placeholder: str, remedy: str) -> str:
    """Return what to do about a placeholder; ``remedy`` says what is to stand there."""
    if placeholder.startswith("{%"):
        return f"{placeholder} is a statement of a template: render the template. {remedy}"
    return f"{placeholder} is an unfilled placeholder of a template: fill the template in, or replace it. {remedy}"


class Cursor:
    """Where a parser is in its text, and what it has found wrong so far."""

    def __init__(self, text: str) -> None:
        tokenizer = Tokenizer(text)
        self._tokens = tokenizer.tokens
        self._index = 0
        self._recovered_at = -1
        """Where the last value ended that was stepped over."""
        self._margin = self.here.position.column
        self.mistakes: list[Mistake] = tokenizer.mistakes
        self.positions: dict[FieldPath, Position] = {(): Position(1, 1)}
        self.doubtful: set[str] | None = set()
        self.listed: set[str] = set()
        """The lists of fields that were told."""
        self.open: list[str] = []
        """The closers that are due, the innermost last."""

    @property
    def here(self) -> Token:
        """The word that comes next; the end, once it is reached, comes for ever."""
        return self._tokens[self._index]

    @property
    def ahead(self) -> Token:
        """The word after the next."""
        return self._tokens[min(self._index + 1, len(self._tokens) - 1)]

    @property
    def before(self) -> Token:
        """The word that was taken last. Not before the first one was."""
        return self._tokens[self._index - 1]

    @property
    def recovering(self) -> bool:
        """Whether something wrong was stepped over just now, so that what follows is no news."""
        return self._index == self._recovered_at

    @property
    def has_many(self) -> bool:
        """Whether there are more mistakes than people read."""
        return len(self.mistakes) > _MANY

    def take(self) -> Token:
        """Step over the next word and return it."""
        token = self.here
        if token.kind != "end":
            self._index += 1
        return token

    def at(self, *symbols: str) -> bool:
        """Return True if the next word is one of ``symbols``."""
        return self.here.kind == "symbol" and self.here.text in symbols

    def took(self, *symbols: str) -> bool:
        """Step over the next word if it is one of ``symbols``; return whether it was."""
        if self.at(*symbols):
            self._index += 1
            return True
        return False

    def at_field(self) -> bool:
        """Return True if the next words begin a field: a name and what stands behind one."""
        return self.here.kind == "identifier" and self.ahead.kind == "symbol" and self.ahead.text in ":{<["

    def at_outer_field(self, names: Container[str]) -> bool:
        """Return True if a field with one of ``names`` begins here that stands in its line as the first one did."""
        line, column = self.here.position
        first_in_line = not self._index or self.before.position.line != line
        return first_in_line and column <= self._margin and self.at_field() and self.here.text in names

    def resume(self, names: Container[str]) -> None:
        """Step to the next field that ``at_outer_field`` finds, or to the end."""
        while self.here.kind != "end" and not self.at_outer_field(names):
            self.take()
        del self.open[1:]

    def report(self, message: str, token: Token, path: FieldPath, remedy: str, *, doubt: str | None = None) -> None:
        """Note a mistake at ``token``, unless one was noted for that word already.

        ``doubt`` is the field of the configuration that the mistake makes doubtful, empty for none. Without it that
        is the field of ``path``, or all of them where the mistake is not inside of one.
        """
        if doubt is None and not path:
            self.doubtful = None
        if self.doubtful is not None and (field := doubt if doubt is not None else str(path[0])):
            self.doubtful.add(field)
        if not token.flawed:
            if token.kind == "placeholder":
                remedy = unfilled(token.text, remedy)
            line, column = token.position
            self.mistakes.append(Mistake(message=message, path=path, line=line, column=column, remedy=remedy))

    def skip_value(self) -> None:
        """Step over what should have been one value: a bracketed group, or a word with its sign."""
        self._skip_value()
        self._recovered_at = self._index

    def _skip_value(self) -> None:
        if self.here.kind == "end" or self.at(*CLOSERS, *_SEPARATORS) or self.at_field():
            return
        if self.at(*OPENERS):
            self._skip_group()
            return
        _ = self.took("-") or self.took(":")
        if self.here.kind == "string":
            while self.here.kind == "string":
                self.take()
        elif not self.at(*CLOSERS):
            self.take()

    def _skip_group(self) -> None:
        start, depth = self._index, 0
        while self.here.kind != "end":
            token = self.take()
            if token.kind == "symbol":
                depth += (token.text in OPENERS) - (token.text in CLOSERS)
            if depth == 0:
                return
        # It is never closed, and where it should be cannot be told.
        self._index = start
        raise Astray

    def take_glued(self) -> str:
        """Step over words that stand without a gap, as in ``my-model.v2``, and return them as one."""
        text = ""
        end = self.here.position
        while self.here.kind != "end" and self.here.position == end and not self.at(*OPENERS, *CLOSERS, *_SEPARATORS):
            token = self.take()
            text += token.text
            end = Position(end.line, end.column + len(token.text))
        self._recovered_at = self._index
        return text

    def skip_line(self, line: int) -> None:
        """Step over the rest of ``line``."""
        while self.here.kind != "end" and self.here.position.line == line:
            self.take()

    def skip_comment(self) -> None:
        """Step over a comment as C writes it between two marks, and its end."""
        self.take()
        while self.here.kind != "end":
            if self.took("*") and self.took("/"):
                return
            self.take()

    def skip_all(self) -> None:
        """Give up the rest of the text."""
        self._index = len(self._tokens) - 1
        self.doubtful = None
