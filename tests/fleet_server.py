"""A replica of a fleet without a server, for tests of what leads it."""

from __future__ import annotations

from typing import Any

from nerite.rollouts.fleet import Replica
from nerite.rollouts.fleet_order import FleetLead, FleetOrder
from nerite.rollouts.rollout import RolloutReason, RolloutState
from nerite.rollouts.run import RolloutRun


class Server:
    """A replica without a server: does what it is told, as the controller does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.run: RolloutRun | None = None
        self.problem = ""
        self.declared: dict[str, Any] | None = None
        self.counts: list[list[Any]] = []
        self.blocked = ""
        self.checks = True
        self.ready = True

    def hear(self, order: FleetOrder, now: int) -> Replica:
        if self.problem:
            return Replica(self.problem)
        order = FleetOrder.of_json(order.as_json())
        if self.run is None or self.run.id != order.id:
            self.declared = order.rollout.spec.as_json() if order.declared else self.declared
            self.run = RolloutRun("m", order.id, order.rollout.spec, order.started)
            self.run.lead = FleetLead(order, now)
        lead, rollout = self.run.lead, self.run.rollout
        assert lead is not None
        lead.hear(order, now)
        if self.blocked and rollout.state is RolloutState.CHECKING:
            self.run.text = rollout.block(self.blocked).text
        lead.checked = lead.checked or self.checks
        if lead.checked and (order.rollout.state.is_end or not rollout.state.is_end):
            rollout.follow(order.rollout, order.text)
        return self.replica(now)

    def replica(self, now: int) -> Replica:
        if self.run is None:
            return Replica()
        return Replica.of_status(self.status(now))

    def status(self, now: int) -> dict[str, Any]:
        """Return what it tells of its rollout."""
        assert self.run is not None
        fleet = None
        if self.run.lead is not None:
            fleet = {**self.run.lead.status(now), "boot": f"boot of {self.name}", "counts": self.counts}
        return {**self.run.status(), "ready": self.ready, "declared": self.declared, "fleet": fleet}

    @property
    def weight(self) -> float:
        return 0.0 if self.run is None else self.run.rollout.weight

    def end(self, state: RolloutState, reason: RolloutReason, text: str) -> None:
        assert self.run is not None
        self.run.text = self.run.rollout.end(state, reason, text).text
