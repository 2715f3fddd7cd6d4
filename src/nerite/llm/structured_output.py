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
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nerite.config.mistake import nearest
from nerite.core.byte_budget import GRAMMARS, Memo
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.llm import json_schema
from nerite.llm.json_schema import impossible_schema

# Termination of the rules of an EBNF grammar in llama.cpp's notation. Engines compile a rule that cannot terminate, and
# generate arbitrary text once they are in it. If all rules can terminate, every prefix can be completed.

_TOKEN: Final = re.compile(
    r"""\s+|\#[^\n]*
    |(?P<defined>[A-Za-z_][A-Za-z0-9_.-]*)\s*::=
    |(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\])*\])
    |(?P<open>\()(?P<ahead>=)?|(?P<close>\))|(?P<bar>\|)
    |(?P<optional>[*?]|\{\s*0\s*(?:,[\s\d]*)?\})
    |\+|\{[\s\d,]+\}""",
    re.VERBOSE | re.DOTALL,
)

_Rule = str | int
"""Name of a rule, or number of a parenthesized group."""
_Needs = list[_Rule]
"""Sequence of rules that make up one alternative of a rule."""


def endless_rule(source: str) -> str:
    """Return the first rule that never terminates; empty if all terminate or the grammar cannot be parsed."""
    rules = _rules(source)
    terminating = _terminating(rules)
    return next((name for name in rules if isinstance(name, str) and name not in terminating), "")


def _rules(source: str) -> dict[_Rule, list[_Needs]]:
    """Return the alternatives of each rule; empty if any part cannot be parsed."""
    rules: dict[_Rule, list[_Needs]] = {}
    within: list[_Rule] = []
    """The current rule and its open groups."""
    at = 0
    while at < len(source):
        token = _TOKEN.match(source, at)
        if token is None:
            return {}
        at = token.end()
        if token["defined"]:
            within = [token["defined"]]
            rules[within[0]] = [[]]
        elif token["close"] and len(within) > 1:
            within.pop()
        elif token.lastgroup is not None and not within:
            return {}
        elif token["name"]:
            rules[within[-1]][-1].append(token["name"])
        elif token["open"]:
            group = len(rules)
            if token["ahead"]:  # a lookahead, which consumes nothing
                rules[group] = [[], []]
            else:
                rules[group] = [[]]
            rules[within[-1]][-1].append(group)
            within.append(group)
        elif token["bar"]:
            rules[within[-1]].append([])
        elif token["text"]:
            rules[within[-1]][-1].append("")
        elif token["optional"] and rules[within[-1]][-1]:
            rules[within[-1]][-1].pop()
    return rules


def _terminating(rules: dict[_Rule, list[_Needs]]) -> set[_Rule]:
    """Return the rules that can terminate: those with an alternative of only literals and terminating rules."""
    users: dict[_Rule, list[tuple[_Rule, set[_Rule]]]] = defaultdict(list)
    new: list[_Rule] = []
    for rule, alternatives in rules.items():
        for needs in alternatives:
            # Undefined rules are reported by the compiler.
            open_needs = {each for each in needs if each in rules}
            for each in open_needs:
                users[each].append((rule, open_needs))
            if not open_needs:
                new.append(rule)
    ending: set[_Rule] = set()
    while new:
        rule = new.pop()
        if rule in ending:
            continue
        ending.add(rule)
        for user, needs_left in users[rule]:
            needs_left.discard(rule)
            if not needs_left:
                new.append(user)
    return ending


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

_INEXPRESSIBLE: Final = frozenset(
    {
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "multipleOf",
        "not",
        "then",
        "uniqueItems",
    }
)
"""Keywords of JSON Schema that no grammar can express."""


@dataclass(frozen=True)
class Grammar:
    """Grammar that generated text must match."""

    kind: str
    """``json_schema``, ``regex`` or ``ebnf``."""
    source: str

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
        schema = json.loads(grammar.source)
        for path, each in json_schema.schemas_within(name, schema):
            _check(path, each)
        if why := impossible_schema(name, schema):
            raise InvalidArgument(f"a part of '{name}' has no instances: {why}")
    GRAMMARS.put(_valid, key, None, len(key))


def _check(path: str, schema: Mapping[str, Any]) -> None:
    for keyword in schema:
        if keyword in _INEXPRESSIBLE:
            raise Unsupported(f"'{path}.{keyword}' cannot be enforced while text is generated: remove it")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise Unsupported(
            f"'{path}.$ref' must point into the schema, such as '#/$defs/name', got {reprlib.repr(reference)}"
        )
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise Unsupported(f"'{path}.allOf' has several schemas: merge them into one")
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(required, list):
        for name in required:
            if not isinstance(properties, dict) or name not in properties:
                raise Unsupported(f"'{path}' requires {name!r}, which is not in its 'properties': define it there")
    if "pattern" in schema and (more := {"minLength", "maxLength", "format"} & schema.keys()):
        raise Unsupported(f"'{path}' has a pattern and {', '.join(sorted(more))}: express both in the pattern")


# Size of a grammar with its repetitions expanded. Compilers expand them, more or less, so a few characters can become
# more states than time and memory allow. An engine that compiles in a process with limits does not need this check.

MAX_PARTS: Final = 50_000
"""Maximum number of parts of an expanded grammar. Each literal and character counts once per repetition."""
_PART: Final = re.compile(
    r"""\s+|\#[^\n]*
    |(?P<one>\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|"(?:\\.|[^"\\\n])*")
    |(?P<open>\((?:\?(?::|=|!|<?[=!]|P?<\w{1,64}>))?)
    |(?P<close>\))
    |\{(?P<times>[\s\d,]+)\}
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
"""An unclosed class extends to the end: searching for its end from each opening bracket would take quadratic time."""
_AT_ONCE: Final = "*+?|"
_LONGEST_NUMBER: Final = 9
"""Digits. A longer number exceeds ``MAX_PARTS`` in any case."""


def check_repetitions(name: str, grammar: Grammar) -> None:
    """Raise ``InvalidArgument`` for a grammar that is too large with its repetitions expanded."""
    source = grammar.source
    parts = _schema_size(json.loads(source)) if grammar.kind == JSON_SCHEMA else _expression_size(source)
    if parts > MAX_PARTS:
        raise InvalidArgument(
            f"structured output ({grammar.kind}): with its repetitions expanded it has more than {MAX_PARTS} parts, "
            f"which {name} would take too long to compile: use fewer repetitions"
        )


def _expression_size(source: str) -> int:
    """Return the number of parts of an expanded regular expression or EBNF grammar."""
    groups = [0]
    last = 0
    for part in _PART.finditer(source):
        if part["open"]:
            groups.append(0)
            last = 0
        elif part["close"] and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif part["times"]:
            numbers = part["times"].replace(",", " ").split()
            times = max([1, *(int(digits[:_LONGEST_NUMBER]) for digits in numbers)])
            groups[-1] += last * (times - 1)
            last *= times
        elif part["one"] or (part["other"] and part["other"] not in _AT_ONCE):
            last = 1
            groups[-1] += 1
        groups[-1] = min(groups[-1], MAX_PARTS * MAX_PARTS)
        last = min(last, MAX_PARTS * MAX_PARTS)
    return sum(groups)


def _schema_size(schema: Any) -> int:
    """Return the number of parts of an expanded schema, whose depth ``schemas_within`` has limited."""
    if isinstance(schema, list):
        return sum(map(_schema_size, schema))
    if not isinstance(schema, dict):
        return 1
    parts = 1
    for keyword, value in schema.items():
        if keyword in ("items", "additionalProperties"):
            counts = ("minItems", "maxItems") if keyword == "items" else ("minProperties", "maxProperties")
            parts += _schema_size(value) * _times(schema, *counts)
        elif keyword == "pattern" and isinstance(value, str):
            parts += _expression_size(value)
        elif isinstance(value, dict | list):
            parts += _schema_size(value)
    return min(parts + _times(schema, "minLength", "maxLength"), MAX_PARTS * MAX_PARTS)


def _times(schema: Mapping[str, Any], *counts: str) -> int:
    """Return the largest of the repetition bounds ``counts`` of a schema, at least 1."""
    bounds = [value for keyword in counts if isinstance(value := schema.get(keyword), int)]
    return min(max([1, *bounds]), MAX_PARTS * MAX_PARTS)
