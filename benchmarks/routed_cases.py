"""What is asked of routers, and what happens to the first of their members meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from balancing import conversations, distinct, documents, hot_documents, words
from paced_engine import MODEL
from routed_client import RoutedAnswer, chat_message
from routed_members import FirstMember

MEMBERS: Final = 4
SPEED: Final = 5.0
"""Of the engines, in relation to those of ``balancing_members.py``: so a run needs less time."""
KILLED, STALE = "killed", "stale"
STALE_SECONDS: Final = 4.0


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
            events = [(seconds / 4, member.kill), (seconds / 2, member.start_again)]
        elif self.event == STALE:
            events = [(seconds / 4, member.stop), (seconds / 4 + STALE_SECONDS, member.go_on)]
        timers = [threading.Timer(begins + when, what) for when, what in events]
        for timer in timers:
            timer.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.join()


CASES: Final = (
    Case("distinct prompts", "nothing is shared; 1,000 tokens in the median", distinct, 60),
    Case("shared prefixes", "questions on 60 documents of 6,000 tokens, of which a member caches 16", documents, 40),
    Case("sessions", "120 conversations at a time, up to 6,000 tokens", conversations, 45),
    Case("hot key", "half of all requests ask for one document", hot_documents, 40),
    Case("slow member", "shared prefixes; one of four members has a third of the speed", documents, 25, slowness=3),
    Case("killed member", "shared prefixes; one is killed and started again", documents, 25, event=KILLED),
    Case("stale member", f"shared prefixes; one stands still for {STALE_SECONDS:g} s", documents, 25, event=STALE),
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
