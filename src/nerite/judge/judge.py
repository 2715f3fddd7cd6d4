"""The judge of a rollout: takes outcomes of both arms, and says at any time whether the candidate is worse.

Guarantees, at whatever times one looks, while load drifts, weights change and the mix of requests changes:

- a candidate that is within all margins is rolled back with probability at most ``alpha``;
- a candidate that exceeds the margin of a gate is promoted with probability at most ``beta``;
- without data the decision is to continue, never to promote nor to roll back.

What they assume is in ``docs/decisions/0021-rollout-judge.md``. A judge has no clock and does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from nerite.judge.confidence import UNKNOWN, Interval, bucket_of, quantile_interval, rate_interval
from nerite.judge.counts import CountRow, EventCounts, total
from nerite.judge.evidence import gate_evidence, log_mismatch, risk_interval
from nerite.judge.gates import METRICS, Gate, LimitGate, RateGate, TailGate, parse_gate
from nerite.judge.limits import GaugeLimit, GrossFailure, gauge_text
from nerite.judge.outcome import Outcome, Stratum
from nerite.judge.thresholds import BaselineThresholds
from nerite.judge.verdict import ArmCounts, Decision, GateVerdict, Verdict

DEFAULT_GATES: Final = ("errors", "p99", "ttft_p95", "itl")
_GROSS_SHARE: Final = 0.1
"""Of ``alpha``, for the rule of gross failure. The other gates divide the rest equally."""
LEAST_BAD: Final = 3.0
"""Units of bad events of the candidate without which it is not rolled back, whatever the e-value is."""
SUSPICION: Final = math.log(3.0)
"""Log e-value of harm in one stratum above which the candidate is not promoted."""
_MISMATCH: Final = math.log(1000.0)
_UNMATCHED: Final = 0.2
_UNMATCHED_LEAST: Final = 50
_FAILED: Final = frozenset({"error", "timeout"})
_MISSED: Final = frozenset({"error", "timeout", "refused"})
_LN10: Final = math.log(10.0)
LOAD: Final = "load"
"""A gauge that is no gate: requests under way per instance. Arms are comparable if they have about the same."""
_LOAD_RATIO: Final = 1.5


def log_boundary(alpha: float, gates: int) -> float:
    """Return the log e-value at which each of so many gates rolls back."""
    return -math.log(alpha * (1 - _GROSS_SHARE) / max(gates, 1))


class Judge:
    """Compares a candidate with a baseline by gates.

    It is given each request's outcome once (``observe``), and may be given a request that takes long before it ends
    (``observe_running``); or counts that others have taken (``add``).
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
        self._tests = [_Test(gate, learned) for gate in self._events]
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
        self._latencies: dict[str, tuple[dict[int, float], dict[int, float]]] = {
            gate.field: ({}, {}) for gate in self._events if isinstance(gate, TailGate)
        }
        self._window_began: int | None = None
        self._last_ns = 0
        self._rolled_back = ""

    def observe(self, outcome: Outcome, counted: int = 0) -> None:
        """Take the end of a request. ``counted`` is what ``observe_running`` has returned for it, if it was called."""
        self._advance(outcome.at_ns)
        candidate, probability = outcome.candidate, outcome.probability
        if 0.0 < probability < 1.0:
            self._requests[0 if candidate else 1] += 1
            if not outcome.cluster:
                self._arrived.setdefault(probability, [0, 0])[0 if candidate else 1] += 1
            self._gross.observe(candidate, outcome.error in _FAILED, outcome.cluster)
            self._compare(outcome, counted, ended=True)
        answered = not outcome.error
        for field, histograms in self._latencies.items():
            value: float = getattr(outcome, field)
            if value > 0.0 and (answered or outcome.error == "timeout"):
                histogram = histograms[0 if candidate else 1]
                bucket = bucket_of(value)
                histogram[bucket] = histogram.get(bucket, 0) + 1
        if not candidate and (answered or outcome.error == "timeout"):
            self._thresholds.learn(outcome)

    def observe_running(self, outcome: Outcome, counted: int = 0) -> int:
        """Take a request that is still under way: ``at_ns`` is now, its latencies are what has passed so far.

        A request over a threshold is bad from then on, however late it ends, so a candidate does not win by not
        answering. Requests that arrived apart count apart, although they are looked at together: pass them in the order
        of their arrival. Return what is counted of it, for the next call about this request.
        """
        self._advance(outcome.at_ns)
        return self._compare(outcome, counted, ended=False) if 0.0 < outcome.probability < 1.0 else counted

    def patience_us(self, stratum: Stratum) -> float:
        """Return after how long a request under way should be given to ``observe_running``; infinity: never."""
        known = self._thresholds.of(stratum, math.inf)
        return min((test.patience_us(known) for test in self._tests), default=math.inf)

    def gauge(self, name: str, candidate: float, baseline: float, now_ns: int) -> None:
        """Take a reading of a gauge: of a gate that has a hard limit, or ``load``. NaN: not known."""
        self._advance(now_ns)
        if name == LOAD and max(candidate, baseline) >= 1:
            self._load.read(max(candidate, baseline), min(candidate, baseline), now_ns)
        for limit in self._limits:
            if limit.gate.name == name:
                limit.read(candidate, baseline, now_ns)

    def add(self, gate: str, rows: Iterable[CountRow], now_ns: int) -> None:
        """Add counts that others have taken since the last call: differences of what their ``counts`` returned."""
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
        for counts in self._counts:
            counts.close_burst_before(self._last_ns)
        return {gate.text: counts.rows() for gate, counts in zip(self._events, self._counts, strict=True)}

    def begin_step(self, now_ns: int) -> None:
        """Note that weights change: what the candidate did so far no longer excuses what it does from now on."""
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

    def _compare(self, outcome: Outcome, counted: int, *, ended: bool) -> int:
        """Count the request for each gate that can say whether it is bad; return the gates for which it is."""
        thresholds = self._thresholds.of(outcome.stratum, outcome.at_ns - outcome.latency_us * 1000)
        stratum = outcome.stratum.before_assignment
        at_ns = outcome.at_ns
        if not ended:  # when it became too slow, and not when that is seen
            at_ns -= int(max(0.0, outcome.latency_us - self.patience_us(outcome.stratum)) * 1000)
        for index, test in enumerate(self._tests):
            bad = test.is_bad(outcome, thresholds, ended)
            bit = 1 << index
            if bad is None:
                if ended and outcome.candidate and test.unmatched(outcome, thresholds, self._thresholds):
                    self._unmatched[0] += 1
                if not (ended and counted & bit):
                    continue
            if ended:
                self._unmatched[1] += outcome.candidate
                self._counts[index].exposed(stratum, outcome.probability, outcome.candidate)
            if bad and not counted & bit:
                counted |= bit
                self._counts[index].bad(stratum, outcome.probability, outcome.candidate, at_ns, outcome.cluster)
        return counted

    def verdict(self, now_ns: int) -> Verdict:
        """Return the decision at this time, with its numbers. May be called at any time and as often as one likes."""
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
        rows = [row for row in counts.rows() if 0.0 < row.probability < 1.0]
        bad, others_bad, requests, others = total(rows)
        worse = not_worse = 0.0
        worst, suspected = "", False
        risk = UNKNOWN
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
            units, other_units = candidate.sum(axis=(0, 1)), baseline.sum(axis=(0, 1))
            risk = Interval(*risk_interval(units, other_units, probabilities, self.alpha))
            index = int(strata.argmax())
            if strata[index] > 0:
                worst = counts.strata[index].label
            suspected = bool(strata[index] > SUSPICION)
        enough = candidate.sum() >= LEAST_BAD
        if worse >= self._boundary and enough:
            decision = Decision.ROLL_BACK
        elif not_worse >= self._safe:
            decision = Decision.NOT_WORSE
        else:
            decision = Decision.CONTINUE
        if suspected and decision is not Decision.ROLL_BACK:
            holds.append(f"{gate.text}: it looks worse for {worst}, which is not certain")
        summaries = self._summary(gate, 0, bad, requests), self._summary(gate, 1, others_bad, others)
        reason = _in_words(gate, summaries, risk, worst if len(counts.strata) > 1 else "")
        return GateVerdict(
            gate.text, decision, reason, worse / _LN10, self._boundary / _LN10, not_worse / _LN10, self._safe / _LN10,
            *summaries, risk, gate.tolerated, worst,
        )  # fmt: skip

    def _summary(self, gate: RateGate | TailGate, arm: int, bad: int, requests: int) -> ArmCounts:
        value = UNKNOWN
        requests = max(requests, bad)  # some that are bad may be still under way
        if isinstance(gate, TailGate):
            value = quantile_interval(self._latencies[gate.field][arm], gate.quantile, self.alpha)
        return ArmCounts(requests, bad, rate_interval(bad, requests, self.alpha), value)

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
        values = (Interval(value, value, value) for value in (limit.candidate, limit.baseline))
        arms = [ArmCounts(value=value) for value in values]
        return GateVerdict(limit.gate.text, decision, reason, candidate=arms[0], baseline=arms[1])

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
            "latencies": {field: [list(each.items()) for each in arms] for field, arms in self._latencies.items()},
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
            first, second = ({int(bucket): float(count) for bucket, count in each} for each in arms)
            judge._latencies[field] = first, second
        age = state["window_age_ns"]
        judge._window_began = None if age is None else now_ns - int(age)
        judge._rolled_back = state["rolled_back"]
        return judge


class _Test:
    """Says of an outcome whether it is bad by one gate."""

    def __init__(self, gate: RateGate | TailGate, learned: Sequence[tuple[str, float]]) -> None:
        self._gate = gate
        self._scale = 1.0 + gate.margin if isinstance(gate, TailGate) else 1.0
        self._places = [(Outcome._fields.index(pair[0]), learned.index(pair)) for pair in gate.learned]
        self._bad_ends: frozenset[str] = frozenset()
        self._fixed: list[tuple[int, float]] = []
        if isinstance(gate, RateGate):
            ends = {"errors": _FAILED, "goodput": _MISSED}
            self._bad_ends = ends.get(gate.name, frozenset({gate.name}))
            self._fixed = [(Outcome._fields.index(field), limit) for field, limit in gate.objectives]
            if not self._fixed and not self._places:
                self.is_bad = self._is_bad_end  # type: ignore[method-assign]

    def _is_bad_end(self, outcome: Outcome, thresholds: tuple[float, ...] | None, ended: bool) -> bool | None:
        return outcome.error in self._bad_ends if ended else None

    def is_bad(self, outcome: Outcome, thresholds: tuple[float, ...] | None, ended: bool) -> bool | None:
        """Return None if it cannot be said: no threshold is known, or the request was given up before it."""
        if ended and outcome.error in self._bad_ends:
            return True
        for place, limit in self._fixed:
            if outcome[place] > limit:  # type: ignore[operator]
                return True
        known = bool(self._fixed)
        if thresholds is not None:
            scale = self._scale if outcome.candidate else 1.0
            for place, index in self._places:
                value: float = outcome[place]  # type: ignore[assignment]
                threshold = thresholds[index]
                if value > threshold * scale:
                    return True
                known = known or (value > 0.0 and threshold == threshold)
        return False if ended and known and not outcome.error else None

    def unmatched(self, outcome: Outcome, thresholds: tuple[float, ...] | None, known: BaselineThresholds) -> bool:
        """Return whether there are thresholds for other classes, and none for that of the outcome."""
        if not self._places or outcome.error:
            return False
        return any(
            outcome[place] > 0.0  # type: ignore[operator]
            and (thresholds is None or thresholds[index] != thresholds[index])
            and known.known(index)
            for place, index in self._places
        )

    def patience_us(self, thresholds: tuple[float, ...] | None) -> float:
        """Return the least time after which a request under way is bad."""
        token = METRICS["itl"]
        limits = [limit for place, limit in self._fixed if Outcome._fields[place] != token]
        if thresholds is not None:
            limits += [thresholds[index] for place, index in self._places if Outcome._fields[place] != token]
        return min((limit for limit in limits if not math.isnan(limit)), default=math.inf)


def _in_words(gate: RateGate | TailGate, arms: tuple[ArmCounts, ArmCounts], risk: Interval, worst: str) -> str:
    """Return the numbers of a gate in words."""
    candidate, baseline = arms
    if not candidate.requests:
        return "no request to the candidate could be compared yet"
    parts = []
    if isinstance(gate, TailGate) and not math.isnan(candidate.value.value + baseline.value.value):
        parts.append(f"{candidate.value.value / 1000:,.1f} ms against {baseline.value.value / 1000:,.1f} ms")
    parts.append(
        f"{candidate.bad:,} of {candidate.requests:,} requests bad ({candidate.rate.value:.2%}) against "
        f"{baseline.bad:,} of {baseline.requests:,} ({baseline.rate.value:.2%})"
    )
    if not math.isnan(risk.value):
        parts.append(f"relative risk {risk.value:.2g}, between {risk.low:.2g} and {risk.high:.2g}")
    if worst:
        parts.append(f"worst for {worst}")
    return "; ".join(parts)
