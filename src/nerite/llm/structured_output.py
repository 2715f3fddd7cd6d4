"""Structured output: what the text of an answer has to be an instance of, under vLLM's names. Pure.

A schema is looked through for what engines are known to leave out in silence: an answer that does not fit a schema is
worse than a refusal.
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

# Grammars as llama.cpp writes them: whether each rule can come to an end. Pure.
#
# An engine compiles a rule that cannot, and writes anything once it is in it. In a grammar all of whose rules can,
# each beginning can be gone on with.

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
"""A name, or the number of what stands in parentheses."""
_Needs = list[_Rule]
"""What one of the alternatives of a rule has to come to, one after the other."""


def endless_rule(source: str) -> str:
    """Return the first rule that never comes to an end; nothing if there is none, or the grammar cannot be read."""
    rules = _rules(source)
    ending = _ending(rules)
    return next((name for name in rules if isinstance(name, str) and name not in ending), "")


def _rules(source: str) -> dict[_Rule, list[_Needs]]:
    """Return the alternatives of each rule; none at all where something is not understood."""
    rules: dict[_Rule, list[_Needs]] = {}
    within: list[_Rule] = []
    """The rule that is read, and the parentheses in it that are open."""
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
            if token["ahead"]:  # what follows is only looked at
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


def _ending(rules: dict[_Rule, list[_Needs]]) -> set[_Rule]:
    """Return what can come to an end: a text, and a rule one of whose alternatives has nothing but such."""
    users: dict[_Rule, list[tuple[_Rule, set[_Rule]]]] = defaultdict(list)
    new: list[_Rule] = []
    for rule, alternatives in rules.items():
        for needs in alternatives:
            # Whether there are rules of all names is for the compiler to say.
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
"""Characters of a grammar: what is compiled for all that it says is not without bounds."""
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
"""What else vLLM has there, and the values that ask for nothing of us."""

_LEFT_OUT: Final = frozenset(
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
"""Keywords of JSON Schema that no grammar says."""


@dataclass(frozen=True)
class Grammar:
    """What the text has to be an instance of."""

    kind: str
    """``json_schema``, ``regex`` or ``ebnf``."""
    source: str

    def digest(self, *more: object) -> bytes:
        """Return what to remember the grammar by, with ``more`` that belongs to it: grammars are long."""
        return hashlib.sha256(repr((self.kind, self.source, *more)).encode()).digest()


_right: Final[Memo[bytes, None]] = Memo()
"""Grammars that were looked through, by their digests."""


def read_structured(name: str, value: Any) -> Grammar | None:
    """Read the value of the sampling parameter ``name``; None if it asks for nothing. Raises ``NeriteError``."""
    if isinstance(value, str):  # as Triton's vLLM backend has it
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"'{name}' is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(
            f'\'{name}\' has to be an object, such as {{"regex": "[0-9]+"}}, got {reprlib.repr(value)}'
        )
    wanted = {kind: value[kind] for kind in _KINDS if value.get(kind) is not None and value[kind] is not False}
    _check_options(name, value)
    if len(wanted) > 1:
        raise InvalidArgument(f"'{name}' says {' and '.join(wanted)}: an answer has one form, choose one")
    for kind, given in wanted.items():
        grammar = _grammar(f"{name}.{kind}", kind, given)
        if len(grammar.source) > _LONGEST:
            raise InvalidArgument(f"'{name}.{kind}' has {len(grammar.source)} characters, and may have {_LONGEST}")
        _look_through(f"{name}.{kind}", grammar)
        return grammar
    return None


def _check_options(name: str, value: Mapping[str, Any]) -> None:
    for key, said in value.items():
        if key in _KINDS or said in _OPTIONS.get(key, ()):
            continue
        if key in _OPTIONS:
            raise Unsupported(f"'{name}.{key}' is not offered: take it out")
        meant = nearest(key, (*_KINDS, *_OPTIONS))
        raise InvalidArgument(
            f"'{name}' has '{key}', which is no form of an answer. "
            + (f"Did you mean {meant}?" if meant else f"There are: {', '.join(_KINDS)}.")
        )


def _grammar(name: str, kind: str, given: Any) -> Grammar:
    if kind == "json_object":
        if given is not True:
            raise InvalidArgument(f"'{name}' has to be true or false, got {reprlib.repr(given)}")
        return Grammar(JSON_SCHEMA, json.dumps(_ANY_OBJECT))
    if kind == "json":
        try:
            return Grammar(JSON_SCHEMA, json.dumps(_schema(name, given)))
        except RecursionError:
            raise InvalidArgument(f"'{name}' is too deep") from None
    if kind == "choice":
        return Grammar(EBNF, _choice(name, given))
    if not isinstance(given, str):
        raise InvalidArgument(f"'{name}' has to be text, got {reprlib.repr(given)}")
    return Grammar(REGEX if kind == "regex" else EBNF, given)


def _choice(name: str, given: Any) -> str:
    if not isinstance(given, list) or not given or not all(isinstance(each, str) and each for each in given):
        raise InvalidArgument(f"'{name}' has to be a list of texts that are not empty, got {reprlib.repr(given)}")
    return "root ::= " + " | ".join(json.dumps(each, ensure_ascii=False) for each in given)


def _schema(name: str, given: Any) -> Any:
    """Return what a schema says. Raises ``InvalidArgument`` for what is no object."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"'{name}' is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise InvalidArgument(f"'{name}' has to be a JSON schema, which is an object, got {reprlib.repr(given)}")
    return given


def _look_through(name: str, grammar: Grammar) -> None:
    """Raise ``NeriteError`` for what no text can be, or no grammar say. What is right is known the next time."""
    key = grammar.digest(name)
    if key in _right:
        return
    if grammar.kind == EBNF:
        if rule := endless_rule(grammar.source):
            raise InvalidArgument(f"'{name}' has the rule '{rule}', of which no text comes to an end")
    elif grammar.kind == JSON_SCHEMA:
        schema = json.loads(grammar.source)
        for path, each in json_schema.schemas_within(name, schema):
            _check(path, each)
        if why := impossible_schema(name, schema):
            raise InvalidArgument(f"a part of '{name}' has no instances: {why}")
    GRAMMARS.put(_right, key, None, len(key))


def _check(path: str, schema: Mapping[str, Any]) -> None:
    for keyword in schema:
        if keyword in _LEFT_OUT:
            raise Unsupported(f"'{path}.{keyword}' cannot be made sure of while text is generated: take it out")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise Unsupported(
            f"'{path}.$ref' has to be within the schema, such as '#/$defs/name', got {reprlib.repr(reference)}"
        )
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise Unsupported(f"'{path}.allOf' has several schemas: put them together into one")
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(required, list):
        for name in required:
            if not isinstance(properties, dict) or name not in properties:
                raise Unsupported(
                    f"'{path}' requires {name!r}, which is none of its 'properties': say there what it is"
                )
    if "pattern" in schema and (more := {"minLength", "maxLength", "format"} & schema.keys()):
        raise Unsupported(f"'{path}' has a pattern and {', '.join(sorted(more))}: say it in the pattern")


# How much a grammar says when its repetitions are written out. Pure.
#
# A compiler writes them out, more or less: a few characters become more states than there is time and memory for. An
# engine that compiles in a process with limits need not look here.

MOST: Final = 50_000
"""Parts of a grammar. Each of its texts and characters is one, as often as it is repeated."""
_PART: Final = re.compile(
    r"""\s+|\#[^\n]*
    |(?P<one>\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|"(?:\\.|[^"\\\n])*")
    |(?P<open>\((?:\?(?::|=|!|<?[=!]|P?<\w{1,64}>))?)
    |(?P<close>\))
    |\{(?P<times>[\s\d,]+)\}
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
"""What is not closed reaches to the end: to look for the other end from each beginning takes the square of the time."""
_AT_ONCE: Final = "*+?|"
_LONGEST_NUMBER: Final = 9
"""Digits. More is more than ``MOST`` in any case."""


def check_repetitions(name: str, grammar: Grammar) -> None:
    """Raise ``InvalidArgument`` for a grammar that is too much when it is written out."""
    source = grammar.source
    parts = _of_schema(json.loads(source)) if grammar.kind == JSON_SCHEMA else _of_expression(source)
    if parts > MOST:
        raise InvalidArgument(
            f"structured output ({grammar.kind}): with its repetitions written out it has more than {MOST} parts, for "
            f"which the compiler of {name} takes too long: repeat less"
        )


def _of_expression(source: str) -> int:
    """Return how many parts a regular expression, or a grammar as llama.cpp has it, comes to."""
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
            said = part["times"].replace(",", " ").split()
            times = max([1, *(int(digits[:_LONGEST_NUMBER]) for digits in said)])
            groups[-1] += last * (times - 1)
            last *= times
        elif part["one"] or (part["other"] and part["other"] not in _AT_ONCE):
            last = 1
            groups[-1] += 1
        groups[-1] = min(groups[-1], MOST * MOST)
        last = min(last, MOST * MOST)
    return sum(groups)


def _of_schema(schema: Any) -> int:
    """Return how many parts the texts that a schema has come to. It is no deeper than ``schemas.within`` lets be."""
    if isinstance(schema, list):
        return sum(map(_of_schema, schema))
    if not isinstance(schema, dict):
        return 1
    parts = 1
    for keyword, value in schema.items():
        if keyword in ("items", "additionalProperties"):
            counts = ("minItems", "maxItems") if keyword == "items" else ("minProperties", "maxProperties")
            parts += _of_schema(value) * _times(schema, *counts)
        elif keyword == "pattern" and isinstance(value, str):
            parts += _of_expression(value)
        elif isinstance(value, dict | list):
            parts += _of_schema(value)
    return min(parts + _times(schema, "minLength", "maxLength"), MOST * MOST)


def _times(schema: Mapping[str, Any], *counts: str) -> int:
    """Return how often something is repeated that may be repeated so often."""
    said = [value for keyword in counts if isinstance(value := schema.get(keyword), int)]
    return min(max([1, *said]), MOST * MOST)
