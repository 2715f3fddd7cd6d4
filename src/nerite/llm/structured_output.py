"""Structured output: reads the grammar that an answer must match, under vLLM's names, and validates it. Pure.

JSON schemas are rejected if they use features that engines are known to ignore silently: an answer that does not match
its schema is worse than a rejected request. EBNF grammars are checked for rules that never terminate, and for engines
that compile without limits the size of an expanded grammar is bounded.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nerite.config.mistake import nearest
from nerite.core.byte_budget import GRAMMARS, Memo
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.llm.expressions import EBNF_TOKEN, MAX_PARTS, REGEX_TOKEN, endless_rule, expanded_size
from nerite.llm.json_schema import check_schema, schema_size

JSON_SCHEMA: Final = "json_schema"
REGEX: Final = "regex"
EBNF: Final = "ebnf"

_LONGEST: Final = 256 * 1024
"""Maximum number of characters of a grammar, which bounds the work of its compiler."""
_ANY_OBJECT: Final = {"type": "object", "additionalProperties": True}

_KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")
_OPTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "backend": (None, "auto", "xgrammar"),
    "disable_additional_properties": (None, False),
    "disable_any_whitespace": (None, False),
    "disable_fallback": (None, False, True),
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
}
"""vLLM's further options, with the values that have no effect here and are accepted."""


@dataclass(frozen=True)
class Grammar:
    """Grammar that generated text must match."""

    kind: str
    """``json_schema``, ``regex`` or ``ebnf``."""
    source: str

    def tokens(self) -> Iterator[re.Match[str]]:
        """Return the tokens of a regular expression or an EBNF grammar."""
        return (EBNF_TOKEN if self.kind == EBNF else REGEX_TOKEN).finditer(self.source)

    def digest(self, *more: object) -> bytes:
        """Return a short key for the grammar and ``more`` values, because grammars are long."""
        return hashlib.sha256(repr((self.kind, self.source, *more)).encode()).digest()


_valid: Final[Memo[bytes, None]] = Memo()
"""Digests of grammars that were found valid."""


def read_structured(name: str, value: Any) -> Grammar | None:
    """Read the value of the sampling parameter ``name``; None if it has no effect. Raises ``NeriteError``."""
    if isinstance(value, str):  # the form of Triton's vLLM backend
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"'{name}' is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f'\'{name}\' must be an object, such as {{"regex": "[0-9]+"}}, got {reprlib.repr(value)}')
    wanted = {kind: value[kind] for kind in _KINDS if value.get(kind) is not None and value[kind] is not False}
    _check_options(name, value)
    if len(wanted) > 1:
        raise InvalidArgument(f"'{name}' has {' and '.join(wanted)}: an answer has one form, choose one")
    for kind, given in wanted.items():
        grammar = _grammar(f"{name}.{kind}", kind, given)
        if len(grammar.source) > _LONGEST:
            raise InvalidArgument(f"'{name}.{kind}' has {len(grammar.source)} characters; the maximum is {_LONGEST}")
        _validate(f"{name}.{kind}", grammar)
        return grammar
    return None


def _check_options(name: str, value: Mapping[str, Any]) -> None:
    for key, option in value.items():
        if key in _KINDS or option in _OPTIONS.get(key, ()):
            continue
        if key in _OPTIONS:
            raise Unsupported(f"'{name}.{key}' is not supported: remove it")
        meant = nearest(key, (*_KINDS, *_OPTIONS))
        raise InvalidArgument(
            f"'{name}' has '{key}', which is not a form of answer. "
            + (f"Did you mean {meant}?" if meant else f"There are: {', '.join(_KINDS)}.")
        )


def _grammar(name: str, kind: str, given: Any) -> Grammar:
    if kind == "json_object":
        if given is not True:
            raise InvalidArgument(f"'{name}' must be true or false, got {reprlib.repr(given)}")
        return Grammar(JSON_SCHEMA, json.dumps(_ANY_OBJECT))
    if kind == "json":
        try:
            return Grammar(JSON_SCHEMA, json.dumps(_schema(name, given)))
        except RecursionError:
            raise InvalidArgument(f"'{name}' is nested too deeply") from None
    if kind == "choice":
        return Grammar(EBNF, _choice(name, given))
    if not isinstance(given, str):
        raise InvalidArgument(f"'{name}' must be text, got {reprlib.repr(given)}")
    return Grammar(REGEX if kind == "regex" else EBNF, given)


def _choice(name: str, given: Any) -> str:
    if not isinstance(given, list) or not given or not all(isinstance(each, str) and each for each in given):
        raise InvalidArgument(f"'{name}' must be a list of non-empty strings, got {reprlib.repr(given)}")
    return "root ::= " + " | ".join(json.dumps(each, ensure_ascii=False) for each in given)


def _schema(name: str, given: Any) -> Any:
    """Return a schema as an object. Raises ``InvalidArgument`` if it is not one."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"'{name}' is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise InvalidArgument(f"'{name}' must be a JSON schema, which is an object, got {reprlib.repr(given)}")
    return given


def _validate(name: str, grammar: Grammar) -> None:
    """Raise ``NeriteError`` if no text can match, or no grammar can express it. Memoizes valid grammars."""
    key = grammar.digest(name)
    if key in _valid:
        return
    if grammar.kind == EBNF:
        if rule := endless_rule(grammar.source):
            raise InvalidArgument(f"'{name}' has the rule '{rule}', whose text never ends")
    elif grammar.kind == JSON_SCHEMA:
        check_schema(name, json.loads(grammar.source))
    GRAMMARS.put(_valid, key, None, len(key))


def check_repetitions(name: str, grammar: Grammar) -> None:
    """Raise ``InvalidArgument`` for a grammar that is too large with its repetitions expanded.

    Needed for the engine ``name`` only if it compiles grammars without limits of time and memory.
    """
    is_schema = grammar.kind == JSON_SCHEMA
    parts = schema_size(json.loads(grammar.source)) if is_schema else expanded_size(grammar.tokens())
    if parts > MAX_PARTS:
        raise InvalidArgument(
            f"structured output ({grammar.kind}): with its repetitions expanded it has more than {MAX_PARTS} parts, "
            f"which {name} would take too long to compile: use fewer repetitions"
        )
