"""Regular expressions and EBNF grammars in llama.cpp's notation: their tokens, termination and expanded size. Pure.

Engines compile a rule that cannot terminate, and generate arbitrary text once they are in it. They also expand
repetitions, more or less, so that a few characters can become more states than time and memory allow.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, TypeAlias

_COMMON: Final = r"""
    (?P<one>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\[\^?(?:\\.|[^\]\\])*(?:(?P<closed>\])|\\?\Z))
    |(?P<open>\((?:=|\?(?::|=|!|<?[=!]|P?<\w{1,64}>))?)
    |(?P<close>\))
    |(?P<bar>\|)
    |(?P<repeat>[*+?]|\{[\s\d,]+\})
    |(?P<other>.)"""
"""Tokens of both. ``one`` is an escape or a character class. An unclosed class extends to the end: searching for its
end from each opening bracket would take quadratic time."""
REGEX_TOKEN: Final = re.compile(_COMMON, re.VERBOSE | re.DOTALL)
EBNF_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<defined>[A-Za-z_][A-Za-z0-9_.-]*)\s*::=
    |(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
    |(?P<text>"(?:\\.|[^"\\\n])*")
    |"""
    + _COMMON,
    re.VERBOSE | re.DOTALL,
)

_OPTIONAL: Final = re.compile(r"[*?]|\{\s*0\s*(?:,[\s\d]*)?\}")

_Rule: TypeAlias = str | int
"""Name of a rule, or number of a parenthesized group."""
_Rules: TypeAlias = dict[_Rule, list[list[_Rule]]]
"""The alternatives of each rule: for each, the rules that it needs."""


def _terminating(rules: _Rules) -> set[_Rule]:
    """Return the rules that terminate: one of their alternatives needs only such rules, or undefined ones."""
    users: dict[_Rule, list[tuple[_Rule, set[_Rule]]]] = defaultdict(list)
    new: list[_Rule] = []
    for rule, alternatives in rules.items():
        for needs in alternatives:
            missing = {each for each in needs if each in rules}
            for each in missing:
                users[each].append((rule, missing))
            if not missing:
                new.append(rule)
    found: set[_Rule] = set()
    while new:
        rule = new.pop()
        if rule not in found:
            found.add(rule)
            for user, missing in users[rule]:
                missing.discard(rule)
                if not missing:
                    new.append(user)
    return found


def endless_rule(source: str) -> str:
    """Return the first rule of an EBNF grammar that never terminates; empty if all do or it cannot be parsed."""
    rules = _rules(source)
    found = _terminating(rules)
    return next((name for name in rules if isinstance(name, str) and name not in found), "")


def _rules(source: str) -> _Rules:
    """Return the rules of a grammar by their names, and its groups by numbers; empty if any part cannot be parsed."""
    rules: _Rules = {}
    within: list[_Rule] = []
    """The current rule and its open groups."""
    for token in EBNF_TOKEN.finditer(source):
        kind = token.lastgroup
        if kind == "defined":
            within = [token["defined"]]
            rules[within[0]] = [[]]
        elif kind == "space":
            continue
        elif kind == "other" or not within:
            return {}
        elif kind == "close":
            if len(within) == 1:
                return {}
            within.pop()
        elif kind == "bar":
            rules[within[-1]].append([])
        elif kind == "open":
            group = len(rules)
            rules[within[-1]][-1].append(group)
            rules[group] = [[], []] if token["open"] == "(=" else [[]]  # a lookahead consumes nothing
            within.append(group)
        elif kind == "repeat":
            if _OPTIONAL.fullmatch(token["repeat"]) and rules[within[-1]][-1]:
                rules[within[-1]][-1].pop()
        else:
            rules[within[-1]][-1].append(token["name"] or "")
    return rules


MAX_PARTS: Final = 50_000
"""Maximum number of parts of an expanded expression. Each literal and character counts once per repetition."""
_LONGEST_NUMBER: Final = 9
"""Digits. A longer number exceeds ``MAX_PARTS`` in any case."""


def expanded_size(tokens: Iterable[re.Match[str]]) -> int:
    """Return the number of parts of an expression, given by its tokens, whose repetitions are expanded."""
    groups = [0]
    """Parts of the whole, and of each open group."""
    last = 0
    """Parts of what a repetition would repeat."""
    for token in tokens:
        kind = token.lastgroup
        if kind == "open":
            groups.append(0)
            last = 0
        elif kind == "close" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif kind == "repeat":
            numbers = re.findall(r"\d+", token["repeat"])
            times = max([1, *(int(digits[:_LONGEST_NUMBER]) for digits in numbers)])
            groups[-1] += last * (times - 1)
            last *= times
        elif kind not in ("space", "bar"):
            last = 1
            groups[-1] += 1
        groups[-1] = min(groups[-1], MAX_PARTS * MAX_PARTS)
        last = min(last, MAX_PARTS * MAX_PARTS)
    return sum(groups)
