"""Who asks too much of a language model: tenants and classes, their policy, and their requests."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from llm_checkpoint import Prompts
from token_client import APIS, message
from token_crowd import Answer, Asked

SEQUENCES: Final = 32
"""That run at a time."""
ANSWERS: Final = (16, 112)
"""Tokens that are asked for, from and to."""
_LENGTHS: Final = (32, 224)
"""Of prompts."""
_PROMPTS: Final = 3000
"""That take turns: more than the engine can remember."""
WITHIN: Final = 30.0
"""Seconds in which answers of the least class have to be complete; each says so."""


class Level(NamedTuple):
    """A class."""

    name: str
    share: int
    """Of the model, and of the requests that come."""
    first: float
    """Seconds in which the first token is promised; 0: none."""
    headers: str = ""


LEVELS: Final = (
    Level("interactive", 6, 1.0),
    Level("standard", 3, 4.0),
    Level("batch", 1, 0.0, f"x-nerite-timeout-ms: {WITHIN * 1000:.0f}\r\n"),
)
TENANTS: Final = {"a": 3, "b": 2, "c": 1}
"""With their weights. Each asks as often as the others."""


def policy() -> str:
    """Return the policy file."""
    lines = ['header = "x-tenant"']
    for order, level in enumerate(LEVELS, 1):
        lines += [f"[classes.{level.name}]", f"order = {order}", f"share = {level.share}"]
        lines += [f"ttft_seconds = {level.first}"]
    for name, weight in TENANTS.items():
        lines += [f"[tenants.{name}]", f'header_values = ["{name}"]', f'class = "{LEVELS[0].name}"']
        lines += [f"weight = {weight}"]
    lines += ['[llms."*"]', f"max_sequences = {SEQUENCES}", "queue_length = 100"]
    return "\n".join(lines) + "\n"


def requests(model: str, prompts: Prompts, chance: random.Random) -> Iterator[Asked]:
    """Yield requests of all tenants and classes for ever."""
    lengths = [chance.randint(*_LENGTHS) for _ in range(_PROMPTS)]
    texts = [(length, prompts.take(length)) for length in lengths]
    shares = [level.share for level in LEVELS]
    way = APIS["generate_stream"]
    while True:
        for length, text in texts:
            tenant, (level,) = chance.choice(list(TENANTS)), chance.choices(LEVELS, shares)
            headers = f"x-tenant: {tenant}\r\n{_class(level)}"
            wanted = chance.randint(*ANSWERS)
            asked = message(way, model, text, wanted, headers, return_num_output_tokens=True)
            yield Asked(tenant, level.name, length, asked)


def unhurried(asks: Iterable[Asked]) -> Iterator[Asked]:
    """Yield the same in the class that nothing is promised, without a time limit: what comes of them is the peak."""
    least = LEVELS[-1]._replace(headers="")
    for asked in asks:
        (level,) = (each for each in LEVELS if each.name == asked.level)
        sent = asked.message.replace(_class(level).encode(), _class(least).encode(), 1)
        yield asked._replace(level=least.name, message=sent)


def _class(level: Level) -> str:
    return f"x-nerite-class: {level.name}\r\n{level.headers}"


def kept(answer: Answer) -> bool:
    """Return whether an answer is complete, and came within the time of its class."""
    (level,) = (each for each in LEVELS if each.name == answer.asked.level)
    if answer.limit:
        return False
    return answer.first - answer.due <= level.first if level.first else answer.ended - answer.due <= WITHIN
