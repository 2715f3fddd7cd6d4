"""A rollout with what is known of it: its judge, counts of both versions, differences, and documents of all this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nerite.config.rollout_spec import RolloutSpec, spec_of
from nerite.config.sticky_key import sticky_keys
from nerite.judge.counts import CountRow, difference
from nerite.judge.gates import parse_gate
from nerite.judge.judge import LOAD, Judge
from nerite.judge.outcome import Outcome, Stratum
from nerite.judge.outcome_batch import OutcomeBatch
from nerite.judge.verdict import Decision, Verdict
from nerite.rollouts.arm_outcomes import ArmOutcomes
from nerite.rollouts.evidence_curve import EvidenceCurve
from nerite.rollouts.fleet_order import FleetLead
from nerite.rollouts.recording import RolloutRecording
from nerite.rollouts.rollout import Rollout, RolloutFindings, RolloutState
from nerite.rollouts.webhook import shown_url
from nerite.routes.table import RequestUnderWay
from nerite.scheduling.weighted_route import RouteArm, RouteShadow, WeightedRoute

MAX_DIFFERENCES: Final = 100
"""Differences between the versions that are kept and shown."""
_SHADOWED: Final = 20
"""Requests to a shadow after which it is rolled back if it has failed half of them."""
_LEAST_LOAD: Final = 2.0
"""Requests per instance below which it does not matter which version has more."""


class ArmGauges(NamedTuple):
    """Readings of a version that are not of single requests; NaN for what is not known."""

    kv_headroom: float = math.nan
    """Free share of the KV cache."""
    memory: float = math.nan
    """Bytes."""
    restarts: float = math.nan


class RolloutRun:
    """One rollout of a model. Given the time and how requests end; does no I/O."""

    def __init__(self, model: str, number: str, spec: RolloutSpec, started: str) -> None:
        """``number`` distinguishes the rollouts of a model; ``started`` is the time of day."""
        self.model = model
        self.id = number
        self.started = started
        self.rollout = Rollout(spec)
        self.text = ""
        """The last decision as a sentence."""
        self.judge = Judge([parse_gate(text) for text in spec.gates])
        self.judge.on_counted = self._count
        self.verdict: Verdict | None = None
        self._baseline = ArmOutcomes()
        self._candidate = ArmOutcomes()
        self.curve = EvidenceCurve()
        self.loaded_before = False
        """The candidate was loaded before the rollout, and stays loaded after it."""
        self._ready = {spec.baseline: True, spec.to: True}
        self.recording: RolloutRecording | None = None
        self.shadow: Mapping[str, Any] = {}
        """What the comparisons of the candidate's answers with those of the baseline have shown; empty without any."""
        self.differences: Sequence[Mapping[str, Any]] = ()
        self._restarts_before: dict[str, float] = {}
        self.lead: FleetLead | None = None
        """The fleet command that leads the rollout; None if the server decides itself."""
        self._counted_before: Mapping[str, list[CountRow]] = {}
        """By gate: what was counted before the server started."""

    @property
    def spec(self) -> RolloutSpec:
        """What the rollout is to do."""
        return self.rollout.spec

    @property
    def active(self) -> bool:
        """Whether the rollout has not ended."""
        return not self.rollout.state.is_end

    @property
    def winner(self) -> str:
        """The version that gets all requests once the rollout has ended."""
        return self.spec.to if self.rollout.state is RolloutState.PROMOTED else self.spec.baseline

    @property
    def loser(self) -> str:
        """The other version."""
        return self.spec.baseline if self.rollout.state is RolloutState.PROMOTED else self.spec.to

    @property
    def baseline(self) -> ArmOutcomes:
        """How the requests of the baseline have ended."""
        self.judge.count()
        return self._baseline

    @property
    def candidate(self) -> ArmOutcomes:
        """How the requests of the candidate have ended."""
        self.judge.count()
        return self._candidate

    def route(self) -> WeightedRoute:
        """Return the route with the present weights. The same callers stay together on every replica."""
        spec, weight, shadow = self.spec, self.rollout.weight, self.rollout.shadow
        return WeightedRoute(
            self.model,
            (RouteArm(self.model, spec.baseline, 100.0 - weight), RouteArm(self.model, spec.to, weight)),
            sticky_keys(spec.sticky),
            f"{self.model}:{spec.baseline}:{spec.to}",
            RouteShadow(RouteArm(self.model, spec.to, 0), shadow / 100) if shadow else None,
        )

    def answer_of(self, version: str) -> Callable[[bool], None]:
        """Return what takes the answer whether a version is ready."""

        def take(ready: bool) -> None:
            self._ready[version] = ready

        return take

    @property
    def ready(self) -> bool:
        """Whether the candidate can serve, or the baseline cannot either: then the candidate is not the cause."""
        return self._ready[self.spec.to] or not self._ready[self.spec.baseline]

    def observe(self, outcome: Outcome, counted: int = 0) -> None:
        """Take how a request ended, until the rollout ends: what the loser has then moves to the winner.

        ``counted`` is what was counted of it while it was under way.
        """
        if self.active:
            self.judge.observe(outcome, counted)

    def _count(self, batch: OutcomeBatch) -> None:
        self._candidate.count(batch, batch.candidate)
        self._baseline.count(batch, ~batch.candidate)
        if self.recording is not None:
            for outcome in batch.outcomes:
                self.recording.outcome(outcome)

    def look_under_way(self, requests: Iterable[RequestUnderWay], now_ns: int) -> None:
        """Count requests that are already slower than a gate accepts, so that hanging is not better than answering."""
        judge = self.judge
        least_ns = judge.least_patience_us() * 1000
        patience: dict[Stratum, float] = {}
        late = []
        for request in requests:
            if now_ns - request.arrived_ns > least_ns:
                outcome = request.outcome(now_ns)
                stratum = outcome.stratum
                if stratum not in patience:
                    patience[stratum] = judge.patience_us(stratum)
                if outcome.latency_us > patience[stratum]:
                    late.append((outcome, request))
        late.sort(key=lambda each: -each[0].latency_us)  # in the order of their arrival
        counted = judge.observe_running([(outcome, request.counted) for outcome, request in late])
        for (_, request), count in zip(late, counted, strict=True):
            request.counted = count

    def gauge(self, candidate: ArmGauges, baseline: ArmGauges, now_ns: int) -> None:
        """Take readings of both versions; restarts count from the first reading."""
        for name in ArmGauges._fields:
            values = [getattr(candidate, name), getattr(baseline, name)]
            if name == "restarts":
                values = [
                    value - self._restarts_before.setdefault(arm, value)
                    for arm, value in zip(("candidate", "baseline"), values, strict=True)
                ]
            self.judge.gauge(name, values[0], values[1], now_ns)
            if self.recording is not None and not all(map(math.isnan, values)):
                self.recording.gauge(name, values[0], values[1], now_ns)

    def load(self, candidate: float, baseline: float, now_ns: int) -> None:
        """Take the number of requests that each version has per instance: with unequal load latencies differ, too."""
        if max(candidate, baseline) >= _LEAST_LOAD:
            self.judge.gauge(LOAD, candidate, baseline, now_ns)

    def begin_step(self, now_ns: int) -> None:
        """Note that the weights change."""
        self.judge.begin_step(now_ns)
        if self.recording is not None:
            self.recording.step(self.rollout.step + 1, now_ns)

    def findings(self, now_ns: int) -> RolloutFindings:
        """Ask the judge; return what is known now."""
        verdict = self.verdict = self.judge.verdict(now_ns)
        if self.active:
            self.curve.note(now_ns, self.rollout.weight, verdict.gates)
        if self.lead is not None and self.lead.leads(now_ns):
            return RolloutFindings(self.candidate.answered)
        compared = self.shadow.get("compared", {})
        shadowed = sum(compared.values())
        agreeing = compared.get("equal", 0) + compared.get("close", 0)
        return RolloutFindings(
            self.candidate.answered,
            self.ready,
            self._failing_shadow() or (verdict.reason if verdict.decision is Decision.ROLL_BACK else ""),
            verdict.reason if verdict.decision is Decision.NOT_WORSE else "",
            shadowed,
            f"{agreeing} of {shadowed} answers agreed",
        )

    def _failing_shadow(self) -> str:
        """Return why the candidate is worse in the step in which it answers nobody; empty if it is not."""
        if not self.rollout.shadow:
            return ""
        compared, dropped = self.shadow.get("compared", {}), self.shadow.get("dropped", {})
        failed = compared.get("shadow_failed", 0) + dropped.get("timeout", 0)
        tried = sum(compared.values()) + dropped.get("timeout", 0)
        if tried < _SHADOWED or 2 * failed < tried:
            return ""
        return f"version {self.spec.to} failed {failed} of {tried} requests that version {self.spec.baseline} answered"

    def counts(self) -> dict[str, list[CountRow]]:
        """Return what was counted since the server started, by gate: for the sums of a fleet."""
        return {
            gate: difference(rows, self._counted_before.get(gate, [])) for gate, rows in self.judge.counts().items()
        }

    def evidence(self) -> dict[str, Any]:
        """Return the numbers that a decision is based on."""
        weight = self.rollout.weight
        verdict = {} if self.verdict is None else self.verdict.to_json()
        return {
            "arms": {
                "baseline": {"version": self.spec.baseline, "weight": 100 - weight, **self.baseline.figures()},
                "candidate": {"version": self.spec.to, "weight": weight, **self.candidate.figures()},
            },
            "judge": {"decision": verdict.get("decision", ""), "reason": verdict.get("reason", "")},
            "gates": verdict.get("gates", []),
            "holds": verdict.get("holds", []),
            "warnings": verdict.get("warnings", []),
            "shadow": dict(self.shadow),
        }

    def status(self) -> dict[str, Any]:
        """Return the document that clients get."""
        rollout, spec = self.rollout, self.spec
        return {
            "model": self.model,
            "id": self.id,
            "text": self.text,
            **rollout.status(),
            "shadowing": rollout.shadow > 0,
            "started": self.started,
            "elapsed": round(rollout.elapsed, 3),
            "in_step": round(rollout.in_step, 3),
            "step_requests": sum(self.shadow.get("compared", {}).values())
            if rollout.shadow
            else max(0, self.candidate.answered - rollout.requests_before),
            "spec": {**spec.as_json(), "webhook": shown_url(spec.webhook)},
            **self.evidence(),
            "differences": list(self.differences),
            "recording": "" if self.recording is None else str(self.recording.path),
            "ready": self.ready,
        }

    def as_json(self) -> dict[str, Any]:
        """Return everything that outlives a restart of the server; ``of_json`` restores it."""
        return {
            "id": self.id,
            "started": self.started,
            "text": self.text,
            "rollout": self.rollout.as_json(),
            "judge": self.judge.to_json(),
            "baseline": self.baseline.as_json(),
            "candidate": self.candidate.as_json(),
            "curve": self.curve.as_json(),
            "differences": list(self.differences),
            "loaded_before": self.loaded_before,
            "shadow": dict(self.shadow),
            "lead": None if self.lead is None else self.lead.as_json(),
        }

    @classmethod
    def of_json(cls, model: str, document: Mapping[str, Any], now_ns: int) -> RolloutRun:
        """Restore a rollout. Raises ``NeriteError`` or an exception of Python for a document of another form."""
        state = document["rollout"]
        run = cls(model, str(document["id"]), spec_of(state["spec"]), str(document["started"]))
        run.rollout = Rollout.of_json(state, run.spec)
        run.text = str(document["text"])
        run.judge = Judge.from_json(document["judge"], now_ns)
        run.judge.on_counted = run._count
        run.verdict = run.judge.verdict(now_ns)
        run._baseline = ArmOutcomes.of_json(document["baseline"])
        run._candidate = ArmOutcomes.of_json(document["candidate"])
        run.curve = EvidenceCurve.of_json(document["curve"])
        run.differences = [dict(each) for each in document["differences"][:MAX_DIFFERENCES]]
        run.loaded_before = bool(document["loaded_before"])
        run.shadow = dict(document.get("shadow", {}))
        if document.get("lead") is not None:
            run.lead = FleetLead.of_json(document["lead"], now_ns)
            run._counted_before = run.judge.counts()
        return run
