"""Parser and printer of the text form of a configuration (config.pbtxt). The parser finds all mistakes, not only one.

The grammar is protobuf's text format. The texts of the mistakes are those of protobuf's own parser, so that a search
for them finds existing answers. Unlike that parser this one continues after a mistake, and points at the wrong token
instead of behind it. If it cannot know how the text continues, it resumes at the next top-level field, so that one
mistake does not cause others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nerite.config.mistake import ConfigSource, FieldPath, Mistake
from nerite.config.model_config import ModelConfig
from nerite.config.scalars import expected, read_scalar
from nerite.config.scanner import CLOSERS, OPENERS, Astray, Cursor, TextToken, Tokenizer
from nerite.config.schema import FieldSchema, MessageSchema, field_remedy, fields_of, schema_of, show_float
from nerite.core.errors import Internal


@dataclass(frozen=True, slots=True)
class Parsed:
    """A configuration as far as it could be read, with everything that is wrong with its text."""

    config: ModelConfig
    source: ConfigSource = field(default_factory=ConfigSource)
    mistakes: tuple[Mistake, ...] = ()
    doubtful: frozenset[str] | None = frozenset()
    """The top-level fields whose values may not be what was meant; ``None``: any of them."""

    def trusts(self, fields: Iterable[str]) -> bool:
        """Return True if none of ``fields`` is doubtful, so that it makes sense to validate them."""
        return self.doubtful is not None and self.doubtful.isdisjoint(fields)


_ROOT: Final = schema_of()
_VALUES: Final = frozenset({"integer", "float", "string", "placeholder"})
_LISTED: Final = "Remove it: it is none of the fields that are listed above."
"""Remedy for an unknown field of a message whose fields were listed already."""
_A_FIELD: Final = "Write a field's name, a colon, and its value."


def parse_text(text: str, file: str = "") -> Parsed:
    """Parse ``text``; ``file`` is its name. Never raises: mistakes are part of the result."""
    parser = _Parser(text)
    config = parser.configuration()
    mistakes = sorted(parser.mistakes, key=lambda mistake: (mistake.line, mistake.column))
    doubtful = None if parser.doubtful is None else frozenset(parser.doubtful)
    source = ConfigSource(file, parser.positions)
    client_message = f"failed to read text proto from {file}"
    placed = [
        dataclasses.replace(mistake, error=Internal, client_message=client_message)
        for mistake in source.place(mistakes)
    ]
    return Parsed(config, source, tuple(placed), doubtful)


@dataclass(slots=True)
class _Draft:
    """A message that is being read."""

    schema: MessageSchema
    path: FieldPath = ()
    values: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, TextToken] = field(default_factory=dict)
    """The name of each field that was read, where it stands first."""


class _Parser(Cursor):
    """Recursive descent parser of messages. Values that are not allowed are reported and left out."""

    def configuration(self) -> ModelConfig:
        """Read the top-level fields, up to the end of the text."""
        draft = _Draft(_ROOT)
        self.open.append("")
        while self.here.kind != "end":
            try:
                self._read_part(draft)
            except Astray:
                self.resume(_ROOT.fields)
        config: ModelConfig = _ROOT.make(draft.values)
        return config

    def _read_message(self, schema: MessageSchema, path: FieldPath, opener: TextToken) -> dict[str, Any]:
        """Return the fields of a message, up to and including the bracket that closes ``opener``."""
        draft = _Draft(schema, path)
        closer = OPENERS[opener.text]
        self.open.append(closer)
        line, column = opener.position
        remedy = f"Write {closer} before this: what begins in line {line}, column {column} is still open."
        while not self.took(closer):
            token = self.here
            if token.text not in schema.fields and self.at_outer_field(_ROOT.fields):
                message = f'Message type "{schema.full_name}" has no field named "{token.text}".'
            elif token.kind == "end" or (self.at(*CLOSERS) and token.text in self.open):
                message = f"Expected identifier, got: {token.text}"
            else:
                self._read_part(draft)
                continue
            self.report(message, token, path, remedy)
            raise Astray
        self.open.pop()
        return draft.values

    def _read_part(self, draft: _Draft) -> None:
        """Read one field of a message, or report and skip what is not a field. Raises ``Astray``."""
        if self.recovering and not self.at_field() and self.here.kind != "placeholder":
            raise Astray
        if self.here.kind == "identifier" or (self.here.kind == "string" and self._at_quoted_name()):
            self._read_field(draft)
            _ = self.took(",") or self.took(";")
        else:
            self._step_over(draft)

    def _at_quoted_name(self) -> bool:
        return self.ahead.kind == "symbol" and self.ahead.text in ":{" and self.here.value.isidentifier()

    def _step_over(self, draft: _Draft) -> None:
        """Report a token that cannot begin a field, and move to where a field may begin."""
        token, path = self.here, draft.path
        message = f"Expected identifier, got: {token.text}"
        if token.text in ("/", "//", "*") and token.kind == "symbol":
            self.report(message, token, path, "A comment begins with #.", doubt="")
            if token.text == "/" and self.ahead.text == "*":
                self.skip_comment()
            else:
                self.skip_line(token.position.line)
        elif self.at("{") and not path and self.positions.keys() == {()}:
            remedy = "This looks like JSON. Leave out the outer braces and write fields as in: max_batch_size: 8"
            self.report(message, token, path, remedy)
            self.skip_all()
        elif self.at(",", ";"):
            self.report(message, token, path, f"Remove this '{token.text}'.", doubt="")
            self.take()
        elif self.at("["):
            self._step_over_extension(draft)
        else:
            what = f"Remove this '{token.text}': it closes nothing." if self.at(*CLOSERS) else _A_FIELD
            self.report(message, token, path, what)
            self.take()
            if token.kind != "placeholder":
                raise Astray
            # The template may fill in a field, or the name of one.
            if self.took(":") or self.at(*OPENERS):
                self.skip_value()

    def _step_over_extension(self, draft: _Draft) -> None:
        token = self.take()
        name = ""
        while self.here.kind != "end" and not self.at("]", "{", "}"):
            name += self.take().text
        self.took("]")
        message = f'Extension "{name}" is not defined or is not an extension of "{draft.schema.full_name}".'
        self.report(message, token, draft.path, "Remove it: a configuration has no extensions.", doubt="")
        self.took(":")
        self.skip_value()

    def _read_field(self, draft: _Draft) -> None:
        """Read one field into ``draft``. If it is not allowed there, report and skip it."""
        token = self.take()
        name = token.value if token.kind == "string" else token.text
        if token.kind == "string":
            message = f"Expected identifier, got: {token.text}"
            self.report(message, token, draft.path, f"Write the name of a field without quotes: {name}.", doubt="")
        declared = draft.schema.fields.get(name)
        if declared is None:
            self._refuse_unknown(draft, token, name)
            return
        where = (*draft.path, name)
        self.positions.setdefault(where, token.position)
        if self._is_second(declared, where, token, draft.seen):
            self._read_value(declared, where, {}, token)
        else:
            draft.seen[name] = token
            self._read_value(declared, where, draft.values, token)

    def _refuse_unknown(self, draft: _Draft, token: TextToken, name: str) -> None:
        schema, path = draft.schema, draft.path
        # Finding suggestions takes time, and the list of fields is long: it is reported once.
        meant, remedy = ("", _LISTED) if self.has_many else field_remedy(name, schema)
        if remedy == (listing := fields_of(schema)):
            remedy = _LISTED if listing in self.listed else listing
            self.listed.add(listing)
        if not meant and schema.is_entry:
            value = "{ … }" if schema.fields["value"].kind == "message" else "…"
            remedy = f'An entry of {path[-2]} is written: {path[-2]} {{ key: "{name}" value: {value} }}'
        message = f'Message type "{schema.full_name}" has no field named "{name}".'
        self.report(message, token, (*path, name), remedy, doubt=None if path else meant)
        if not (self.took(":") or self.took("=") or self.at(*OPENERS)):
            raise Astray
        self.skip_value()

    def _is_second(
        self, declared: FieldSchema, where: FieldPath, token: TextToken, seen: Mapping[str, TextToken]
    ) -> bool:
        """Return True, after reporting it, if ``declared`` or another member of its oneof was given before."""
        if declared.many:
            return False
        if (first := seen.get(declared.name)) is not None:
            message = f'Non-repeated field "{declared.name}" is specified multiple times.'
            remedy = f"It is given in line {first.position.line} already: keep one of them."
            self.report(message, token, where, remedy)
            return True
        rival = next((rival for rival in declared.rivals if rival in seen), "")
        if rival:
            message = (
                f'Field "{declared.name}" is specified along with field "{rival}", '
                f'another member of oneof "{declared.oneof}".'
            )
            remedy = f"'{rival}' is given in line {seen[rival].position.line}: keep one of the two."
            self.report(message, token, where, remedy)
        return bool(rival)

    def _read_value(self, declared: FieldSchema, where: FieldPath, values: dict[str, Any], name: TextToken) -> None:
        """Read the value behind the name of a field into ``values``."""
        if declared.composite:
            self.took(":")
        elif not self._take_colon(declared, where):
            return
        if declared.many and self.at("["):
            self._read_list(declared, where, values)
        else:
            self._read_element(declared, where, values, name if declared.composite else self.here)

    def _take_colon(self, declared: FieldSchema, where: FieldPath) -> bool:
        """Take the colon of a scalar field, or report that it is missing; return False if no value can follow."""
        if self.took(":"):
            return True
        token = self.here
        if self.at("{", "<"):
            remedy = f"'{declared.name}' is a plain value: write {declared.name}: …, without braces."
        else:
            remedy = f"Write a colon: {declared.name}: …"
        self.report(f'Expected ":", found "{token.text}".', token, where, remedy)
        if self.at("{", "<"):
            self.skip_value()
            return False
        return self.took("=") or not (self.at(*CLOSERS) or self.at_field() or token.kind == "end")

    def _read_list(self, declared: FieldSchema, where: FieldPath, values: dict[str, Any]) -> None:
        """Read the elements of a list in brackets."""
        opener = self.take()
        if self.took("]"):
            values.setdefault(declared.name, {} if declared.key is not None else [])
            return
        self.open.append("]")
        while self._read_element_of_list(declared, where, values, opener):
            pass
        self.open.pop()

    def _read_element_of_list(
        self, declared: FieldSchema, where: FieldPath, values: dict[str, Any], opener: TextToken
    ) -> bool:
        """Read an element and the comma or bracket after it; return True if another element follows."""
        self._read_element(declared, where, values, self.here)
        if self.took("]"):
            return False
        token = self.here
        if self.recovering and not self.at(","):
            raise Astray
        if self.took(","):
            if not self.at("]"):
                return True
            message = 'Expected "{", found "]".' if declared.composite else expected(declared, "]")
            self.report(message, self.here, where, 'Remove the comma before this "]".', doubt="")
            self.take()
            return False
        message = f'Expected ",", found "{token.text}".'
        if self.at("{", "<", "-") or (token.kind in _VALUES and not self.at_field()):
            doubt = None if self.at("-") else ""
            self.report(message, token, where, "Write a comma between the elements of a list.", doubt=doubt)
            return True
        remedy = f"Write ] where the list that begins in line {opener.position.line} is to end."
        self.report(message, token, where, remedy)
        raise Astray

    def _read_element(self, declared: FieldSchema, where: FieldPath, values: dict[str, Any], start: TextToken) -> None:
        """Read one value, one element of a list, or one entry of a map; ``start`` is the token of its position."""
        if declared.key is not None:
            self._read_entry(declared, where, values.setdefault(declared.name, {}), start)
            return
        if declared.repeated:
            elements = values.setdefault(declared.name, [])
            value = self._read_one(declared, (*where, len(elements)), start)
            if value is not None:
                elements.append(value)
        elif (value := self._read_one(declared, where, start)) is not None:
            values[declared.name] = value

    def _read_one(self, declared: FieldSchema, path: FieldPath, start: TextToken) -> Any:
        """Return one value; ``None``, after reporting it, if there is none."""
        if declared.kind != "message":
            return read_scalar(self, declared, path)
        fields = self._read_braces(declared, declared.message, path, start)
        return None if fields is None else declared.message.make(fields)

    def _read_entry(self, declared: FieldSchema, where: FieldPath, entries: dict[Any, Any], start: TextToken) -> None:
        """Read an entry of a map, which is a message with a key and a value. The last entry with a key wins."""
        schema = declared.entry
        draft = (*where, len(entries))
        known = len(self.positions)
        fields = self._read_braces(declared, schema, draft, start)
        if fields is None:
            return
        key = fields.get("key", schema.fields["key"].default)
        entries[key] = fields["value"] if "value" in fields else _empty(schema.fields["value"])
        # The key was unknown while the entry was read. Move the positions to the paths with the key.
        for path in list(self.positions)[known:]:
            position = self.positions.pop(path)
            rest = path[len(draft) :]
            if rest[:1] == ("value",):
                self.positions.setdefault((*where, key, *rest[1:]), position)
            else:
                self.positions[(*where, key)] = position

    def _read_braces(
        self, declared: FieldSchema, schema: MessageSchema, path: FieldPath, start: TextToken
    ) -> dict[str, Any] | None:
        """Return the fields of a message in braces; ``None``, after reporting it, if none begins here."""
        opener = self.here
        if not self.at("{", "<"):
            remedy = self._braces_remedy(declared, schema)
            self.report(f'Expected "{{", found "{opener.text}".', opener, path, remedy)
            self.skip_value()
            return None
        self.take()
        self.positions[path] = start.position
        return self._read_message(schema, path, opener)

    def _braces_remedy(self, declared: FieldSchema, schema: MessageSchema) -> str:
        token, name = self.here, declared.name
        if self.at("["):
            return f"'{name}' is not a list: remove the brackets."
        if declared.key is not None:
            value = "{ … }" if declared.kind == "message" else '"…"'
            return f'Write {name} {{ key: "…" value: {value} }}.'
        if token.kind == "symbol" or token.kind == "end" or self.at_field():
            return f"Write {name} {{ … }}."
        if token.text.lower() in ("false", "f", "0"):
            return f"Remove '{name}' to have none, or write {name} {{ … }}."
        fields = list(schema.fields.values())
        if len(fields) == 1 and fields[0].kind != "message":
            return f"Write {name} {{ {fields[0].name}: {token.text} }}."
        return f"Write {name} {{ }}, with what is to be set inside of the braces."


def _empty(declared: FieldSchema) -> Any:
    """Return the value of an entry of a map that has none."""
    return declared.message.make({}) if declared.kind == "message" else declared.default


# Prints a configuration in its text form (config.pbtxt), and edits single fields of an existing text.
#
# Parsing the printed text returns the same configuration. protobuf's own printer is not used: this one writes lists
# and numbers as people do in config.pbtxt.

_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def to_text(config: ModelConfig) -> str:
    """Return ``config`` as the text of a config.pbtxt. Default values are left out."""
    return "".join(f"{line}\n" for line in _message(schema_of(), config))


def _message(schema: MessageSchema, message: Any) -> Iterator[str]:
    for declared in schema.fields.values():
        value = getattr(message, declared.attribute)
        if value != declared.default:
            yield from _field(declared, value)


def _field(declared: FieldSchema, value: Any) -> Iterator[str]:
    name = declared.name
    if declared.key is not None:
        entry = declared.entry
        for key, item in value.items():
            inner = [*_field(entry.fields["key"], key), *_field(entry.fields["value"], item)]
            yield from _braces(f"{name} {{", inner, "}")
    elif declared.kind == "message":
        if not declared.repeated:
            yield from _braces(f"{name} {{", _message(declared.message, value), "}")
        elif value:
            inner = []
            for index, item in enumerate(value):
                closer = "}" if index == len(value) - 1 else "},"
                inner += _braces("{", _message(declared.message, item), closer)
            yield from _braces(f"{name} [", inner, "]")
    elif declared.repeated:
        yield f"{name}: [ {', '.join(_scalar(declared, item) for item in value)} ]"
    else:
        yield f"{name}: {_scalar(declared, value)}"


def _braces(opener: str, inner: Iterable[str], closer: str) -> Iterator[str]:
    lines = list(inner)
    if not lines:
        yield f"{opener} {closer}"
        return
    yield opener
    for line in lines:
        yield f"  {line}"
    yield closer


def _scalar(declared: FieldSchema, value: Any) -> str:
    if declared.kind == "string":
        return '"' + "".join(_character(character) for character in value) + '"'
    if declared.kind == "bool":
        return "true" if value else "false"
    if declared.kind in ("float", "double"):
        return show_float(value, declared.kind)
    return str(value)


def _character(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    return character if character >= " " and character != "\x7f" else f"\\{ord(character):03o}"


def edited(text: str, old: ModelConfig, new: ModelConfig) -> str:
    """Return ``text``, the text of ``old`` without mistakes, changed to that of ``new``.

    A changed field keeps its place, a new one is appended. The rest, including comments, is kept as it is.
    """
    spans = list(_spans(text))
    cuts: list[tuple[int, int, str]] = []
    added = ""
    for each in dataclasses.fields(ModelConfig):
        value = getattr(new, each.name)
        if value == getattr(old, each.name):
            continue
        printed = to_text(dataclasses.replace(ModelConfig(), **{each.name: value}))
        places = [(start, end) for name, start, end in spans if name == each.name]
        if not places:
            added += f"\n{printed}" if printed else ""
        for number, (start, end) in enumerate(places):
            written = "" if number else printed.rstrip("\n")
            # A line that becomes empty is removed.
            whole = not written and text[end : end + 1] == "\n" and text[:start][-1:] in ("", "\n")
            cuts.append((start, end + whole, written))
    for start, end, written in sorted(cuts, reverse=True):
        text = text[:start] + written + text[end:]
    if added and text and not text.endswith("\n"):
        text += "\n"
    return text + (added if text else added.removeprefix("\n"))


def _spans(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of each top-level field."""
    starts = [0]
    starts += [place + 1 for place, character in enumerate(text) if character == "\n"]

    def offset(token: TextToken) -> int:
        return starts[token.position.line - 1] + token.position.column - 1

    depth, name, start, end = 0, "", 0, 0
    previous = ""
    for token in Tokenizer(text).tokens:
        if depth == 0 and token.kind in ("identifier", "end") and previous != ":":
            if name:
                yield name, start, end
            name, start = token.text, offset(token)
        if token.kind == "symbol":
            depth += (token.text in OPENERS) - (token.text in CLOSERS)
        previous = token.text
        end = offset(token) + len(token.text)
