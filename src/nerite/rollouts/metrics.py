"""Metrics of rollouts: both versions, every gate, the state and the decisions. docs/metrics.md describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from nerite.judge.counts import CountRow
from nerite.judge.verdict import GateVerdict
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.rollouts.arm_outcomes import ArmOutcomes
from nerite.rollouts.fleet_counts import count_labels
from nerite.rollouts.record import RolloutRecord
from nerite.rollouts.rollout import RolloutState


class _Arm(NamedTuple):
    weight: float
    outcomes: ArmOutcomes


ARMS: Final = MetricTable[_Arm]((
    Metric("nerite_rollout_weight", "gauge", "Share of the requests that a version gets, from 0 to 1",
           lambda arm: arm.weight / 100),
    Metric("nerite_rollout_requests_total", "counter", "Requests that have ended since the rollout began, by how",
           lambda arm: {end or "success": count for end, count in arm.outcomes.ends.items()}, "outcome"),
), labels=("model", "version", "arm"))  # fmt: skip

GATES: Final = MetricTable[GateVerdict]((
    Metric("nerite_rollout_evidence", "gauge",
           "Evidence that the candidate is worse or not worse than a gate accepts: logarithm (base 10) of an e-value",
           lambda gate: {"worse": gate.worse, "not_worse": gate.not_worse}, "kind"),
    Metric("nerite_rollout_evidence_boundary", "gauge", "Evidence from which on the judge decides",
           lambda gate: _finite({"worse": gate.worse_boundary, "not_worse": gate.not_worse_boundary}), "kind"),
), labels=("model", "gate"))  # fmt: skip

STATES: Final = MetricTable[RolloutRecord]((
    Metric("nerite_rollout_state", "gauge", "1 for the state that the last rollout of a model is in, 0 for others",
           lambda record: {str(state): int(_state(record) is state) for state in RolloutState}, "state"),
    Metric("nerite_rollout_step", "gauge", "Number of the present step of a rollout, from 1; 0 if none is under way",
           lambda record: 0 if record.active is None else record.active.rollout.step + 1),
    Metric("nerite_rollout_decisions_total", "counter", "Decisions on rollouts, by reason",
           lambda record: {str(reason): count for reason, count in record.decisions.items()}, "reason"),
), labels=("model",))  # fmt: skip

FLEET: Final = MetricTable[RolloutRecord]((
    Metric("nerite_rollout_fleet_info", "gauge", "1 for a rollout that a fleet command leads", lambda record: 1),
), labels=("model", "rollout", "boot"))  # fmt: skip

FLEET_COUNTS: Final = MetricTable[CountRow]((
    Metric("nerite_rollout_judged_total", "counter", "Requests that a gate has judged, since the server started",
           lambda row: {"candidate": row.candidate, "baseline": row.baseline}, "arm"),
    Metric("nerite_rollout_bad_total", "counter", "Requests that are bad by a gate, since the server started",
           lambda row: {"candidate": row.candidate_bad, "baseline": row.baseline_bad}, "arm"),
    Metric("nerite_rollout_bad_units_total", "counter",
           "Requests that are bad by a gate, those of one burst being at most one together",
           lambda row: {"candidate": row.candidate_units, "baseline": row.baseline_units}, "arm"),
), labels=("model", "rollout", "boot", "gate", "prompt", "tenant", "stream", "probability"))  # fmt: skip
"""Of rollouts that a fleet leads: ``fleet_counts`` reads them."""


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that are finite: a hard limit has no boundary for evidence."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _state(record: RolloutRecord) -> RolloutState | None:
    return None if record.run is None else record.run.rollout.state


def write(page: Page, records: Sequence[RolloutRecord], boot: str) -> None:
    """Write the metrics of these rollouts. ``boot`` distinguishes the process from others of the same server."""
    arms, gates, fleets, counts = [], [], [], []
    for record in records:
        run = record.active
        if run is not None:
            weight, spec = run.rollout.weight, run.spec
            for name, version, share, outcomes in (
                ("baseline", spec.baseline, 100 - weight, run.baseline),
                ("candidate", spec.to, weight, run.candidate),
            ):
                arms.append(ARMS.row(_Arm(share, outcomes), run.model, version, name))
            if run.lead is not None:
                fleets.append(FLEET.row(record, run.model, run.id, boot))
                counts += [
                    FLEET_COUNTS.row(row, run.model, run.id, boot, gate, *count_labels(row))
                    for gate, rows in run.counts().items()
                    for row in rows
                ]
            gates += [
                GATES.row(gate, run.model, gate.gate) for gate in (run.verdict.gates if run.verdict is not None else ())
            ]
    page.write(ARMS, arms)
    page.write(GATES, gates)
    page.write(FLEET, fleets)
    page.write(FLEET_COUNTS, counts)
    page.write(STATES, [STATES.row(record, record.model) for record in records])
