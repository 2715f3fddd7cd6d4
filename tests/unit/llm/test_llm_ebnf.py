"""Rules of grammars that never come to an end are found."""

from __future__ import annotations

import pytest

from nerite.llm.expressions import endless_rule

DEAD = '\ndead ::= dead "b"'


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("root ::= root", "root"),
        ('root ::= "a" dead' + DEAD, "root"),
        ('root ::= "b" | "a" dead' + DEAD, "dead"),
        ('root ::= ("b" | ("a" dead))' + DEAD, "dead"),
        ('root ::= "a" dead?' + DEAD, "dead"),
        ("root ::= a\na ::= b\nb ::= a [0-9]", "root"),
        ('root ::= "a" x{2,3} # and nothing else\nx ::= (root)', "root"),
    ],
)
def test_endless_ones(source: str, rule: str) -> None:
    assert endless_rule(source) == rule


@pytest.mark.parametrize(
    "source",
    [
        'root ::= "a"',
        'root ::= ""',
        "root ::= [^\\]a]+",
        'root ::= number (" + " number){1,3}\nnumber ::= [1-9] [0-9]{0,2}',
        'root ::= "(" root* ")" | "x"',
        'root ::= "(" root{0,3} ")"',
        'root ::= list\nlist ::= "\\"]" (list | "")  # dead ::= dead',
        'root ::= "a" (=list)\nlist ::= "b"',
        'root ::= nowhere "a"',
        "start: /[0-9]+/",
        'root ::= root ; "a"',
        '"a"',
        "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000,
    ],
)
def test_others(source: str) -> None:
    assert endless_rule(source) == ""


def test_many_rules_take_no_longer() -> None:
    chain = "\n".join(f"a{number} ::= a{number + 1} a{number + 1}" for number in range(5_000))
    assert endless_rule(f"root ::= a0\n{chain}") == ""
    assert endless_rule(f"root ::= a0\n{chain}\na5000 ::= root") == "root"
