"""The words of protobuf's text form: names, numbers, strings and symbols, each with its place.

A word that cannot be read is reported, marked as flawed and handed on, so that one slip of the pen does not hide the
mistakes behind it. Columns count characters (protobuf counts bytes, and a tab as up to eight).
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final, Literal, NamedTuple

from nerite.config.mistake import FieldPath, Mistake, Position

TokenKind = Literal["identifier", "integer", "float", "string", "placeholder", "symbol", "end"]


class TextToken(NamedTuple):
    """One word. ``text`` is as it stands in the file, quotes included; for the end it is empty."""

    kind: TokenKind
    text: str
    position: Position
    value: str = ""
    """What a string says, its escapes resolved."""
    flawed: bool = False
    """A mistake was reported for it already."""
    hidden: str = ""
    """A comment between the word before and this one that begins like a placeholder: ``#DTYPE } ]``."""


_BLANK: Final = re.compile(r"(?:[ \t\r\n\v\f]+|#[^\n]*)*")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER: Final = re.compile(
    r"""(?P<hex>0[xX][0-9a-fA-F]*)
      | (?P<float>(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]*)?[fF]?
          | (?:0|[1-9][0-9]*)(?:[eE][+-]?[0-9]*[fF]?|[fF]))
      | (?P<integer>[0-9]+)""",
    re.VERBOSE,
)
_PLACEHOLDER: Final = re.compile(
    r"""[\w.-]{0,99}
    (?: \$\{[^{}\n]*\} | \$\([^()\n]*\) | \$[A-Za-z_]\w*
      | \{\{[^{}:\n]*\}\} | \{%[^\n]{0,199}?%\} | @[A-Za-z_]\w*@ | %\(\w+\)[a-z] | <[A-Za-z_][\w -]*> )
    [\w.-]*""",
    re.VERBOSE | re.ASCII,
)
"""What is left of a template, with the rest of its word, at a bounded length: it is tried at each word of a text that
may be long. None of it is in a text that is right."""
_BEFORE_VALUES: Final = frozenset(":[,")
_HIDDEN: Final = re.compile(r"[ \t]*(#[A-Z][A-Z0-9_]*#?(?=[\s}\],;]|$)[^\n]*)")
_NUMBER_START: Final = re.compile(r"\.?[0-9]")
_ESCAPE: Final = re.compile(
    r"\\(?:[abfnrtv\\?'\"]|[0-7]{1,3}|[xX][0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})"
)
_TAIL: Final = re.compile(r"[.A-Za-z0-9_]*")
_QUOTES: Final = "\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb"
"""What word processors make of quotes."""
_QUOTED: Final = re.compile(rf"[^\n]*?(?:[{_QUOTES}\"']|(?=\n)|$)")
_FOREIGN: Final = re.compile(rf"[^\x00-\x7f\s{_QUOTES}]\w*")
_SIMPLE: Final = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}


class Tokenizer:
    """Takes a text apart. ``tokens`` ends with a token of kind ``end``; ``mistakes`` holds what could not be read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._line_start = 0
        self.mistakes: list[Mistake] = []
        self.tokens: list[TextToken] = []
        while True:
            hidden = self._skip_blank()
            if self._at >= len(text):
                break
            if (token := self._next()) is not None:
                self.tokens.append(token._replace(hidden=hidden) if hidden else token)
        self.tokens.append(TextToken("end", "", self._position(self._at), hidden=hidden))

    def _position(self, at: int) -> Position:
        return Position(self._line, at - self._line_start + 1)

    def _skip_blank(self) -> str:
        """Step over blanks and comments. Return a comment that looks like a placeholder; empty if there is none."""
        match = _BLANK.match(self._text, self._at)
        assert match is not None
        hidden = _HIDDEN.match(match[0])
        if lines := match[0].count("\n"):
            self._line += lines
            self._line_start = self._at + match[0].rindex("\n") + 1
        self._at = match.end()
        return hidden[1] if hidden is not None else ""

    def _report(self, message: str, at: int, remedy: str) -> None:
        line, column = self._position(at)
        self.mistakes.append(Mistake(message=message, line=line, column=column, remedy=remedy))

    def _next(self) -> TextToken | None:
        text, start = self._text, self._at
        match = _PLACEHOLDER.match(text, start)
        # Angle brackets are those of a message as well, and those of a web page.
        if match is not None and ("<" not in match[0] or (self.tokens and self.tokens[-1].text in _BEFORE_VALUES)):
            self._at = match.end()
            return TextToken("placeholder", match[0], self._position(start))
        if (match := _IDENTIFIER.match(text, start)) is not None:
            self._at = match.end()
            return TextToken("identifier", match[0], self._position(start))
        if _NUMBER_START.match(text, start) is not None:
            return self._number()
        if text[start] in "\"'":
            return self._string()
        if not text[start].isascii():
            return self._foreign()
        self._at += 1
        if text[start].isprintable():
            return TextToken("symbol", text[start], self._position(start))
        remedy = f"Remove the control character {text[start]!r}."
        self._report("Invalid control characters encountered in text.", start, remedy)
        return None

    def _foreign(self) -> TextToken | None:
        """Report what is not ASCII outside of a string; what was meant as a word or as a string counts as one."""
        text, start = self._text, self._at
        first = text[start]
        message = f"Interpreting non ascii codepoint {_first_byte(first)}."
        if first == "\ufeff" or first.isspace():
            self._at += 1
            what = "the byte order mark" if first == "\ufeff" else f"the character {first!a}, or make it a plain space"
            self._report(message, start, f"Remove {what}.")
            return None
        if (match := _FOREIGN.match(text, start)) is not None:
            self._report(message, start, f"Remove '{match[0]}': outside of strings and comments only ASCII is allowed.")
        else:
            match = _QUOTED.match(text, start + 1)
            assert match is not None
            self._report(message, start, 'Write plain quotes: "…".')
        self._at = match.end()
        return TextToken("string", text[start : self._at], self._position(start), flawed=True)

    def _number(self) -> TextToken:
        text, start = self._text, self._at
        match = _NUMBER.match(text, start)
        assert match is not None
        found, end = match[0], match.end()
        kind: TokenKind = "float" if match["float"] is not None else "integer"
        message, at, remedy = "", end, "Write one number."
        if match["hex"] is not None and len(found) == 2:
            message, remedy = '"0x" must be followed by hex digits.', "Write the digits, or a decimal number."
        elif kind == "integer" and found[0] == "0" and (wrong := re.search("^0[0-7]*[89]", found)) is not None:
            message, at = "Numbers starting with leading zero must be in octal.", start + wrong.end() - 1
            remedy = f"Write {found.lstrip('0')}."
        elif kind == "float" and re.search("[eE][+-]?[fF]?$", found):
            message, remedy = '"e" must be followed by exponent.', "Write the exponent."
        elif text[end : end + 1] == "." and kind == "float":
            message = "Already saw decimal point or exponent; can't have another one."
        elif text[end : end + 1] == ".":
            message = "Hex and octal numbers must be integers."
        elif _IDENTIFIER.match(text, end) is not None:
            # Both words are whole, so they stand for what they would with the space between them.
            self._report("Need space between number and identifier.", end, f"Write a space after {found}.")
        if message:
            self._report(message, at, remedy)
            tail = _TAIL.match(text, end)
            assert tail is not None
            end = tail.end()
        self._at = end
        return TextToken(kind, text[start:end], self._position(start), flawed=bool(message))

    def _string(self) -> TextToken:
        text, start = self._text, self._at
        quote, at = text[start], start + 1
        value = bytearray()
        before = len(self.mistakes)
        while (character := text[at : at + 1]) not in (quote, "", "\n"):
            if character == "\\":
                at = self._escape(at, value)
            else:
                value += character.encode("utf-8", "surrogatepass")
                at += 1
        if character == quote:
            at += 1
        else:
            message = "String literals cannot cross line boundaries." if character else "Unexpected end of string."
            self._report(message, at, f"Close the string with {quote}.")
        self._at = at
        decoded = value.decode("utf-8", "replace")
        if decoded.encode() != value:
            self._report("String field contains invalid UTF-8.", start, "Write the text itself, in UTF-8.")
        return TextToken("string", text[start:at], self._position(start), decoded, len(self.mistakes) > before)

    def _escape(self, at: int, value: bytearray) -> int:
        """Resolve the escape at ``at`` into ``value``; return where the text goes on."""
        match = _ESCAPE.match(self._text, at)
        if match is None:
            remedy = "Write \\\\ for a backslash."
            self._report("Invalid escape sequence in string literal.", at + 1, remedy)
            return at + 1
        body = match[0][1:]
        if body[0] in _SIMPLE:
            value.append(_SIMPLE[body[0]])
        elif body[0] in "01234567":
            value.append(int(body, 8) & 0xFF)
        elif body[0] in "xX":
            value.append(int(body[1:], 16))
        elif body[0] in "uU":
            value += chr(int(body[1:], 16)).encode("utf-8", "surrogatepass")
        else:
            value += body.encode()
        return match.end()


def _first_byte(character: str) -> int:
    """Return the first byte of ``character`` in the file; a byte that is no UTF-8 was decoded to a surrogate."""
    code = ord(character)
    return code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else character.encode("utf-8", "surrogatepass")[0]


# A way through the words of a text, with the reports and the detours that a mistake needs.

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
    def here(self) -> TextToken:
        """The word that comes next; the end, once it is reached, comes for ever."""
        return self._tokens[self._index]

    @property
    def ahead(self) -> TextToken:
        """The word after the next."""
        return self._tokens[min(self._index + 1, len(self._tokens) - 1)]

    @property
    def before(self) -> TextToken:
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

    def take(self) -> TextToken:
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

    def report(self, message: str, token: TextToken, path: FieldPath, remedy: str, *, doubt: str | None = None) -> None:
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
