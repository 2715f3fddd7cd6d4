"""What tenants have used and what they have left: as JSON, and as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple, TypeAlias

from nerite.observability.exposition import Family, Sample, joined, labels
from nerite.scheduling.tokens.account import Standing
from nerite.scheduling.tokens.gate import Gate
from nerite.scheduling.tokens.usage import Usage, Use


class UsageKey(NamedTuple):
    """What is counted together."""

    model: str
    tokens: bool
    """Sizes are tokens; else they are bytes."""


_COUNTS: Final = ("offered", "admitted", "withdrawn", "retries", "joined")
Usages: TypeAlias = Mapping[UsageKey, Usage]


def document(standings: Iterable[Standing], gates: Iterable[Gate], usages: Usages) -> dict[str, Any]:
    """Return everything as JSON."""
    return {
        "tenants": [asdict(each) for each in standings],
        "models": [{"model": name, "running": running, "waiting": waiting} for name, running, waiting in _busy(gates)],
        "use": [
            {"model": key.model, "tenant": tenant, "class": level, **_counts(key, use)}
            for key, tenant, level, use in _uses(usages)
        ],
    }


def _counts(key: UsageKey, use: Use) -> dict[str, Any]:
    counts: dict[str, Any] = {name: getattr(use, name) for name in _COUNTS}
    counts |= {"refused": {str(limit): count for limit, count in use.refused.items()}, "finished": dict(use.finished)}
    if not key.tokens:
        return {**counts, "input_bytes": use.input_tokens}
    names = ("input_tokens", "output_tokens", "wasted_tokens")
    return {**counts, **{name: getattr(use, name) for name in names}, "finished_tokens": dict(use.finished_tokens)}


_COUNTERS: Final[tuple[tuple[str, str, Callable[[Use], int]], ...]] = (
    ("offered", "Requests that came", lambda use: use.offered),
    ("joined", "Requests that got the answer of an earlier one with the same key", lambda use: use.joined),
    ("admitted", "Requests that were let in", lambda use: use.admitted),
    ("withdrawn", "Requests whose clients gave up while they waited to be let in", lambda use: use.withdrawn),
    ("retries", "Requests that came and said that they were asked before", lambda use: use.retries),
)
_TOKENS: Final[tuple[tuple[str, str, Callable[[Use], int]], ...]] = (
    ("input_tokens", "Tokens of the prompts that were let in and not refused after all", lambda use: use.input_tokens),
    ("output_tokens", "Tokens that were generated", lambda use: use.output_tokens),
    ("wasted_tokens", "Tokens that were generated when the client had gone", lambda use: use.wasted_tokens),
)


def families(standings: Sequence[Standing], gates: Iterable[Gate], usages: Usages) -> list[Family]:
    """Return everything as metrics."""
    busy = _busy(gates)
    uses = [
        (labels({"model": key.model, "tenant": tenant, "class": level}), key, use)
        for key, tenant, level, use in _uses(usages)
    ]
    tokens = [(of, use) for of, key, use in uses if key.tokens]
    rates = [(labels({"tenant": each.tenant, "limit": rate.limit}), rate) for each in standings for rate in each.rates]
    return [
        *(_counter(name, text, [(of, read(use)) for of, _, use in uses]) for name, text, read in _COUNTERS),
        *(_counter(name, text, [(of, read(use)) for of, use in tokens]) for name, text, read in _TOKENS),
        _counter(
            "input_bytes",
            "Bytes of the requests that were let in and not refused after all",
            [(of, use.input_tokens) for of, key, use in uses if not key.tokens],
        ),
        _counter(
            "refused",
            "Requests that were refused, by limit",
            [
                (joined(of, labels({"reason": limit})), count)
                for of, _, use in uses
                for limit, count in use.refused.items()
            ],
        ),
        _counter(
            "finished",
            "Requests that were let in and are over",
            [
                (joined(of, labels({"reason": why})), count)
                for of, _, use in uses
                for why, count in use.finished.items()
            ],
        ),
        _gauge("running", "Requests that are let in", [(labels({"model": name}), count) for name, count, _ in busy]),
        _gauge(
            "waiting", "Requests that wait to be let in", [(labels({"model": name}), count) for name, _, count in busy]
        ),
        _gauge(
            "under_way",
            "Requests of a tenant",
            [(labels({"tenant": each.tenant}), each.under_way) for each in standings],
        ),
        _gauge(
            "rate_left",
            "What a tenant may use at once now; below 0: what is owed",
            [(of, rate.left) for of, rate in rates],
        ),
    ]


def _counter(name: str, text: str, samples: Iterable[Sample]) -> Family:
    return Family(f"nerite_admission_{name}", text, "counter", list(samples))


def _gauge(name: str, text: str, samples: Iterable[Sample]) -> Family:
    return Family(f"nerite_admission_{name}", text, "gauge", list(samples))


def _busy(gates: Iterable[Gate]) -> list[tuple[str, int, int]]:
    """Return how many requests run and wait of each model, all its versions together."""
    found: dict[str, tuple[int, int]] = {}
    for gate in gates:
        running, waiting = found.get(gate.model, (0, 0))
        found[gate.model] = running + gate.running, waiting + gate.waiting
    return [(name, *found[name]) for name in sorted(found)]


def _uses(usages: Usages) -> Iterator[tuple[UsageKey, str, str, Use]]:
    for key in sorted(usages):
        for tenant, level, use in sorted(usages[key].items(), key=lambda item: item[:2]):
            yield key, tenant, level, use
