"""Grammars as llama.cpp writes them: whether each rule can come to an end. Pure.

An engine compiles a rule that cannot, and writes anything once it is in it. In a grammar all of whose rules can, each
beginning can be gone on with.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

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


def endless(source: str) -> str:
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
