"""Counts of bad events by stratum and probability of assignment: all that the evidence of a gate depends on."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.judge.evidence import PLACES, Array
from nerite.judge.outcome import Stratum

MAX_WINDOWS: Final = 12
MAX_CLUSTERS: Final = 16_384
_OTHERS: Final = Stratum(prompt="others")
_CLUSTER_BITS: Final = 0xFFFFFFFF


Window = dict[tuple[Stratum, float], list[float]]
"""By stratum and probability: the counts of a ``CountRow``."""


class CountRow(NamedTuple):
    """Counts of one gate in one stratum, of requests that were assigned with one probability."""

    stratum: Stratum
    probability: float
    candidate_bad: int
    baseline_bad: int
    candidate: int
    """Requests."""
    baseline: int
    candidate_units: float
    """Bad events by their weight: those of one burst are at most one together, those of one cluster are one."""
    baseline_units: float


class EventCounts:
    """The counts of one gate, in windows.

    Requests of one batch fail together, and a stall delays all that are under way: bad events within ``burst_ns`` are
    one burst. An event has the weight 1 / s, where s is the size of the burst in which the average bad event so far
    was, or that of its own burst, if that is greater. So a burst is at most one unit of evidence. The weight of smaller
    bursts does not depend on their size: those of an arm with little traffic are small, and would count for too much.
    Of requests with one sticky key, the first bad event counts.
    """

    def __init__(self, burst_ns: int) -> None:
        self._burst_ns = burst_ns
        self._windows: list[Window] = [{}]
        self._first = 1
        self._strata: list[Stratum] = []
        self._burst = -1
        self._pending: list[tuple[Stratum, float, int]] = []
        """Of each bad event of the burst: its row, and where in that its unit is counted."""
        self._sizes = [0, 0]
        """Of bursts: sum, and sum of squares."""
        self._clusters: set[int] = set()
        self.uncounted = 0
        """Bad events of clusters that no place was left for."""
        self._arrays: _Arrays | None = None
        """What ``arrays`` returned last; None if windows, strata or probabilities have changed since."""

    def _row(self, stratum: Stratum, probability: float) -> list[float]:
        row = self._windows[-1].get((stratum, probability))
        if row is None:
            stratum = self._place(stratum)
            row = self._windows[-1].setdefault((stratum, probability), [0, 0, 0, 0, 0.0, 0.0])
            self._arrays = None
        return row

    def _place(self, stratum: Stratum) -> Stratum:
        if stratum not in self._strata:
            if len(self._strata) >= PLACES - 1:
                stratum = _OTHERS
            if stratum not in self._strata:
                self._strata.append(stratum)
        return stratum

    def exposed(self, stratum: Stratum, probability: float, candidate: bool, requests: int = 1) -> None:
        """Count requests that can be said to be bad or not."""
        self._row(stratum, probability)[2 if candidate else 3] += requests

    def bad(self, stratum: Stratum, probability: float, candidate: bool, now_ns: int, cluster: int) -> None:
        """Count a bad event."""
        row = self._row(stratum, probability)
        arm = 0 if candidate else 1
        row[arm] += 1
        if cluster:
            cluster &= _CLUSTER_BITS
            if cluster in self._clusters:
                return
            if len(self._clusters) >= MAX_CLUSTERS:
                self.uncounted += 1
                return
            self._clusters.add(cluster)
        burst = now_ns // self._burst_ns if self._burst_ns else -1
        if burst != self._burst or not self._burst_ns:
            self.close_burst()
            self._burst = burst
        self._pending.append((stratum, probability, 4 + arm))

    def close_burst(self) -> None:
        """Give the bad events of the last burst their weight."""
        if size := len(self._pending):
            self._sizes[0] += size
            self._sizes[1] += size * size
            share = 1.0 / max(size, self._sizes[1] / self._sizes[0])
            for stratum, probability, index in self._pending:
                self._row(stratum, probability)[index] += share
            self._pending.clear()

    def close_burst_before(self, now_ns: int) -> None:
        """Close the last burst if it is over."""
        if self._pending and (not self._burst_ns or now_ns // self._burst_ns > self._burst):
            self.close_burst()

    def begin_window(self) -> None:
        """Begin a window: from here on the candidate may have become another."""
        self.close_burst()
        if not self._windows[-1]:
            return
        self._windows.append({})
        self._arrays = None
        if len(self._windows) > MAX_WINDOWS:
            eldest = self._windows.pop(1)
            self._first += 1
            for key, row in eldest.items():
                into = self._windows[0].setdefault(key, [0, 0, 0, 0, 0.0, 0.0])
                for index, value in enumerate(row):
                    into[index] += value

    def add(self, row: CountRow) -> None:
        """Add counts that others have taken."""
        into = self._row(row.stratum, row.probability)
        for index, value in enumerate(row[2:]):
            into[index] += value

    def rows(self) -> list[CountRow]:
        """Return the counts since the beginning of the rollout."""
        total: dict[tuple[Stratum, float], list[float]] = {}
        for window in self._windows:
            for key, row in window.items():
                into = total.setdefault(key, [0, 0, 0, 0, 0.0, 0.0])
                for index, value in enumerate(row):
                    into[index] += value
        return [
            CountRow(*key, int(row[0]), int(row[1]), int(row[2]), int(row[3]), row[4], row[5])
            for key, row in sorted(total.items())
        ]

    @property
    def strata(self) -> list[Stratum]:
        """Strata in the order of the arrays."""
        return self._strata

    @property
    def first(self) -> int:
        """Number of the second window."""
        return self._first

    def totals(self) -> list[int]:
        """Return the sums of bad events and requests, of the candidate and of the baseline, of those that are compared.

        Requests that were assigned for certain say nothing.
        """
        rows = [row for window in self._windows for key, row in window.items() if 0.0 < key[1] < 1.0]
        return [int(sum(column)) for column in list(zip(*rows, strict=True))[:4]] or [0, 0, 0, 0]

    def arrays(self) -> tuple[Array, Array, Array]:
        """Return units of the candidate and of the baseline by (window, stratum, probability), and the probabilities.

        Requests that were assigned for certain say nothing, and are left out. The arrays are valid until the next call.
        """
        if self._arrays is None:
            self._arrays = _Arrays(self._windows, self._strata)
        return self._arrays.filled(self._windows[-1])

    def to_json(self) -> dict[str, Any]:
        """Return the state."""
        return {
            "first": self._first,
            "strata": self._strata,
            "windows": [[[*key, *row] for key, row in window.items()] for window in self._windows],
            "burst": [self._burst, self._pending, self._sizes],
            "clusters": b64encode(np.sort(np.fromiter(self._clusters, "<u4", len(self._clusters))).tobytes()).decode(),
            "uncounted": self.uncounted,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take a state that ``to_json`` has returned."""
        self._arrays = None
        self._first = int(state["first"])
        self._strata = [Stratum(*each) for each in state["strata"]]
        self._windows = [
            {(Stratum(*row[0]), float(row[1])): [float(value) for value in row[2:]] for row in window}
            for window in state["windows"]
        ]
        self._burst = int(state["burst"][0])
        self._pending = [(Stratum(*each[0]), float(each[1]), int(each[2])) for each in state["burst"][1]]
        self._sizes = [int(each) for each in state["burst"][2]]
        self._clusters = set(np.frombuffer(b64decode(state["clusters"]), "<u4").tolist())
        self.uncounted = int(state["uncounted"])


class _Arrays:
    """The units of all windows, of which only the last one changes."""

    def __init__(self, windows: Sequence[Window], strata: Sequence[Stratum]) -> None:
        keys = {key for window in windows for key in window if 0.0 < key[1] < 1.0}
        probabilities = sorted({probability for _, probability in keys})
        self._probabilities = np.array(probabilities)
        self._places = {key: (strata.index(key[0]), probabilities.index(key[1])) for key in keys}
        self._units = np.zeros((2, len(windows), len(strata), len(probabilities)))
        for number, window in enumerate(windows):
            self._fill(number, window)

    def _fill(self, number: int, window: Window) -> None:
        candidate, baseline = self._units[:, number]
        for key, row in window.items():
            place = self._places.get(key)
            if place is not None:
                candidate[place], baseline[place] = row[4:]

    def filled(self, last: Window) -> tuple[Array, Array, Array]:
        self._fill(-1, last)
        return self._units[0], self._units[1], self._probabilities


def difference(rows: list[CountRow], before: list[CountRow]) -> list[CountRow]:
    """Return what was counted since ``before``. Counts that have decreased were reset: their replica restarted."""
    known = {(row.stratum, row.probability): row for row in before}
    found = []
    for row in rows:
        earlier = known.get((row.stratum, row.probability))
        if earlier is not None and all(now >= then for now, then in zip(row[2:], earlier[2:], strict=True)):
            counts = [now - then for now, then in zip(row[2:], earlier[2:], strict=True)]
            row = CountRow(row.stratum, row.probability, *counts)  # type: ignore[arg-type]
        found.append(row)
    return found


def total(rows: list[CountRow]) -> Iterator[int]:
    """Return the sums of bad events and requests: of the candidate, of the baseline."""
    yield sum(row.candidate_bad for row in rows)
    yield sum(row.baseline_bad for row in rows)
    yield sum(row.candidate for row in rows)
    yield sum(row.baseline for row in rows)
