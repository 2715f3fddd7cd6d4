"""A rollout with what is known of it: its judge, counts of both versions, differences, and documents of all this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nerite.judge.gates import parse_gate
from nerite.judge.judge import LOAD, Judge
from nerite.judge.outcome import Outcome
from nerite.judge.verdict import Decision, Verdict
from nerite.rollouts.arm_outcomes import ArmOutcomes
from nerite.rollouts.recording import RolloutRecording
from nerite.rollouts.rollout import Rollout, RolloutFindings, RolloutState
from nerite.rollouts.spec import RolloutSpec, spec_of, sticky_keys
from nerite.rollouts.webhook import shown_url
from nerite.routes.table import RequestUnderWay
from nerite.scheduling.weighted_route import RouteArm, WeightedRoute

MAX_DIFFERENCES: Final = 100
"""Differences between the versions that are kept and shown."""
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
        self.verdict: Verdict | None = None
        self.baseline = ArmOutcomes()
        self.candidate = ArmOutcomes()
        self.loaded_before = False
        """The candidate was loaded before the rollout, and stays loaded after it."""
        self._ready = {spec.baseline: True, spec.to: True}
        self.recording: RolloutRecording | None = None
        self.differences: Sequence[Mapping[str, Any]] = ()
        self._restarts_before: dict[str, float] = {}

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

    def route(self) -> WeightedRoute:
        """Return the route with the present weights. The same callers stay together on every replica."""
        spec, weight = self.spec, self.rollout.weight
        return WeightedRoute(
            self.model,
            (RouteArm(self.model, spec.baseline, 100.0 - weight), RouteArm(self.model, spec.to, weight)),
            sticky_keys(spec.sticky),
            f"{self.model}:{spec.baseline}:{spec.to}",
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
        if not self.active:
            return
        (self.candidate if outcome.candidate else self.baseline).observe(outcome)
        self.judge.observe(outcome, counted)
        if self.recording is not None:
            self.recording.outcome(outcome)

    def look_under_way(self, requests: Iterable[RequestUnderWay], now_ns: int) -> None:
        """Count requests that are already slower than a gate accepts, so that hanging is not better than answering."""
        found = [(request.outcome(now_ns), request) for request in requests]
        for outcome, request in sorted(found, key=lambda each: -each[0].latency_us):  # in the order of their arrival
            if outcome.latency_us > self.judge.patience_us(outcome.stratum):
                request.counted = self.judge.observe_running(outcome, request.counted)

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
        return RolloutFindings(
            self.candidate.answered,
            self.ready,
            verdict.reason if verdict.decision is Decision.ROLL_BACK else "",
            verdict.reason if verdict.decision is Decision.NOT_WORSE else "",
        )

    def evidence(self) -> dict[str, Any]:
        """Return the numbers that a decision is based on."""
        weight = self.rollout.weight
        verdict = {} if self.verdict is None else self.verdict.to_json()
        return {
            "arms": {
                "baseline": {"version": self.spec.baseline, "weight": 100 - weight, **self.baseline.figures()},
                "candidate": {"version": self.spec.to, "weight": weight, **self.candidate.figures()},
            },
            "gates": verdict.get("gates", []),
            "holds": verdict.get("holds", []),
            "warnings": verdict.get("warnings", []),
        }

    def status(self) -> dict[str, Any]:
        """Return the document that clients get."""
        rollout, spec = self.rollout, self.spec
        return {
            "model": self.model,
            "id": self.id,
            "state": str(rollout.state),
            "reason": str(rollout.reason or ""),
            "text": self.text,
            "from": spec.baseline,
            "to": spec.to,
            "steps": list(spec.steps),
            "step": rollout.step,
            "weight": rollout.weight,
            "started": self.started,
            "elapsed": round(rollout.elapsed, 3),
            "in_step": round(rollout.in_step, 3),
            "step_requests": max(0, self.candidate.answered - rollout.requests_before),
            "spec": {**spec.as_json(), "webhook": shown_url(spec.webhook)},
            **self.evidence(),
            "differences": list(self.differences),
            "recording": "" if self.recording is None else str(self.recording.path),
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
            "differences": list(self.differences),
            "loaded_before": self.loaded_before,
        }

    @classmethod
    def of_json(cls, model: str, document: Mapping[str, Any], now_ns: int) -> RolloutRun:
        """Restore a rollout. Raises ``NeriteError`` or an exception of Python for a document of another form."""
        state = document["rollout"]
        run = cls(model, str(document["id"]), spec_of(state["spec"]), str(document["started"]))
        run.rollout = Rollout.of_json(state, run.spec)
        run.text = str(document["text"])
        run.judge = Judge.from_json(document["judge"], now_ns)
        run.baseline = ArmOutcomes.of_json(document["baseline"])
        run.candidate = ArmOutcomes.of_json(document["candidate"])
        run.differences = [dict(each) for each in document["differences"][:MAX_DIFFERENCES]]
        run.loaded_before = bool(document["loaded_before"])
        return run
