"""Plans of a load, drawn from a seed without I/O: arrival times, lengths, turns, adapters and cancellations.

Everything is drawn by number: the plan of request or conversation ``n`` depends on the seed and ``n`` alone, not on how
many processes send, or when the server answers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

# Distributions of lengths, counts and times.

_FORMS: Final = {
    "fixed": ("N",),
    "normal": ("MEAN", "DEVIATION"),
    "lognormal": ("MEAN", "DEVIATION"),
    "uniform": ("LEAST", "MOST"),
    "exponential": ("MEAN",),
}
DISTRIBUTIONS: Final = (
    "N, normal:MEAN,DEVIATION, lognormal:MEAN,DEVIATION, uniform:LEAST,MOST, exponential:MEAN, file:PATH"
)
"""The ways to write a distribution."""
_MOST: Final = 1_000_000.0
"""Upper bound of what is drawn: distributions with a long tail have values that no server accepts."""


class Distribution(NamedTuple):
    """Distribution of non-negative numbers. Normal and lognormal ones are given by mean and standard deviation."""

    kind: str
    values: tuple[float, ...]
    """Parameters, or for ``file`` the values to choose from."""

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Parse one of ``DISTRIBUTIONS``. Raises ``ValueError`` with a reason, and ``OSError`` for a file."""
        kind, colon, given = text.partition(":")
        if not colon:
            kind, given = "fixed", text
        if kind == "file":
            return cls(kind, _file_values(Path(given)))
        if kind not in _FORMS:
            raise ValueError(f"'{text}' is not a distribution: write {DISTRIBUTIONS}")
        names = _FORMS[kind]
        try:
            values = tuple(float(value) for value in given.split(","))
        except ValueError:
            values = ()
        if len(values) != len(names) or not all(0 <= value <= _MOST for value in values):
            raise ValueError(f"'{text}': write {'' if kind == 'fixed' else f'{kind}:'}{','.join(names)}, from 0 to 1e6")
        if kind == "uniform" and values[0] > values[1]:
            raise ValueError(f"'{text}': the least value is greater than the greatest")
        if kind == "lognormal" and not values[0]:
            raise ValueError(f"'{text}': the mean of a lognormal distribution must be greater than 0")
        return cls(kind, values)

    def draw(self, generator: np.random.Generator) -> float:
        """Return a value from 0 to a million."""
        values = self.values
        match self.kind:
            case "normal":
                drawn = generator.normal(values[0], values[1])
            case "lognormal":
                mean, deviation = values
                squared = math.log1p((deviation / mean) ** 2)
                drawn = generator.lognormal(math.log(mean) - squared / 2, math.sqrt(squared))
            case "uniform":
                drawn = generator.uniform(values[0], values[1])
            case "exponential":
                drawn = generator.exponential(values[0])
            case "file":
                drawn = values[generator.integers(len(values))]
            case _:
                return values[0]
        return float(min(max(drawn, 0.0), _MOST))

    def count(self, generator: np.random.Generator) -> int:
        """Return a whole number of at least 1."""
        return max(1, round(self.draw(generator)))

    def __str__(self) -> str:
        values = ",".join(f"{value:g}" for value in self.values)
        if self.kind == "file":
            return f"{len(self.values)} lengths of a file"
        return values if self.kind == "fixed" else f"{self.kind}:{values}"


def _file_values(path: Path) -> tuple[float, ...]:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = float(line)
        except ValueError:
            value = -1.0
        if not 0 <= value <= _MOST:
            raise ValueError(f"{path}, line {number}: '{line[:40]}' is not a number from 0 to 1e6")
        found.append(value)
    if not found:
        raise ValueError(f"{path} has no numbers: write one in each line")
    return tuple(found)


# Requests and conversations.


class CancelPlan(NamedTuple):
    """Which requests the client cancels, and when."""

    part: float
    """Fraction of the requests, from 0 to 1."""
    after: Distribution
    """Seconds from the sending of a request to its cancellation."""

    def draw(self, generator: np.random.Generator) -> float | None:
        """Return after how many seconds the next request is cancelled, or None if it is not."""
        return self.after.draw(generator) if generator.random() < self.part else None


class PlannedRequest(NamedTuple):
    """What a request asks for."""

    lengths: tuple[int, ...]
    """Length of each text in tokens: of a prompt one, of a request to rerank that of the query and of each document."""
    output: int = 0
    """Length of the answer in tokens; 0 if it is not planned."""
    think: float = 0.0
    """Seconds between the former answer of the conversation and this request."""
    cancel_after: float | None = None
    place: int = 0
    """Determines the words of the texts."""


class PlannedConversation(NamedTuple):
    """One or more requests, each of which is sent after the answer to the former one."""

    number: int
    model: int
    """Which of the models or adapters answers it."""
    system_place: int
    """Determines the words of the system prompt; 0 for the one that is shared."""
    turns: tuple[PlannedRequest, ...]


ONE: Final = Distribution("fixed", (1.0,))
NONE: Final = Distribution("fixed", (0.0,))
PLACES: Final = 14**4 << 16
"""Number of distinct places, so of distinct texts."""
_SAMPLE: Final = 1_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Distributions that conversations are drawn from."""

    inputs: Distribution
    outputs: Distribution | None = None
    """None: answers are as long as the server likes."""
    texts: Distribution = ONE
    """Number of texts of a request, without the query."""
    query: Distribution | None = None
    """Length of the query in front of the texts; None for requests without one."""
    turns: Distribution = ONE
    think: Distribution = NONE
    shared_system: float = 1.0
    """Fraction of the conversations whose system prompt is the same."""
    models: Mapping[str, float] = field(default_factory=dict)
    """Models and adapters with their weights."""
    cancel: CancelPlan | None = None
    seed: int = 0

    def conversation(self, number: int, run: int = 0) -> PlannedConversation:
        """Return the plan of a conversation. In another ``run`` it is the same with other words."""
        generator = np.random.default_rng([self.seed, number])
        weights = np.cumsum(list(self.models.values()) or [1.0])
        model = int(np.searchsorted(weights, generator.random() * weights[-1], side="right"))
        shared = generator.random() < self.shared_system
        system = 0 if shared else int(generator.integers(1, PLACES))
        turns = tuple(
            self._request(generator, run, self.think.draw(generator) if turn else 0.0)
            for turn in range(self.turns.count(generator))
        )
        return PlannedConversation(number, model, system, turns)

    def _request(self, generator: np.random.Generator, run: int, think: float) -> PlannedRequest:
        lengths = [self.inputs.count(generator) for _ in range(self.texts.count(generator))]
        if self.query is not None:
            lengths.insert(0, self.query.count(generator))
        output = self.outputs.count(generator) if self.outputs is not None else 0
        cancel_after = self.cancel.draw(generator) if self.cancel is not None else None
        place = (int(generator.integers(PLACES)) + run * 7_919) % PLACES
        return PlannedRequest(tuple(lengths), output, think, cancel_after, place)

    @property
    def mean_turns(self) -> float:
        """Mean number of requests of a conversation."""
        generator = np.random.default_rng(self.seed)
        return sum(self.turns.count(generator) for _ in range(_SAMPLE)) / _SAMPLE


# Arrival times of open loops.

_BLOCK_SIZE: Final = 1_024


def constant(rate: float, share: int = 0, shares: int = 1) -> Iterator[float]:
    """Yield the times at which requests are due at a constant ``rate``, in seconds after the start.

    Each of several generators takes every ``shares``-th request, starting with number ``share``.
    """
    return (number / rate for number in itertools.count(share, shares))


def gamma(rate: float, burstiness: float = 1.0, share: int = 0, shares: int = 1, seed: int = 0) -> Iterator[float]:
    """Yield due times whose gaps have a gamma distribution with the shape ``burstiness``.

    With 1 it is a Poisson process; less makes bursts, more comes closer to a constant rate.
    """

    def due() -> Iterator[float]:
        generator = np.random.default_rng(seed)
        last = 0.0
        while True:
            for gap in generator.gamma(burstiness, 1 / (rate * burstiness), _BLOCK_SIZE).tolist():
                last += gap
                yield last

    return itertools.islice(due(), share, None, shares)


def ramped(times: Iterator[float], seconds: float) -> Iterator[float]:
    """Yield due times stretched so that their rate grows linearly from 0 for some seconds, and then is as given."""
    if not seconds:
        return times
    half = seconds / 2
    return (math.sqrt(2 * seconds * time) if time < half else time + half for time in times)


def scheduled(times: tuple[float, ...], speed: float, share: int = 0, shares: int = 1) -> Iterator[float]:
    """Yield recorded times relative to the first, divided by ``speed``."""
    return ((time - times[0]) / speed for time in itertools.islice(times, share, None, shares))
