"""Texts of words, numbers and brackets, as config.pbtxt and policy files are."""

from __future__ import annotations

import random
import re

from fuzz import tokens
from fuzz.mutators import octets

_WORD = re.compile(r"\s+|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[\w.+-]+|.", re.DOTALL)
_SYMBOLS = (
    "{",
    "}",
    "[",
    "]",
    "<",
    ">",
    ":",
    ",",
    ";",
    "=",
    '"',
    "'",
    "#",
    "\n",
    "-",
    "\\",
    "/",
    "//",
    "/*",
    "\0",
    "\ufeff",
)


def mutated(rng: random.Random, text: str, words: tuple[str, ...], most: int = 4) -> bytes:
    """Return ``text`` with one to ``most`` of its words changed, mostly one. ``words`` mean something in it."""
    parts = _WORD.findall(text)
    for _ in range(rng.choice((1, 1, 1, 2, most))):
        at = rng.randrange(len(parts) + 1)
        span = min(len(parts) - at, rng.choice((1, 1, 3, 20)))
        kind = rng.randrange(8)
        if kind == 0:
            del parts[at : at + span]
        elif kind == 1:
            parts[at:at] = parts[at : at + span] * rng.choice((1, 1, 30))
        elif kind == 2:
            parts[at : at + 1] = [_word(rng, words)]
        elif kind == 3:
            parts[at:at] = [" ", _word(rng, words), " "]
        elif kind == 4:
            parts[at : at + 1] = [rng.choice(_SYMBOLS)]
        elif kind == 5:
            depth = rng.choice((3, 99, 101, 900))
            parts[at:at] = [rng.choice(("{ ", "[", "input { ", "a.")) * depth]
        elif kind == 6:
            other = rng.randrange(len(parts) + 1)
            parts[at:at] = parts[other : other + span]
        elif at < len(parts) and re.fullmatch(r"-?[\d.]+", parts[at]):
            parts[at] = str(tokens.number(rng))
    made = "".join(parts).encode(errors="surrogatepass")
    if rng.random() < 0.1:
        made = octets.mutated(rng, made, 2)
    return made[: octets.LARGEST]


def _word(rng: random.Random, words: tuple[str, ...]) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return str(tokens.number(rng))
    if kind == 1:
        return '"' + tokens.text(rng).replace('"', '\\"') + '"'
    return tokens.text(rng) if kind == 2 else rng.choice(words)
