"""The rollout of a fleet: one decision for all replicas of a server. Given the time, reports and counts; does no I/O.

Each replica has a rollout with the id of the fleet's. It does what the last order of the fleet says, and decides
nothing by itself but a rollback, and that only while it hears nothing or the fleet sees no counts. What an operator
asks of one replica, and how one replica ends its rollout, holds for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from nerite.config.rollout_spec import RolloutSpec, WhenLost
from nerite.core.errors import Conflict, InvalidArgument
from nerite.judge.gates import LimitGate, parse_gate
from nerite.judge.judge import Judge
from nerite.judge.verdict import Decision, Verdict
from nerite.rollouts.fleet_counts import FleetCounts
from nerite.rollouts.fleet_order import FleetOrder, shared_spec
from nerite.rollouts.rollout import (
    Rollout,
    RolloutCommand,
    RolloutDecision,
    RolloutFindings,
    RolloutReason,
    RolloutState,
)

_SECOND: Final = 1_000_000_000
LOST_NS: Final = 60_000_000_000
"""Time for which a replica must be lost before ``WhenLost.ROLL_BACK`` applies."""
_COMPARING: Final = (RolloutState.RUNNING, RolloutState.PAUSED, RolloutState.INCONCLUSIVE)
_OTHERS_END: Final = {
    RolloutReason.WORSE: RolloutState.ROLLED_BACK,
    RolloutReason.NOT_READY: RolloutState.ROLLED_BACK,
    RolloutReason.OPERATOR: RolloutState.ABORTED,
    RolloutReason.SUPERSEDED: RolloutState.ABORTED,
}
"""How all end if one replica has ended its rollout for a reason."""


class Replica(NamedTuple):
    """One replica as it was last seen."""

    problem: str = ""
    """Why it could not be asked, or what it refused."""
    status: Mapping[str, Any] = {}
    """Of its last rollout; empty if it has none."""
    order: FleetOrder | None = None
    """The last order that it has; None if its last rollout was none of a fleet."""

    @classmethod
    def of_status(cls, status: Mapping[str, Any]) -> Replica:
        """Read the status that a replica has sent. Raises ``InvalidArgument``, ``LookupError`` or ``ValueError``."""
        fleet = status["fleet"]
        RolloutState(status["state"])
        return cls("", status, None if fleet is None else FleetOrder.of_json(fleet["order"]))

    @property
    def state(self) -> RolloutState | None:
        """State of its last rollout."""
        return RolloutState(self.status["state"]) if self.status else None

    @property
    def active(self) -> bool:
        """Whether it has a rollout that has not ended."""
        return self.state is not None and not self.state.is_end


def order_under_way(replicas: Mapping[str, Replica], spec: RolloutSpec) -> FleetOrder | None:
    """Return the newest order of the rollout that is under way on any replica; None if there is none.

    Raises ``Conflict`` if that is another rollout than ``spec`` asks for.
    """
    active = {name: replica for name, replica in replicas.items() if replica.active}
    for name, replica in active.items():
        if replica.order is None:
            raise Conflict(f"{name} has a rollout of its own, which is {replica.state}: promote or abort it first")
    orders = [replica.order for replica in replicas.values() if replica.order is not None]
    ids = {replica.order.id for replica in active.values() if replica.order is not None}
    if len(ids) > 1:
        raise Conflict(f"the replicas have different rollouts, {', '.join(sorted(ids))}: abort all but one of them")
    found = [order for order in orders if order.id in ids]
    if not found:
        return None
    newest = max(found, key=lambda order: order.age)
    if shared_spec(newest.rollout.spec) != shared_spec(spec):
        raise Conflict(
            f"a rollout to version {newest.rollout.spec.to} with other settings is under way since {newest.started}: "
            "start with the same settings to go on with it, or abort it on any replica"
        )
    return newest


def newest_order(replicas: Mapping[str, Replica]) -> FleetOrder | None:
    """Return the newest order that any replica has; None if there is none."""
    orders = [replica.order for replica in replicas.values() if replica.order is not None]
    return max(orders, key=lambda order: order.age, default=None)


def _next_term(replicas: Mapping[str, Replica]) -> int:
    return max((replica.order.term for replica in replicas.values() if replica.order is not None), default=0) + 1


class FleetRollout:
    """A rollout of all replicas."""

    def __init__(self, model: str, order: FleetOrder, when_lost: WhenLost = WhenLost.HOLD) -> None:
        """``order`` is that with which this command begins. Raises ``InvalidArgument``."""
        self.model = model
        self.rollout: Rollout = order.rollout
        self.text = order.text
        gates = [parse_gate(text) for text in self.rollout.spec.gates]
        judged = [gate for gate in gates if not isinstance(gate, LimitGate)]
        self._limits = [gate.text for gate in gates if isinstance(gate, LimitGate)]
        if not judged:
            raise InvalidArgument("the rollout of a fleet needs a gate that compares requests, such as errors or p99")
        self._judge = Judge(judged)
        self._gates = frozenset(gate.text for gate in judged)
        self._counts = FleetCounts()
        self.verdict: Verdict | None = None
        self.holds: Sequence[str] = ()
        """Why the rollout does not go on, apart from the evidence."""
        self.replicas: dict[str, Replica] = {}
        self._order = order
        self._when_lost = when_lost
        self._lost_at: dict[str, int] = {}
        self._seen: frozenset[str] = frozenset()
        """Label ``boot`` of the processes whose counts were read."""
        self._blind = "they were not read yet"
        self._blind_since: int | None = None
        self._answered: dict[str, str] = {}
        """By replica: the last wish that was carried out or refused."""
        self.refused: list[str] = []
        """Commands of operators that were refused since the last decision."""

    @classmethod
    def begin(
        cls,
        model: str,
        spec: RolloutSpec,
        replicas: Mapping[str, Replica],
        number: str,
        started: str,
        *,
        lease: float = 60.0,
        when_lost: WhenLost = WhenLost.HOLD,
    ) -> FleetRollout:
        """Go on with the rollout that is under way, or begin one with the id ``number``. Raises ``NeriteError``."""
        last = order_under_way(replicas, spec)
        term = _next_term(replicas)
        if last is None:
            order = FleetOrder(number, term, 1, started, Rollout(spec), lease=lease)
        else:  # the webhook is not kept by replicas
            rollout = Rollout.of_json(last.rollout.as_json(), spec)
            order = last._replace(term=term, sequence=1, rollout=rollout, lease=lease, answered="")
        return cls(model, order, when_lost)

    @classmethod
    def of_declaration(
        cls,
        model: str,
        spec: RolloutSpec,
        replicas: Mapping[str, Replica],
        number: str,
        started: str,
        *,
        lease: float,
        when_lost: WhenLost,
    ) -> FleetRollout:
        """Go on with the rollout that a cluster file asks for, also if it has ended, or begin it.

        What is declared is acted on once, as ``rollout.toml`` is. Raises ``Conflict`` while another rollout holds.
        """
        shared = shared_spec(spec)
        term = _next_term(replicas)
        last = newest_order(replicas)
        if last is not None and last.declares(spec):
            rollout = Rollout.of_json(last.rollout.as_json(), spec)
            order = last._replace(term=term, sequence=1, rollout=rollout, lease=lease, blind=False, answered="")
            return cls(model, order, when_lost)
        for name, replica in replicas.items():
            led = replica.order is not None and replica.order.declared
            if replica.active and not led:
                raise Conflict(f"{name} has a rollout of its own, which is {replica.state}: promote or abort it first")
            if replica.status and not led and replica.status.get("declared") == shared.as_json():
                raise Conflict(f"{name} has had another rollout since, which holds until the cluster file changes")
        order = FleetOrder(number, term, 1, started, Rollout(spec), lease=lease, declared=True)
        before = [replica for replica in replicas.values() if replica.status]
        if before and all(each.state is RolloutState.PROMOTED and each.status["to"] == spec.to for each in before):
            order = order._replace(text=f"version {spec.to} was promoted before")
            order.rollout.end(RolloutState.PROMOTED, RolloutReason.OPERATOR, order.text)
        return cls(model, order, when_lost)

    def overtaken(self, order: FleetOrder | None) -> str:
        """Return why an order of a replica shows that this one leads no more; empty if it does not."""
        if order is None or not order.declared or order.term <= self._order.term:
            return ""
        return "another router does" if order.declares(self.rollout.spec) else "a later cluster file asks for another"

    @property
    def id(self) -> str:
        """Id of the rollout."""
        return self._order.id

    @property
    def started(self) -> str:
        """Time of day when the rollout was started."""
        return self._order.started

    # What is seen

    def members(self, names: Iterable[str]) -> None:
        """Note which replicas there are; those that are no longer there do not count."""
        kept = dict.fromkeys(names)
        self.replicas = {name: self.replicas.get(name, Replica("was not asked yet")) for name in kept}
        self._lost_at = {name: at for name, at in self._lost_at.items() if name in kept}

    def see(self, name: str, replica: Replica, now_ns: int) -> None:
        """Take the report of a replica. Raises ``Conflict`` if another command leads by now."""
        if name not in self.replicas:
            return
        order = replica.order
        if order is not None and order.id == self.id and order.term > self._order.term:
            raise Conflict(f"another fleet command leads the rollout of '{self.model}' by now: {name} has heard of it")
        if replica.problem:
            self._lost_at.setdefault(name, now_ns)
            replica = self.replicas[name]._replace(problem=replica.problem)
        else:
            self._lost_at.pop(name, None)
        self.replicas[name] = replica

    def count(self, samples: Iterable[tuple[Mapping[str, str], float]], boots: Iterable[str], now_ns: int) -> None:
        """Take samples of the counters; ``boots`` are the processes that Prometheus has read lately."""
        self._seen, self._blind, self._blind_since = frozenset(boots), "", None
        self._order = self._order._replace(blind=False)
        # A sticky key may have been counted once on each replica.
        keys = max(1, len(self.replicas)) if self.rollout.spec.sticky else 1
        for gate, rows in self._counts.take(samples, keys).items():
            if gate in self._gates:
                self._judge.add(gate, rows, now_ns)

    def miss(self, problem: str, now_ns: int) -> None:
        """Note that counts could not be read. If that lasts as long as a lease, replicas watch by themselves."""
        self._blind = problem
        if self._blind_since is None:
            self._blind_since = now_ns
        blind = now_ns - self._blind_since > self._order.lease * _SECOND
        self._order = self._order._replace(blind=blind)

    # What follows

    def decide(self, now_ns: int) -> list[RolloutDecision]:
        """Return what is decided now, in order."""
        self._order = self._order._replace(sequence=self._order.sequence + 1)
        if self.rollout.state.is_end:
            return []
        self.verdict = self._judge.verdict(now_ns)
        found = self._findings()
        self.refused.clear()
        made = []
        for decide in (self._ended_elsewhere, self._wishes, self._advance):
            decision = None if self.rollout.state.is_end else decide(found, now_ns)
            if decision is not None:
                made.append(decision)
                self.text = decision.text
                if decision.reason in (RolloutReason.CHECKED, RolloutReason.HELD):
                    self._judge.begin_step(now_ns)
        return made

    def order(self, name: str) -> FleetOrder:
        """Return what a replica is to be told."""
        verdict = self.verdict
        return self._order._replace(
            rollout=_shared(self.rollout),
            text=self.text,
            verdict={} if verdict is None else {"decision": str(verdict.decision), "reason": verdict.reason[:1000]},
            answered=self._answered.get(name, ""),
        )

    @property
    def done(self) -> bool:
        """Whether the rollout has ended on every replica."""
        return self.rollout.state.is_end and not self.behind

    @property
    def behind(self) -> list[str]:
        """The replicas that have not reached the state and step of the fleet, lost ones included if they count."""
        passed_over = self.problems if self._when_lost is WhenLost.GO_ON else {}
        return [
            name
            for name, replica in self.replicas.items()
            if not self._has(replica, self.rollout.state) and name not in passed_over
        ]

    @property
    def problems(self) -> dict[str, str]:
        """By replica: why it does not do what it is told."""
        found = {}
        for name, replica in self.replicas.items():
            if replica.problem:
                found[name] = replica.problem
            elif self._mine(replica) and replica.status["reason"] == RolloutReason.BLOCKED:
                found[name] = f"{replica.status['text']}. To try again: nerite rollout clear {self.model} --url {name}"
            elif self._comparing(replica) and not self._blind and replica.status["fleet"]["boot"] not in self._seen:
                found[name] = "Prometheus has not read its metrics lately"
        return found

    def _mine(self, replica: Replica) -> bool:
        return replica.order is not None and replica.order.id == self.id

    def _has(self, replica: Replica, state: RolloutState) -> bool:
        """Return whether a replica has reached a state, at the step of the fleet."""
        if not self._mine(replica) or replica.problem or replica.state is not state:
            return False
        return state.is_end or replica.status["step"] == self.rollout.step

    def _comparing(self, replica: Replica) -> bool:
        return self._mine(replica) and not replica.problem and replica.state in _COMPARING

    def _findings(self) -> RolloutFindings:
        verdict = self.verdict
        assert verdict is not None
        worse = verdict.reason if verdict.decision is Decision.ROLL_BACK else ""
        not_worse = verdict.reason if verdict.decision is Decision.NOT_WORSE else ""
        holds = [] if self._when_lost is WhenLost.GO_ON else [f"{name}: {why}" for name, why in self.problems.items()]
        holds += [f"no counts are known: {self._blind}"] if self._blind else []
        holds += [] if self.replicas else ["there are no replicas"]
        ready = True
        for name, replica in self.replicas.items():
            if not self._comparing(replica):
                continue
            status = replica.status
            ready = ready and status["ready"]
            for gate in status["gates"]:
                if gate["gate"] in self._limits and gate["decision"] == Decision.ROLL_BACK:
                    worse = worse or f"{gate['gate']}: {gate['reason']}, on {name}"
                elif gate["gate"] in self._limits and gate["decision"] != Decision.NOT_WORSE:
                    not_worse = ""
            # What a judge both warns of and holds the promotion for: it does not get to see all outcomes.
            holds += [f"{name}: {why}" for why in status["holds"] if why in status["warnings"]]
        if not self._blind and self.rollout.state in _COMPARING and self._when_lost is not WhenLost.GO_ON:
            holds += [f"{name} is not at this step yet" for name in self.behind if name not in self.problems]
        self.holds = holds
        return RolloutFindings(verdict.candidate_requests, ready, worse, not_worse, hold="; ".join(holds))

    def _ended_elsewhere(self, found: RolloutFindings, now_ns: int) -> RolloutDecision | None:
        for name, replica in self.replicas.items():
            if not self._mine(replica) or replica.state is None or not replica.state.is_end:
                continue
            reason = RolloutReason(replica.status["reason"])
            state = _OTHERS_END.get(reason)
            if reason is RolloutReason.BLOCKED and self.rollout.state is RolloutState.CHECKING:
                state = RolloutState.ABORTED
            if state is not None and state is replica.state:
                return self.rollout.end(state, reason, f"{name}: {replica.status['text']}")
        return None

    def _wishes(self, found: RolloutFindings, now_ns: int) -> RolloutDecision | None:
        for name, replica in self.replicas.items():
            wish = replica.status["fleet"]["wish"] if self._mine(replica) else None
            if wish is None or self._answered.get(name) == wish["id"]:
                continue
            self._answered[name] = wish["id"]
            try:
                return self.rollout.command(RolloutCommand(wish["command"]), found, force=wish["force"])
            except Conflict as error:
                self.refused.append(f"{wish['command']}, asked of {name}: {error.message}")
        return None

    def _advance(self, found: RolloutFindings, now_ns: int) -> RolloutDecision | None:
        lost = [name for name, at in self._lost_at.items() if now_ns - at >= LOST_NS]
        if lost and self._when_lost is WhenLost.ROLL_BACK:
            text = f"{lost[0]} was lost for a minute: {self.replicas[lost[0]].problem}"
            return self.rollout.end(RolloutState.ROLLED_BACK, RolloutReason.NOT_READY, text)
        if self.rollout.state is not RolloutState.CHECKING:
            return self.rollout.advance(now_ns, found)
        asked = [
            replica for replica in self.replicas.values() if not (replica.problem and self._when_lost is WhenLost.GO_ON)
        ]
        if asked and all(self._mine(each) and not each.problem and each.status["fleet"]["checked"] for each in asked):
            return self.rollout.begin(now_ns)
        return None

    # What is told

    def status(self) -> dict[str, Any]:
        """Return the status in the form of a replica's, with the counts of all."""
        rollout, spec, verdict = self.rollout, self.rollout.spec, self.verdict
        arms = {}
        for name, version, weight in (
            ("baseline", spec.baseline, 100 - rollout.weight),
            ("candidate", spec.to, rollout.weight),
        ):
            counts = (
                [getattr(gate, name) for gate in verdict.gates if gate.gate.startswith("errors")] if verdict else []
            )
            requests = getattr(verdict, f"{name}_requests") if verdict else 0
            arms[name] = {
                "version": version, "weight": weight, "requests": requests,
                "errors": sum(each.bad for each in counts), "p50_ms": None, "p99_ms": None, "first_p95_ms": None,
            }  # fmt: skip
        told = {} if verdict is None else verdict.to_json()
        return {
            "model": self.model,
            "id": self.id,
            "text": self.text,
            **rollout.status(),
            "arms": arms,
            "gates": told.get("gates", []),
            "holds": [*told.get("holds", []), *self.holds],
            "warnings": told.get("warnings", []),
            "replicas": {name: str(replica.state or "no rollout") for name, replica in self.replicas.items()},
            "problems": self.problems,
        }


def _shared(rollout: Rollout) -> Rollout:
    """Return a rollout without what is not for replicas."""
    if not rollout.spec.webhook:
        return rollout
    return Rollout.of_json(rollout.as_json(), replace(rollout.spec, webhook=""))
