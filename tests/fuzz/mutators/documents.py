"""JSON: a document as a tree whose members may stand twice, changed in places, and written with what is no JSON."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

from fuzz import tokens
from fuzz.mutators import octets

DEPTHS = (3, 50, 98, 99, 100, 101, 102, 600, 5_000)
"""Around the limit of the server, the one of Python, and far beyond both."""


class Raw(bytes):
    """Text that is written as it is."""


class Members(list[list[Any]]):
    """An object: pairs of a name and a value; a name may stand twice."""


Place = tuple[list[Any], int]
"""A list, and an index in it."""


def thawed(value: Any) -> Any:
    """Return a document as a tree that can be changed."""
    if isinstance(value, dict):
        return Members([name, thawed(each)] for name, each in value.items())
    return [thawed(each) for each in value] if isinstance(value, list) else value


def mutated(rng: random.Random, document: Any, most: int = 3) -> bytes:
    """Return the text of ``document`` with one to ``most`` changes, mostly one."""
    holder = [thawed(document)]
    for _ in range(rng.choice((1, 1, 1, 2, most))):
        _change(rng, holder)
    text = dumped(holder[0])
    if rng.random() < 0.07:
        text = octets.mutated(rng, text, 2)
    return text[: octets.LARGEST]


def dumped(value: Any) -> bytes:
    """Return the text of a tree."""
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, Members):
        return b"{" + b",".join(dumped(name) + b":" + dumped(each) for name, each in value) + b"}"
    if isinstance(value, dict):
        return dumped(thawed(value))
    if isinstance(value, (list, tuple)):
        return b"[" + b",".join(map(dumped, value)) + b"]"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
        return b"-" * (value < 0) + b"1" + b"0" * 400
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: b"Infinity", -math.inf: b"-Infinity"}.get(value, b"NaN")
    return json.dumps(value).encode()


def _places(holder: list[Any]) -> list[Place]:
    """Return where the values of a tree stand."""
    found: list[Place] = []
    todo: list[Place] = [(holder, 0)]
    while todo:
        place = todo.pop()
        found.append(place)
        value = place[0][place[1]]
        if isinstance(value, Members):
            todo.extend((pair, 1) for pair in value)
        elif isinstance(value, list):
            # Of a large tensor a few elements are as good as all.
            todo.extend((value, index) for index in range(min(len(value), 12)))
    return found


def _change(rng: random.Random, holder: list[Any]) -> None:
    places = _places(holder)
    container, index = rng.choice(places)
    value = container[index]
    kind = rng.randrange(15)
    if kind <= 2:
        container[index] = tokens.scalar(rng)
    elif kind == 3 and isinstance(value, list) and value:
        del value[rng.randrange(len(value))]
    elif kind == 4 and isinstance(value, list) and value:
        value.insert(rng.randrange(len(value) + 1), copy.deepcopy(rng.choice(value)))
    elif kind == 5 and isinstance(value, Members) and value:
        rng.choice(value)[0] = tokens.text(rng)
    elif kind == 6 and isinstance(value, Members):
        value.insert(rng.randrange(len(value) + 1), [tokens.text(rng), tokens.scalar(rng)])
    elif kind == 6 and isinstance(value, list):
        value.insert(rng.randrange(len(value) + 1), tokens.scalar(rng))
    elif kind == 7:
        container[index] = [value] if rng.random() < 0.5 else Members([[tokens.text(rng), value]])
    elif kind == 8:
        container[index] = _deep(rng)
    elif kind == 9:
        other, at = rng.choice(places)
        container[index] = copy.deepcopy(other[at])
    elif kind == 10 and isinstance(value, (int, float)):
        container[index] = str(value) if rng.random() < 0.3 else _near(rng, value)
    elif kind == 10 and isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        container[index] = value[:at] + tokens.text(rng) + value[at:]
    elif kind == 11 and isinstance(value, list) and value:
        # Some lists within each other, all made this long, would be more than any memory.
        most = max(3, 2 * octets.LARGEST * len(value) // len(dumped(value)))
        value[:] = (value * (2_000 // len(value) + 1))[: min(rng.choice((3, 17, 300, 2_000)), most)]
    elif kind == 12 and isinstance(value, str):
        container[index] = Raw(b'"' + value.encode(errors="replace") + rng.choice(tokens.BROKEN) + b'"')
    elif kind == 13:
        wrong = (
            b"",
            b",",
            b"nul",
            b"01",
            b"1.",
            b".5",
            b"+1",
            b"'a'",
            b'"\\x"',
            b'"',
            b"[1,]",
            b"{,}",
            b"1e999",
            b"//x\n1",
        )
        container[index] = Raw(rng.choice(wrong))
    else:
        container[index] = rng.choice(([], Members(), "", 0, None, True))


def _near(rng: random.Random, value: float) -> Any:
    made: list[Any] = [value + 1, value - 1, -value, value * 2, [value, 0.5]]
    if isinstance(value, int):
        made += [value + 2**32, value + 2**64, Raw(b"%d.0" % value), Raw(b"%de0" % value)]
    return rng.choice(made)


def _deep(rng: random.Random) -> Raw:
    depth = rng.choice(DEPTHS)
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")))
    return Raw(opening * depth + b"1" + closing * (depth if rng.random() < 0.8 else depth // 2))
