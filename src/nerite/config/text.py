"""Parser of the text form of a configuration (config.pbtxt), which finds every mistake instead of only the first.

The grammar is protobuf's text format. The texts of the mistakes are those of protobuf's own parser, so that a search
for them finds existing answers. Unlike that parser this one continues after a mistake, and points at the wrong token
instead of behind it. If it cannot know how the text continues, it resumes at the next top-level field, so that one
mistake does not cause others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from nerite.config.mistake import ConfigSource, FieldPath, Mistake
from nerite.config.model_config import ModelConfig
from nerite.config.scalars import expected, read_scalar
from nerite.config.scanner import CLOSERS, OPENERS, Astray, Cursor, TextToken
from nerite.config.schema import FieldSchema, MessageSchema, field_remedy, fields_of, schema_of
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
    cursor = Cursor(text)
    values = _read_configuration(cursor)
    mistakes = sorted(cursor.mistakes, key=lambda mistake: (mistake.line, mistake.column))
    doubtful = None if cursor.doubtful is None else frozenset(cursor.doubtful)
    source = ConfigSource(file, cursor.positions)
    client_message = f"failed to read text proto from {file}"
    placed = [
        dataclasses.replace(mistake, error=Internal, client_message=client_message)
        for mistake in source.place(mistakes)
    ]
    return Parsed(_ROOT.make(values), source, tuple(placed), doubtful)


def _read_configuration(cursor: Cursor) -> dict[str, Any]:
    """Read the top-level fields, up to the end of the text."""
    values: dict[str, Any] = {}
    seen: dict[str, TextToken] = {}
    cursor.open.append("")
    while cursor.here.kind != "end":
        try:
            _read_part(cursor, _ROOT, (), values, seen)
        except Astray:
            cursor.resume(_ROOT.fields)
    return values


def _read_message(cursor: Cursor, schema: MessageSchema, path: FieldPath, opener: TextToken) -> dict[str, Any]:
    """Read the fields of a message up to and including the bracket that closes ``opener``."""
    values: dict[str, Any] = {}
    seen: dict[str, TextToken] = {}
    closer = OPENERS[opener.text]
    cursor.open.append(closer)
    line, column = opener.position
    remedy = f"Write {closer} before this: what begins in line {line}, column {column} is still open."
    while not cursor.took(closer):
        token = cursor.here
        if token.text not in schema.fields and cursor.at_outer_field(_ROOT.fields):
            message = f'Message type "{schema.full_name}" has no field named "{token.text}".'
        elif token.kind == "end" or (cursor.at(*CLOSERS) and token.text in cursor.open):
            message = f"Expected identifier, got: {token.text}"
        else:
            _read_part(cursor, schema, path, values, seen)
            continue
        cursor.report(message, token, path, remedy)
        raise Astray
    cursor.open.pop()
    return values


def _read_part(
    cursor: Cursor, schema: MessageSchema, path: FieldPath, values: dict[str, Any], seen: dict[str, TextToken]
) -> None:
    """Read one field of a message, or report and skip what is not a field. Raises ``Astray``."""
    if cursor.recovering and not cursor.at_field() and cursor.here.kind != "placeholder":
        raise Astray
    if cursor.here.kind == "identifier" or (cursor.here.kind == "string" and _quoted_name(cursor)):
        _read_field(cursor, schema, path, values, seen)
        _ = cursor.took(",") or cursor.took(";")
    else:
        _step_over(cursor, schema, path)


def _quoted_name(cursor: Cursor) -> bool:
    return cursor.ahead.kind == "symbol" and cursor.ahead.text in ":{" and cursor.here.value.isidentifier()


def _step_over(cursor: Cursor, schema: MessageSchema, path: FieldPath) -> None:
    """Report a token that cannot begin a field, and move to where a field may begin."""
    token = cursor.here
    message = f"Expected identifier, got: {token.text}"
    if token.text in ("/", "//", "*") and token.kind == "symbol":
        cursor.report(message, token, path, "A comment begins with #.", doubt="")
        if token.text == "/" and cursor.ahead.text == "*":
            cursor.skip_comment()
        else:
            cursor.skip_line(token.position.line)
    elif cursor.at("{") and not path and cursor.positions.keys() == {()}:
        remedy = "This looks like JSON. Leave out the outer braces and write fields as in: max_batch_size: 8"
        cursor.report(message, token, path, remedy)
        cursor.skip_all()
    elif cursor.at(",", ";"):
        cursor.report(message, token, path, f"Remove this '{token.text}'.", doubt="")
        cursor.take()
    elif cursor.at("["):
        _step_over_extension(cursor, schema, path)
    else:
        what = f"Remove this '{token.text}': it closes nothing." if cursor.at(*CLOSERS) else _A_FIELD
        cursor.report(message, token, path, what)
        cursor.take()
        if token.kind != "placeholder":
            raise Astray
        # The template may fill in a field, or the name of one.
        if cursor.took(":") or cursor.at(*OPENERS):
            cursor.skip_value()


def _step_over_extension(cursor: Cursor, schema: MessageSchema, path: FieldPath) -> None:
    token = cursor.take()
    name = ""
    while cursor.here.kind != "end" and not cursor.at("]", "{", "}"):
        name += cursor.take().text
    cursor.took("]")
    message = f'Extension "{name}" is not defined or is not an extension of "{schema.full_name}".'
    cursor.report(message, token, path, "Remove it: a configuration has no extensions.", doubt="")
    cursor.took(":")
    cursor.skip_value()


def _read_field(
    cursor: Cursor, schema: MessageSchema, path: FieldPath, values: dict[str, Any], seen: dict[str, TextToken]
) -> None:
    """Read one field into ``values``. ``seen`` contains the fields of the message that were read before."""
    token = cursor.take()
    name = token.value if token.kind == "string" else token.text
    if token.kind == "string":
        message = f"Expected identifier, got: {token.text}"
        cursor.report(message, token, path, f"Write the name of a field without quotes: {name}.", doubt="")
    declared = schema.fields.get(name)
    if declared is None:
        _refuse_unknown(cursor, schema, path, token, name)
        return
    where = (*path, name)
    cursor.positions.setdefault(where, token.position)
    if _is_second(cursor, declared, where, token, seen):
        _read_value(cursor, declared, where, {}, token)
    else:
        seen[name] = token
        _read_value(cursor, declared, where, values, token)


def _refuse_unknown(cursor: Cursor, schema: MessageSchema, path: FieldPath, token: TextToken, name: str) -> None:
    # Finding suggestions takes time, and the list of fields is long: it is reported once.
    meant, remedy = ("", _LISTED) if cursor.has_many else field_remedy(name, schema)
    if remedy == (listing := fields_of(schema)):
        remedy = _LISTED if listing in cursor.listed else listing
        cursor.listed.add(listing)
    if not meant and schema.is_entry:
        value = "{ … }" if schema.fields["value"].kind == "message" else "…"
        remedy = f'An entry of {path[-2]} is written: {path[-2]} {{ key: "{name}" value: {value} }}'
    message = f'Message type "{schema.full_name}" has no field named "{name}".'
    cursor.report(message, token, (*path, name), remedy, doubt=None if path else meant)
    if not (cursor.took(":") or cursor.took("=") or cursor.at(*OPENERS)):
        raise Astray
    cursor.skip_value()


def _is_second(
    cursor: Cursor, declared: FieldSchema, where: FieldPath, token: TextToken, seen: dict[str, TextToken]
) -> bool:
    """Return True, after reporting it, if ``declared`` or another member of its oneof was given before."""
    if declared.many:
        return False
    if (first := seen.get(declared.name)) is not None:
        message = f'Non-repeated field "{declared.name}" is specified multiple times.'
        remedy = f"It is given in line {first.position.line} already: keep one of them."
        cursor.report(message, token, where, remedy)
        return True
    rival = next((rival for rival in declared.rivals if rival in seen), "")
    if rival:
        message = (
            f'Field "{declared.name}" is specified along with field "{rival}", '
            f'another member of oneof "{declared.oneof}".'
        )
        remedy = f"'{rival}' is given in line {seen[rival].position.line}: keep one of the two."
        cursor.report(message, token, where, remedy)
    return bool(rival)


def _read_value(
    cursor: Cursor, declared: FieldSchema, where: FieldPath, values: dict[str, Any], name: TextToken
) -> None:
    """Read the value behind the name of a field into ``values``."""
    if declared.composite:
        cursor.took(":")
    elif not _take_colon(cursor, declared, where):
        return
    if declared.many and cursor.at("["):
        _read_list(cursor, declared, where, values)
    else:
        _read_element(cursor, declared, where, values, name if declared.composite else cursor.here)


def _take_colon(cursor: Cursor, declared: FieldSchema, where: FieldPath) -> bool:
    """Take the colon of a scalar field, or report that it is missing; return False if no value can follow."""
    if cursor.took(":"):
        return True
    token = cursor.here
    if cursor.at("{", "<"):
        remedy = f"'{declared.name}' is a plain value: write {declared.name}: …, without braces."
    else:
        remedy = f"Write a colon: {declared.name}: …"
    cursor.report(f'Expected ":", found "{token.text}".', token, where, remedy)
    if cursor.at("{", "<"):
        cursor.skip_value()
        return False
    return cursor.took("=") or not (cursor.at(*CLOSERS) or cursor.at_field() or token.kind == "end")


def _read_list(cursor: Cursor, declared: FieldSchema, where: FieldPath, values: dict[str, Any]) -> None:
    """Read the elements of a list in brackets."""
    opener = cursor.take()
    if cursor.took("]"):
        values.setdefault(declared.name, {} if declared.key is not None else [])
        return
    cursor.open.append("]")
    while _read_element_of_list(cursor, declared, where, values, opener):
        pass
    cursor.open.pop()


def _read_element_of_list(
    cursor: Cursor, declared: FieldSchema, where: FieldPath, values: dict[str, Any], opener: TextToken
) -> bool:
    """Read an element and the comma or bracket after it; return True if another element follows."""
    _read_element(cursor, declared, where, values, cursor.here)
    if cursor.took("]"):
        return False
    token = cursor.here
    if cursor.recovering and not cursor.at(","):
        raise Astray
    if cursor.took(","):
        if not cursor.at("]"):
            return True
        message = 'Expected "{", found "]".' if declared.composite else expected(declared, "]")
        cursor.report(message, cursor.here, where, 'Remove the comma before this "]".', doubt="")
        cursor.take()
        return False
    message = f'Expected ",", found "{token.text}".'
    if cursor.at("{", "<", "-") or (token.kind in _VALUES and not cursor.at_field()):
        doubt = None if cursor.at("-") else ""
        cursor.report(message, token, where, "Write a comma between the elements of a list.", doubt=doubt)
        return True
    remedy = f"Write ] where the list that begins in line {opener.position.line} is to end."
    cursor.report(message, token, where, remedy)
    raise Astray


def _read_element(
    cursor: Cursor, declared: FieldSchema, where: FieldPath, values: dict[str, Any], start: TextToken
) -> None:
    """Read one value, one element of a list, or one entry of a map; ``start`` is the token of its position."""
    if declared.key is not None:
        _read_entry(cursor, declared, where, values.setdefault(declared.name, {}), start)
        return
    if declared.repeated:
        elements = values.setdefault(declared.name, [])
        value = _read_one(cursor, declared, (*where, len(elements)), start)
        if value is not None:
            elements.append(value)
    elif (value := _read_one(cursor, declared, where, start)) is not None:
        values[declared.name] = value


def _read_one(cursor: Cursor, declared: FieldSchema, path: FieldPath, start: TextToken) -> Any:
    """Return one value; ``None``, after reporting it, if there is none."""
    if declared.kind != "message":
        return read_scalar(cursor, declared, path)
    fields = _read_braces(cursor, declared, declared.message, path, start)
    return None if fields is None else declared.message.make(fields)


def _read_entry(
    cursor: Cursor, declared: FieldSchema, where: FieldPath, entries: dict[Any, Any], start: TextToken
) -> None:
    """Read an entry of a map, which is a message with a key and a value. The last entry with a key wins."""
    schema = declared.entry
    draft = (*where, len(entries))
    known = len(cursor.positions)
    fields = _read_braces(cursor, declared, schema, draft, start)
    if fields is None:
        return
    key = fields.get("key", schema.fields["key"].default)
    entries[key] = fields["value"] if "value" in fields else _empty(schema.fields["value"])
    # The key was unknown while the entry was read. Move the positions to the paths with the key.
    for path in list(cursor.positions)[known:]:
        position = cursor.positions.pop(path)
        rest = path[len(draft) :]
        if rest[:1] == ("value",):
            cursor.positions.setdefault((*where, key, *rest[1:]), position)
        else:
            cursor.positions[(*where, key)] = position


def _empty(declared: FieldSchema) -> Any:
    """Return the value of an entry of a map that has none."""
    return declared.message.make({}) if declared.kind == "message" else declared.default


def _read_braces(
    cursor: Cursor, declared: FieldSchema, schema: MessageSchema, path: FieldPath, start: TextToken
) -> dict[str, Any] | None:
    """Return the fields of a message in braces; ``None``, after reporting it, if none begins here."""
    opener = cursor.here
    if not cursor.at("{", "<"):
        remedy = _braces_remedy(cursor, declared, schema)
        cursor.report(f'Expected "{{", found "{opener.text}".', opener, path, remedy)
        cursor.skip_value()
        return None
    cursor.take()
    cursor.positions[path] = start.position
    return _read_message(cursor, schema, path, opener)


def _braces_remedy(cursor: Cursor, declared: FieldSchema, schema: MessageSchema) -> str:
    token, name = cursor.here, declared.name
    if cursor.at("["):
        return f"'{name}' is not a list: remove the brackets."
    if declared.key is not None:
        value = "{ … }" if declared.kind == "message" else '"…"'
        return f'Write {name} {{ key: "…" value: {value} }}.'
    if token.kind == "symbol" or token.kind == "end" or cursor.at_field():
        return f"Write {name} {{ … }}."
    if token.text.lower() in ("false", "f", "0"):
        return f"Remove '{name}' to have none, or write {name} {{ … }}."
    fields = list(schema.fields.values())
    if len(fields) == 1 and fields[0].kind != "message":
        return f"Write {name} {{ {fields[0].name}: {token.text} }}."
    return f"Write {name} {{ }}, with what is to be set inside of the braces."
