"""Scanner of protobuf's text format: tokens with their positions, and a cursor that can recover from mistakes.

A token that cannot be read is reported, marked as flawed and passed on, so that one typing error does not hide the
mistakes after it. Columns count characters (protobuf counts bytes, and a tab as up to eight).
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final, Literal, NamedTuple

from nerite.config.mistake import FieldPath, Mistake, Position

TokenKind = Literal["identifier", "integer", "float", "string", "placeholder", "symbol", "end"]


class TextToken(NamedTuple):
    """A token. ``text`` is its text in the file, including quotes, and empty for the end of the file."""

    kind: TokenKind
    text: str
    position: Position
    value: str = ""
    """The value of a string, with its escapes resolved."""
    flawed: bool = False
    """A mistake has been reported for it already."""
    hidden: str = ""
    """A comment between the token before and this one that begins like a placeholder: ``#DTYPE } ]``."""


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
"""A placeholder that a template engine left, with the rest of its word. None of these forms is part of a correct text.
The length is bounded, because the pattern is tried at each token of a text that may be long."""
_BEFORE_VALUES: Final = frozenset(":[,")
_HIDDEN: Final = re.compile(r"[ \t]*(#[A-Z][A-Z0-9_]*#?(?=[\s}\],;]|$)[^\n]*)")
_NUMBER_START: Final = re.compile(r"\.?[0-9]")
_ESCAPE: Final = re.compile(
    r"\\(?:[abfnrtv\\?'\"]|[0-7]{1,3}|[xX][0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})"
)
_TAIL: Final = re.compile(r"[.A-Za-z0-9_]*")
_QUOTES: Final = "\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb"
"""Quotes as word processors write them."""
_QUOTED: Final = re.compile(rf"[^\n]*?(?:[{_QUOTES}\"']|(?=\n)|$)")
_FOREIGN: Final = re.compile(rf"[^\x00-\x7f\s{_QUOTES}]\w*")
_SIMPLE: Final = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}


class Tokenizer:
    """Divides a text into ``tokens``, the last of which has the kind ``end``, and ``mistakes`` in tokens."""

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
        """Skip blanks and comments. Return a comment that looks like a placeholder; an empty string if none does."""
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
        # Angle brackets also enclose messages, and the tags of a web page.
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
        """Report characters that are not ASCII outside a string. Those of one word or string become one token."""
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
            # Both tokens are complete, so they mean the same as with a space between them.
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
        """Append the escaped character at ``at`` to ``value``; return the index behind the escape."""
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
    """Return the first byte of ``character`` in the file. A byte that is not UTF-8 was decoded to a surrogate."""
    code = ord(character)
    return code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else character.encode("utf-8", "surrogatepass")[0]


OPENERS: Final = {"{": "}", "[": "]", "<": ">", "(": ")"}
CLOSERS: Final = frozenset(OPENERS.values())
_SEPARATORS: Final = frozenset(",;")
_MANY: Final = 20
"""Number of mistakes after which people stop reading."""


class Astray(Exception):
    """The next tokens belong to an unknown field: the parser continues with the next top-level field."""


def unfilled(placeholder: str, remedy: str) -> str:
    """Return the remedy for a placeholder; ``remedy`` says what to write in its place."""
    if placeholder.startswith("{%"):
        return f"{placeholder} is a statement of a template: render the template. {remedy}"
    return f"{placeholder} is an unfilled placeholder of a template: fill the template in, or replace it. {remedy}"


class Cursor:
    """Position of a parser in its text, with the mistakes and the positions of fields so far."""

    def __init__(self, text: str) -> None:
        tokenizer = Tokenizer(text)
        self._tokens = tokenizer.tokens
        self._index = 0
        self._recovered_at = -1
        """Index behind the last value that was skipped because of a mistake."""
        self._margin = self.here.position.column
        self.mistakes: list[Mistake] = tokenizer.mistakes
        self.positions: dict[FieldPath, Position] = {(): Position(1, 1)}
        self.doubtful: set[str] | None = set()
        """The top-level fields whose values may not be what was meant; ``None``: any of them."""
        self.listed: set[str] = set()
        """The lists of fields that have been reported."""
        self.open: list[str] = []
        """The closing brackets that are expected, the innermost last."""

    @property
    def here(self) -> TextToken:
        """The next token. At the end of the text it stays the ``end`` token."""
        return self._tokens[self._index]

    @property
    def ahead(self) -> TextToken:
        """The token after the next one."""
        return self._tokens[min(self._index + 1, len(self._tokens) - 1)]

    @property
    def before(self) -> TextToken:
        """The token taken last. Requires that one was taken."""
        return self._tokens[self._index - 1]

    @property
    def recovering(self) -> bool:
        """Whether a wrong value was skipped just now, so that an unexpected token is no new mistake."""
        return self._index == self._recovered_at

    @property
    def has_many(self) -> bool:
        """Whether there are more mistakes than people will read."""
        return len(self.mistakes) > _MANY

    def take(self) -> TextToken:
        """Take the next token and return it."""
        token = self.here
        if token.kind != "end":
            self._index += 1
        return token

    def at(self, *symbols: str) -> bool:
        """Return True if the next token is one of ``symbols``."""
        return self.here.kind == "symbol" and self.here.text in symbols

    def took(self, *symbols: str) -> bool:
        """Take the next token if it is one of ``symbols``; return whether it is."""
        if self.at(*symbols):
            self._index += 1
            return True
        return False

    def at_field(self) -> bool:
        """Return True if the next tokens begin a field: a name, and a symbol that follows a name."""
        return self.here.kind == "identifier" and self.ahead.kind == "symbol" and self.ahead.text in ":{<["

    def at_outer_field(self, names: Container[str]) -> bool:
        """Return True if a field with one of ``names`` begins a line here, indented no further than the first token."""
        line, column = self.here.position
        first_in_line = not self._index or self.before.position.line != line
        return first_in_line and column <= self._margin and self.at_field() and self.here.text in names

    def resume(self, names: Container[str]) -> None:
        """Move to the next field that ``at_outer_field`` recognizes, or to the end."""
        while self.here.kind != "end" and not self.at_outer_field(names):
            self.take()
        del self.open[1:]

    def report(self, message: str, token: TextToken, path: FieldPath, remedy: str, *, doubt: str | None = None) -> None:
        """Record a mistake at ``token``, unless one was recorded for that token already.

        ``doubt`` is the top-level field that the mistake makes doubtful, and empty for none. The default is the field
        of ``path``, or all fields if the mistake is outside of any.
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
        """Skip what should have been one value: a bracketed group, or a token with its sign."""
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
        # The group is never closed, and its end is unknown.
        self._index = start
        raise Astray

    def take_glued(self) -> str:
        """Take tokens that follow each other without a gap, as in ``my-model.v2``, and return them as one text."""
        text = ""
        end = self.here.position
        while self.here.kind != "end" and self.here.position == end and not self.at(*OPENERS, *CLOSERS, *_SEPARATORS):
            token = self.take()
            text += token.text
            end = Position(end.line, end.column + len(token.text))
        self._recovered_at = self._index
        return text

    def skip_line(self, line: int) -> None:
        """Skip the rest of ``line``."""
        while self.here.kind != "end" and self.here.position.line == line:
            self.take()

    def skip_comment(self) -> None:
        """Skip a C comment, including its end."""
        self.take()
        while self.here.kind != "end":
            if self.took("*") and self.took("/"):
                return
            self.take()

    def skip_all(self) -> None:
        """Skip the rest of the text."""
        self._index = len(self._tokens) - 1
        self.doubtful = None
