"""The counts of all replicas, from samples of Prometheus: what was counted since the last look.

Each process of a server has its own label ``boot``, and counts from 0. So a restart never makes a counter smaller: it
makes another one, and what the earlier process had counted by its last scrape stays counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Final, NamedTuple

from nerite.judge.counts import CountRow
from nerite.judge.outcome import Stratum

PREFIX: Final = "nerite_rollout_"
_METRICS: Final = ("bad", "judged", "bad_units")
_ARMS: Final = ("candidate", "baseline")
COUNTERS: Final = tuple(f"{PREFIX}{metric}_total" for metric in _METRICS)
"""Names of the counters."""
INFO: Final = f"{PREFIX}fleet_info"
"""Name of the gauge that every process of a led rollout has, whether it has counted anything or not."""


def count_labels(row: CountRow) -> tuple[str, str, str, str]:
    """Return the labels prompt, tenant, stream and probability of a row."""
    stratum = row.stratum
    return stratum.prompt, stratum.tenant, str(int(stratum.stream)), repr(row.probability)


def table_of(counts: Mapping[str, Iterable[CountRow]]) -> list[list[Any]]:
    """Return counts by gate as JSON has them: the gate, the labels, and the six counts of each row."""
    return [[gate, *count_labels(row), *row[2:]] for gate, rows in counts.items() for row in rows]


def samples_of(table: Iterable[Iterable[Any]], boot: str) -> Iterator[tuple[Mapping[str, str], float]]:
    """Yield what ``table_of`` has made of the counts of a process as samples of Prometheus.

    Raises ``TypeError`` or ``ValueError`` for a table of another form.
    """
    for gate, prompt, tenant, stream, probability, *values in table:
        row = {"gate": gate, "prompt": prompt, "tenant": tenant, "stream": stream, "probability": probability}
        for value, (name, arm) in zip(values, product(COUNTERS, _ARMS), strict=True):
            yield {"__name__": name, "boot": boot, "arm": arm, **row}, float(value)


class _Key(NamedTuple):
    boot: str
    gate: str
    stratum: Stratum
    probability: float


class FleetCounts:
    """What all processes have counted."""

    def __init__(self) -> None:
        self._seen: dict[_Key, list[float]] = {}
        """By row: the six counts, in the order of ``CountRow``."""

    def take(self, samples: Iterable[tuple[Mapping[str, str], float]], keys: int = 1) -> dict[str, list[CountRow]]:
        """Return what is new in samples, which are labels with values, by gate. Others' samples are passed over.

        ``keys`` is on how many replicas the same sticky key may have been counted: so much less a bad event weighs.
        """
        found: dict[_Key, list[float]] = {}
        for labels, value in samples:
            place = _place(labels)
            key = _key(labels)
            if place is not None and key is not None and math.isfinite(value):
                found.setdefault(key, [0.0] * 6)[place] = value
        new: dict[str, list[CountRow]] = {}
        for key, values in found.items():
            seen = self._seen.setdefault(key, [0.0] * 6)
            more = [max(0.0, now - then) for now, then in zip(values, seen, strict=True)]
            self._seen[key] = [max(now, then) for now, then in zip(values, seen, strict=True)]
            if any(more):
                bad, others_bad, requests, others = map(round, more[:4])
                units = [each / keys for each in more[4:]]
                row = CountRow(key.stratum, key.probability, bad, others_bad, requests, others, *units)
                new.setdefault(key.gate, []).append(row)
        return new


def _place(labels: Mapping[str, str]) -> int | None:
    """Return the place of a sample among the counts of its row."""
    try:
        return 2 * COUNTERS.index(labels.get("__name__", "")) + _ARMS.index(labels.get("arm", ""))
    except ValueError:
        return None


def _key(labels: Mapping[str, Any]) -> _Key | None:
    try:
        probability = float(labels["probability"])
        stratum = Stratum(labels.get("prompt", ""), "", labels.get("tenant", ""), labels.get("stream") == "1")
        return _Key(labels["boot"], labels["gate"], stratum, probability) if 0 < probability < 1 else None
    except (LookupError, ValueError):
        return None
