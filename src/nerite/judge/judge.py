"""The judge of a rollout: takes outcomes of both arms, and says at any time whether the candidate is worse.

Guarantees, at whatever times one looks, while load drifts, weights change and the mix of requests changes:

- a candidate that is within all margins is rolled back with probability at most ``alpha``;
- a candidate that exceeds the margin of a gate is promoted with probability at most ``beta``;
- without data the decision is to continue, never to promote nor to roll back.

What they assume is in ``docs/decisions/0021-rollout-judge.md``. A judge has no clock and does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from nerite.judge.counts import CountRow, EventCounts, total
from nerite.judge.evidence import gate_evidence, log_mismatch
from nerite.judge.gate_test import FAILED, GateTest
from nerite.judge.gates import Gate, LimitGate, RateGate, TailGate, parse_gate
from nerite.judge.latency_counts import LatencyCounts
from nerite.judge.limits import GaugeLimit, GrossFailure, gauge_text
from nerite.judge.outcome import Outcome, Stratum
from nerite.judge.outcome_batch import LATENCIES, OutcomeBatch
from nerite.judge.thresholds import BaselineThresholds
from nerite.judge.verdict import Decision, EventFigures, GateVerdict, LimitFigures, Verdict

DEFAULT_GATES: Final = ("errors", "p99", "ttft_p95", "itl")
_GROSS_SHARE: Final = 0.1
"""Of ``alpha``, for the rule of gross failure. The other gates divide the rest equally."""
LEAST_BAD: Final = 3.0
"""Units of bad events of the candidate without which it is not rolled back, whatever the e-value is."""
SUSPICION: Final = math.log(3.0)
"""Log e-value of harm in one stratum above which the candidate is not promoted."""
_INCIDENT: Final = 0.05
"""Share of the baseline's requests that fail in an incident of its own, in which nothing is promoted."""
_INCIDENT_LEAST: Final = 20
"""Failed requests of the baseline below which that is no incident."""
_MISMATCH: Final = math.log(1000.0)
_UNMATCHED: Final = 0.2
_UNMATCHED_LEAST: Final = 50
_LN10: Final = math.log(10.0)
LOAD: Final = "load"
"""A gauge that is no gate: requests under way per instance. Arms are comparable if they have about the same."""
_LOAD_RATIO: Final = 1.5
_BATCH: Final = 256
"""Ends of requests that are counted together."""


def log_boundary(alpha: float, gates: int) -> float:
    """Return the log e-value at which each of so many gates rolls back."""
    return -math.log(alpha * (1 - _GROSS_SHARE) / max(gates, 1))


class Judge:
    """Compares a candidate with a baseline by gates.

    It is given each request's outcome once (``observe``), and may be given requests that take long before they end
    (``observe_running``); or counts that others have taken (``add``). Outcomes are counted some at a time, and before
    anything else is done or asked for: nothing depends on when.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        *,
        alpha: float = 0.05,
        beta: float = 0.05,
        least_requests: int = 100,
        window_ns: int = 300_000_000_000,
        burst_ns: int = 20_000_000,
    ) -> None:
        """Judge by ``gates``.

        ``least_requests`` is how many the candidate must have had before it is promoted. ``window_ns`` is how often
        thresholds are computed anew. Bad events within ``burst_ns`` count as one together, at most; 0: each counts.
        """
        if not gates:
            raise ValueError("a judge without gates could decide nothing; the default is " + ", ".join(DEFAULT_GATES))
        if not (0 < alpha < 0.5 and 0 < beta < 0.5):
            raise ValueError(f"alpha is {alpha} and beta is {beta}; both are more than 0 and less than 0.5")
        self.gates = tuple(gates)
        self.alpha, self.beta, self.least_requests = alpha, beta, least_requests
        self._window_ns, self._burst_ns = window_ns, burst_ns
        self._events: list[RateGate | TailGate] = [gate for gate in gates if not isinstance(gate, LimitGate)]
        self._counts = [EventCounts(burst_ns) for _ in self._events]
        learned = list(dict.fromkeys(pair for gate in self._events for pair in gate.learned))
        self._thresholds = BaselineThresholds(learned)
        self._tests = [GateTest(gate, learned) for gate in self._events]
        self._limits = [GaugeLimit(gate) for gate in gates if isinstance(gate, LimitGate)]
        self._load = GaugeLimit(LimitGate(LOAD, LOAD, False, _LOAD_RATIO - 1, relative=True))
        self._gross = GrossFailure(alpha * _GROSS_SHARE)
        self._boundary = log_boundary(alpha, len(self._events))
        self._safe = -math.log(beta)
        self._arrived: dict[float, list[int]] = {}
        """Requests without sticky key by probability: of the candidate, of the baseline."""
        self._requests = [0, 0]
        self._unmatched = [0, 0]
        """Requests of the candidate that no threshold of the baseline fits, and all to which one should."""
        self._latencies: dict[str, tuple[LatencyCounts, LatencyCounts]] = {
            gate.field: (LatencyCounts(), LatencyCounts()) for gate in self._events if isinstance(gate, TailGate)
        }
        self._window_began: int | None = None
        self._last_ns = 0
        self._rolled_back = ""
        self._waiting: list[Outcome] = []
        """Outcomes that are not counted yet."""
        self._waiting_counted: list[int] = []
        """What was counted of each of them while it was under way."""
        self._least_patience: tuple[object, float] = None, math.inf
        """The thresholds that it was computed from, and the least ``patience_us``."""
        self.on_counted: Callable[[OutcomeBatch], None] = _ignored
        """Called with outcomes when they are counted."""

    def observe(self, outcome: Outcome, counted: int = 0) -> None:
        """Take the end of a request. ``counted`` is what ``observe_running`` has returned for it, if it was called."""
        self._waiting.append(outcome)
        self._waiting_counted.append(counted)
        if len(self._waiting) >= _BATCH:
            self.count()

    def count(self) -> None:
        """Count the outcomes that are not counted yet."""
        while waiting := self._waiting:
            self._advance(waiting[0].at_ns)
            size = self._before_thresholds_change(waiting)
            batch = OutcomeBatch(waiting[:size], self._waiting_counted[:size])
            self._waiting, self._waiting_counted = waiting[size:], self._waiting_counted[size:]
            self._last_ns = max(self._last_ns, int(batch.at_ns.max()))
            self._count(batch)
            self.on_counted(batch)

    def _before_thresholds_change(self, waiting: Sequence[Outcome]) -> int:
        """Return how many outcomes can be counted together."""
        assert self._window_began is not None
        room, end_ns = self._thresholds.room, self._window_began + self._window_ns
        if len(waiting) <= room and waiting[-1].at_ns < end_ns:
            return len(waiting)
        learned = 0
        for number, outcome in enumerate(waiting):
            if number and outcome.at_ns >= end_ns:
                return number
            learned += not outcome.candidate and outcome.error in ("", "timeout")
            if learned == room:
                return number + 1
        return len(waiting)

    def _count(self, batch: OutcomeBatch) -> None:
        judged, candidate = batch.judged, batch.candidate
        requests = int(np.count_nonzero(judged & candidate))
        self._requests[0] += requests
        self._requests[1] += int(np.count_nonzero(judged)) - requests
        for group, count in batch.sizes(batch.judged_without_key).items():
            _, probability, is_candidate = batch.groups[group]
            self._arrived.setdefault(probability, [0, 0])[0 if is_candidate else 1] += count
        for outcome in batch.outcomes if not self._gross.looked else ():
            if 0.0 < outcome.probability < 1.0:
                self._gross.observe(outcome.candidate, outcome.error in FAILED, outcome.cluster)
        self._compare(batch, batch.at_ns.tolist(), ended=True)
        timed = batch.timed & candidate, batch.timed & ~candidate
        for field, arms in self._latencies.items():
            row = LATENCIES.index(field)
            for counts, where in zip(arms, timed, strict=True):
                counts.add(batch.buckets_where(row, where))
        self._thresholds.learn(batch)

    def observe_running(self, requests: Sequence[tuple[Outcome, int]]) -> list[int]:
        """Take requests that are still under way: ``at_ns`` is now, their latencies are what has passed so far.

        A request over a threshold is bad from then on, however late it ends, so a candidate does not win by not
        answering. Requests that arrived apart count apart, although they are looked at together: pass them in the order
        of their arrival, with what was returned for them before, or 0. Return what is counted of each.
        """
        self.count()
        if not requests:
            return []
        outcomes, counted = zip(*requests, strict=True)
        batch = OutcomeBatch(outcomes, counted)
        self._advance(int(batch.at_ns.max()))
        # When it became too slow, and not when that is seen.
        patience = np.array([self.patience_us(stratum) for stratum, _, _ in batch.groups])[batch.group]
        late_ns = np.maximum(batch.latencies[0] - patience, 0.0) * 1000
        return self._compare(batch, (batch.at_ns - late_ns.astype(np.int64)).tolist(), ended=False)

    def patience_us(self, stratum: Stratum) -> float:
        """Return after how long a request under way should be given to ``observe_running``; infinity: never."""
        self.count()
        known = self._thresholds.of(stratum, math.inf)
        return min((test.patience_us(known) for test in self._tests), default=math.inf)

    def least_patience_us(self) -> float:
        """Return the least ``patience_us`` of all classes."""
        self.count()
        in_force = self._thresholds.in_force
        if self._least_patience[0] is not in_force:
            self._least_patience = in_force, min(map(self.patience_us, [*in_force, Stratum()]))
        return self._least_patience[1]

    def gauge(self, name: str, candidate: float, baseline: float, now_ns: int) -> None:
        """Take a reading of a gauge: of a gate that has a hard limit, or ``load``. NaN: not known."""
        self.count()
        self._advance(now_ns)
        if name == LOAD and max(candidate, baseline) >= 1:
            self._load.read(max(candidate, baseline), min(candidate, baseline), now_ns)
        for limit in self._limits:
            if limit.gate.name == name:
                limit.read(candidate, baseline, now_ns)

    def add(self, gate: str, rows: Iterable[CountRow], now_ns: int) -> None:
        """Add counts that others have taken since the last call: differences of what their ``counts`` returned."""
        self.count()
        self._advance(now_ns)
        names = [each.text for each in self._events]
        if gate not in names:
            raise ValueError(f"counts of {gate!r}, which is none of the gates {', '.join(names)}")
        index = names.index(gate)
        judged = [row for row in rows if 0.0 < row.probability < 1.0]
        for row in judged:
            self._counts[index].add(row)
        bad, others_bad, requests, others = total(judged)
        if index == 0:
            self._requests[0] += requests
            self._requests[1] += others
        event = self._events[index]
        if isinstance(event, RateGate) and event.name == "errors":
            self._gross.add(bad, requests, others_bad, others)

    def counts(self) -> dict[str, list[CountRow]]:
        """Return the counts of each gate, to be exported and added to those of other replicas."""
        self.count()
        for counts in self._counts:
            counts.close_burst_before(self._last_ns)
        return {gate.text: counts.rows() for gate, counts in zip(self._events, self._counts, strict=True)}

    def begin_step(self, now_ns: int) -> None:
        """Note that weights change: what the candidate did so far no longer excuses what it does from now on."""
        self.count()
        self._advance(now_ns)
        self._begin_window(now_ns)
        self._gross.begin_step()

    def _advance(self, now_ns: int) -> None:
        self._last_ns = max(self._last_ns, now_ns)
        if self._window_began is None:
            self._window_began = now_ns
        elif now_ns - self._window_began >= self._window_ns:
            self._begin_window(now_ns)

    def _begin_window(self, now_ns: int) -> None:
        self._window_began = now_ns
        self._thresholds.end_window(now_ns)
        for counts in self._counts:
            counts.begin_window()

    def _compare(self, batch: OutcomeBatch, at_ns: Sequence[int], *, ended: bool) -> list[int]:
        """Count requests for each gate that can say whether they are bad; return for which they are, as bits.

        ``at_ns`` is when they were bad.
        """
        thresholds = self._thresholds.of_all(batch)
        judged = batch.judged
        rows = [(stratum.before_assignment, probability, arm) for stratum, probability, arm in batch.groups]
        counted = np.zeros(batch.size, np.int64) if batch.counted is None else batch.counted
        for index, (test, counts) in enumerate(zip(self._tests, self._counts, strict=True)):
            bad, known = test.bad(batch, thresholds, ended=ended)
            fresh = bad & judged
            if batch.counted is not None:
                before = (counted >> index & 1).astype(bool)
                fresh &= ~before
            if ended:
                exposed = judged
                if not known.all():
                    unmatched = test.unmatched(batch, thresholds, self._thresholds) & ~known & judged & batch.candidate
                    self._unmatched[0] += int(np.count_nonzero(unmatched))
                    exposed = judged & (known if batch.counted is None else known | before)
                self._unmatched[1] += int(np.count_nonzero(exposed & batch.candidate))
                for group, count in batch.sizes(exposed).items():
                    counts.exposed(*rows[group], count)
            for place in fresh.nonzero()[0].tolist():
                stratum, probability, candidate = rows[batch.group[place]]
                counts.bad(stratum, probability, candidate, at_ns[place], batch.clusters[place])
            if not ended:
                counted = counted | fresh.astype(np.int64) << index
        found: list[int] = counted.tolist()
        return found

    def verdict(self, now_ns: int) -> Verdict:
        """Return the decision at this time, with its numbers. May be called at any time and as often as one likes."""
        self.count()
        self._advance(now_ns)
        gates: list[GateVerdict] = []
        holds: list[str] = []
        tests, limits = iter(zip(self._events, self._counts, strict=True)), iter(self._limits)
        for gate in self.gates:
            if isinstance(gate, LimitGate):
                gates.append(self._limit_verdict(next(limits), now_ns))
            else:
                gates.append(self._event_verdict(*next(tests), holds))
        missing = self._missing()
        holds += missing
        warnings = missing + self._warnings()
        if self._requests[0] < self.least_requests:
            holds.append(f"the candidate has had {self._requests[0]} of at least {self.least_requests} requests")
        if not self._rolled_back:
            against = [f"{each.gate}: {each.reason}" for each in gates if each.decision is Decision.ROLL_BACK]
            self._rolled_back = self._gross.reason or (against[0] if against else "")
        if self._rolled_back:
            decision, reason = Decision.ROLL_BACK, self._rolled_back
        elif all(each.decision is Decision.NOT_WORSE for each in gates) and not holds:
            decision, reason = Decision.NOT_WORSE, "the candidate is not worse by any gate"
        else:
            decision = Decision.CONTINUE
            open_gates = [each.gate for each in gates if each.decision is Decision.CONTINUE]
            reason = f"not yet decided: {', '.join(open_gates)}" if open_gates else holds[0]
        return Verdict(
            decision, reason, tuple(gates), tuple(holds), tuple(warnings), self._requests[0], self._requests[1], now_ns
        )

    def _event_verdict(self, gate: RateGate | TailGate, counts: EventCounts, holds: list[str]) -> GateVerdict:
        counts.close_burst_before(self._last_ns)
        candidate, baseline, probabilities = counts.arrays()
        bad, others_bad, requests, others = counts.totals()
        worse = not_worse = 0.0
        worst, suspected = "", False
        if probabilities.size:
            found = gate_evidence(
                candidate,
                baseline,
                probabilities,
                np.array(float(bad)),
                np.array(float(requests)),
                tolerated=gate.tolerated,
                floor=gate.floor,
                first=counts.first,
            )
            worse, not_worse, strata = float(found.worse), float(found.not_worse), found.strata
            index = int(strata.argmax())
            if strata[index] > 0:
                worst = counts.strata[index].label
            suspected = bool(strata[index] > SUSPICION)
        if worse >= self._boundary and candidate.sum() >= LEAST_BAD:
            decision = Decision.ROLL_BACK
        elif not_worse >= self._safe:
            decision = Decision.NOT_WORSE
        else:
            decision = Decision.CONTINUE
        if suspected and decision is not Decision.ROLL_BACK:
            holds.append(f"{gate.text}: it looks worse for {worst}, which is not certain")
        failing = isinstance(gate, RateGate) and gate.name == "errors" and others_bad > _INCIDENT * others
        if failing and others_bad >= _INCIDENT_LEAST:
            holds.append(f"{others_bad} of {others} requests to the baseline fail: it has an incident of its own")
        latencies = self._latencies[gate.field] if isinstance(gate, TailGate) else None
        figures = EventFigures(
            self.alpha,
            (max(requests, bad), max(others, others_bad)),  # some that are bad may be still under way
            (bad, others_bad),
            (candidate.sum(axis=(0, 1)), baseline.sum(axis=(0, 1)), probabilities),
            gate.quantile if isinstance(gate, TailGate) else 0.0,
            None if latencies is None else (latencies[0].copy(), latencies[1].copy()),
            worst if len(counts.strata) > 1 else "",
        )
        return GateVerdict(
            gate.text, decision, figures, worse / _LN10, self._boundary / _LN10, not_worse / _LN10, self._safe / _LN10,
            gate.tolerated, worst,
        )  # fmt: skip

    def _limit_verdict(self, limit: GaugeLimit, now_ns: int) -> GateVerdict:
        known = limit.known(now_ns)
        if limit.violated:
            decision = Decision.ROLL_BACK
            candidate, baseline = (gauge_text(limit.gate.name, each) for each in (limit.candidate, limit.baseline))
            reason = f"{candidate} in the candidate, {baseline} in the baseline"
        elif not known:
            decision, reason = Decision.CONTINUE, "no reading in the last minute"
        else:
            decision = Decision.CONTINUE if limit.violations else Decision.NOT_WORSE
            now = gauge_text(limit.gate.name, limit.candidate)
            reason = f"{now}, {limit.violations} of the last readings beyond the limit"
        return GateVerdict(limit.gate.text, decision, LimitFigures(reason, limit.candidate, limit.baseline))

    def _missing(self) -> list[str]:
        """Return what the judge does not get to see: reasons not to promote."""
        missing = []
        arrived = np.array(list(self._arrived.values()), dtype=float).reshape(-1, 2)
        probabilities = np.array(list(self._arrived))
        if arrived.size and log_mismatch(arrived[:, 0], arrived[:, 1], probabilities) >= _MISMATCH:
            expected = float((arrived.sum(axis=1) * probabilities).sum())
            missing.append(
                f"{arrived[:, 0].sum():.0f} requests to the candidate have ended where {expected:.0f} are expected: "
                f"outcomes of one arm are missing"
            )
        unmatched, matched = self._unmatched
        if unmatched > _UNMATCHED * (matched + unmatched) and matched + unmatched >= _UNMATCHED_LEAST:
            missing.append(
                f"{unmatched} of {matched + unmatched} latencies of the candidate are of a class that the baseline has "
                f"too few requests of: is the candidate's prefix cache cold?"
            )
        return missing

    def _warnings(self) -> list[str]:
        warnings = []
        if self._load.violated:
            warnings.append(
                f"the arms are not comparable: one has {self._load.candidate:g} requests per instance under way, the "
                f"other {self._load.baseline:g}; give them instances in proportion to their weights"
            )
        uncounted = sum(counts.uncounted for counts in self._counts)
        if uncounted:
            warnings.append(f"{uncounted} bad events of sticky keys were not counted: there are too many keys")
        return warnings

    def to_json(self) -> dict[str, Any]:
        """Return the whole state. Times are relative to the last event."""
        self.count()
        now = self._last_ns
        return {
            "gates": [gate.text for gate in self.gates],
            "alpha": self.alpha,
            "beta": self.beta,
            "least_requests": self.least_requests,
            "window_ns": self._window_ns,
            "burst_ns": self._burst_ns,
            "counts": [counts.to_json() for counts in self._counts],
            "thresholds": self._thresholds.to_json(now),
            "limits": [limit.to_json(now) for limit in self._limits],
            "load": self._load.to_json(now),
            "gross": self._gross.to_json(),
            "arrived": [[probability, *arms] for probability, arms in self._arrived.items()],
            "requests": self._requests,
            "unmatched": self._unmatched,
            "latencies": {field: [each.to_json() for each in arms] for field, arms in self._latencies.items()},
            "window_age_ns": None if self._window_began is None else now - self._window_began,
            "rolled_back": self._rolled_back,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any], now_ns: int) -> Judge:
        """Return a judge with the state of another, as if that one's last event had been at ``now_ns``.

        Raise ``ValueError`` for what is no such state.
        """
        try:
            return cls._restored(state, now_ns)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the saved state of the judge cannot be read: {error!r}") from None

    @classmethod
    def _restored(cls, state: Mapping[str, Any], now_ns: int) -> Judge:
        judge = cls(
            [parse_gate(text) for text in state["gates"]],
            alpha=state["alpha"],
            beta=state["beta"],
            least_requests=state["least_requests"],
            window_ns=state["window_ns"],
            burst_ns=state["burst_ns"],
        )
        judge._last_ns = now_ns
        for counts, saved in zip(judge._counts, state["counts"], strict=True):
            counts.restore(saved)
        judge._thresholds.restore(state["thresholds"], now_ns)
        for limit, saved in zip(judge._limits, state["limits"], strict=True):
            limit.restore(saved, now_ns)
        judge._load.restore(state["load"], now_ns)
        judge._gross.restore(state["gross"])
        judge._arrived = {float(row[0]): [int(row[1]), int(row[2])] for row in state["arrived"]}
        judge._requests = [int(each) for each in state["requests"]]
        judge._unmatched = [int(each) for each in state["unmatched"]]
        for field, arms in state["latencies"].items():
            first, second = map(LatencyCounts.of_json, arms)
            judge._latencies[field] = first, second
        age = state["window_age_ns"]
        judge._window_began = None if age is None else now_ns - int(age)
        judge._rolled_back = state["rolled_back"]
        return judge


def _ignored(_batch: OutcomeBatch) -> None:
    """Do nothing: nobody else counts."""
