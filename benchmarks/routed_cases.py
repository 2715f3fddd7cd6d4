"""What is asked of routers, and what happens to the first of their members meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import balancing
from balancing import conversations, distinct, documents, words
from paced_engine import MODEL
from routed_client import RoutedAnswer, chat_message
from routed_members import FirstMember

MEMBERS: Final = 4
SPEED: Final = 5.0
"""Of the engines, in relation to those of ``balancing_members.py``: so a run needs less time."""
KILLED, STOPPED = "killed", "stopped"
STALE: Final = 4.0
"""Seconds for which a member stands still."""


def shared_prefixes(chance: random.Random, hot: float = 0.0) -> Iterator[tuple[bytes, int]]:
    """Questions on documents: each is asked for once at the beginning, and then some more often than others."""
    for which in chance.sample(range(60), 60):
        prompt = words("system", 0, 500) + words("document", which, 6000) + words("first question", which, 100)
        yield prompt, balancing.answer(chance)
    yield from documents(chance, hot)


def hot_key(chance: random.Random) -> Iterator[tuple[bytes, int]]:
    """Yield questions of which half are on one document."""
    return shared_prefixes(chance, 0.5)


class Case(NamedTuple):
    """What comes, and what happens."""

    name: str
    about: str
    prompts: Callable[[random.Random], Iterator[tuple[bytes, int]]]
    """Yields prompts with the lengths of their answers."""
    rate: float
    """Requests a second."""
    slowness: float = 1.0
    """Of the first member."""
    event: str = ""
    """What happens to the first member."""

    def flags(self) -> list[list[str]]:
        """Return the flags of the members."""
        return [
            [f"--slowness={(1.0 if number else self.slowness) / SPEED}", "--cached=100000"] for number in range(MEMBERS)
        ]

    def messages(self, chance: random.Random) -> Iterator[bytes]:
        """Yield requests for streams."""
        for prompt, answer in self.prompts(chance):
            usage = {"include_usage": True}
            yield chat_message(MODEL, prompt.decode(), answer, stream=True, stream_options=usage, temperature=0)

    @contextmanager
    def happening(self, member: FirstMember, begins: float, seconds: float) -> Iterator[None]:
        """Have it happen, in a run whose figures count from ``begins`` and for so many seconds."""
        events: list[tuple[float, Callable[[], None]]] = []
        if self.event == KILLED:
            turns = (member.kill, member.start_again, member.kill, member.start_again)
            events = [(seconds * turn / 6, what) for turn, what in enumerate(turns, 1)]
        elif self.event == STOPPED:
            events = [(seconds / 4, member.stop), (seconds / 4 + STALE, member.go_on)]
        timers = [threading.Timer(begins + when, what) for when, what in events]
        for timer in timers:
            timer.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.join()


_DOCUMENTS: Final = "questions on 60 documents of 6,000 tokens, of which a member caches 16"
CASES: Final = (
    Case("distinct prompts", "nothing is shared; 1,000 tokens in the median", distinct, 60),
    Case("shared prefixes", _DOCUMENTS, shared_prefixes, 40),
    Case("sessions", "120 conversations at a time, up to 6,000 tokens", conversations, 45),
    Case("hot key", "half of all requests ask for one document", hot_key, 40),
    Case(
        "slow member", "shared prefixes; one of four members has a third of the speed", shared_prefixes, 25, slowness=3
    ),
    Case("killed member", "shared prefixes; one is killed and started again, twice", shared_prefixes, 25, event=KILLED),
    Case("stale member", f"shared prefixes; one stands still for {STALE:g} s", shared_prefixes, 25, event=STOPPED),
)


def plain_messages(tokens: int, chance: random.Random) -> Iterator[bytes]:
    """Yield requests with prompts of so many tokens, each another one, for answers in one piece."""
    text = words("text", chance.randrange(1000), tokens).decode()
    number = chance.randrange(1_000_000)
    while True:
        number += 1
        yield chat_message(MODEL, f"{number:08d} {text}"[: tokens * 4], 40)


class Result(NamedTuple):
    """Of one run. Times in seconds."""

    asked: int
    refused: int
    """Requests that failed before the first token of their answer."""
    cut: int
    """Requests that failed in the middle of their answer."""
    cached: float
    """Share of the tokens of prompts that members had in their caches."""
    first: tuple[float, float, float]
    """Time to the first token: p50, p95, p99."""
    processor: float
    """Time of the router's processors for a request."""
    problems: tuple[str, ...] = ()


def result(answers: Sequence[RoutedAnswer], processor: float) -> Result:
    """Return what came of a run, for which the router used so much processor time."""
    failed = [each for each in answers if each.problem]
    prompt = sum(each.prompt for each in answers)
    return Result(
        len(answers),
        sum(not each.first for each in failed),
        sum(bool(each.first) for each in failed),
        sum(each.cached for each in answers) / prompt if prompt else 0.0,
        quantiles([each.first - each.sent for each in answers if each.first], (0.5, 0.95, 0.99)),
        processor / max(len(answers), 1),
        tuple(sorted({each.problem for each in failed})),
    )


def quantiles(values: Sequence[float], wanted: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return three quantiles; of nothing, what is greater than anything."""
    if not values:
        return (float("inf"),) * 3
    ordered = sorted(values)
    low, middle, high = (ordered[min(int(len(ordered) * share), len(ordered) - 1)] for share in wanted)
    return low, middle, high
