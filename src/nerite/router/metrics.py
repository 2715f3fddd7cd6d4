"""Metrics of the router, and the state of its pools, on a port of their own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from nerite.core.byte_budget import BUDGETS
from nerite.core.errors import Forbidden
from nerite.core.failures import internal_errors
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.work_loop import WorkLoops
from nerite.observability.exposition import Metric, MetricTable, Page, labels
from nerite.router.admission import RouterAdmission
from nerite.router.http_members import HttpMembers
from nerite.router.placement import CopyFigures, PoolPlacement
from nerite.router.pool_rollouts import PoolRollout
from nerite.router.pools import PoolTable, RouterPool
from nerite.router.scaling import RouterScaling, ScaledPool
from nerite.transports.http import reply
from nerite.transports.http.background import write_background_metrics
from nerite.transports.http.handler import HttpExchange
from nerite.transports.http.head import RequestHead
from nerite.transports.http.metrics_service import ERRORS, INTERNAL_CACHES
from nerite.transports.http.origins import BrowserGuard
from nerite.transports.http.reply import Reply
from nerite.transports.limits import TransportLimits

_TYPE: Final = "text/plain; charset=utf-8"


class _MemberFigures(NamedTuple):
    """Figures of one member."""

    ready: bool
    requests: int
    work: float
    connections: int


class _CodeFigures(NamedTuple):
    """Number of attempts that ended with a code."""

    attempts: int


class _OrderFigures(NamedTuple):
    """Number of orders to load or unload models that ended in one way."""

    orders: int


class RouterMetrics:
    """Answers ``GET /metrics`` and ``GET /v2/pools``."""

    def __init__(
        self,
        table: PoolTable,
        members: HttpMembers,
        bounds: TransportLimits,
        guard: BrowserGuard,
        loops: WorkLoops,
        scaling: RouterScaling | None = None,
        admission: RouterAdmission | None = None,
        placements: Sequence[PoolPlacement] = (),
    ) -> None:
        self._placements = placements
        self._admission = admission
        self._scaling = scaling
        self._table = table
        self._members = members
        self._bounds = bounds
        self._guard = guard
        self._loops = loops
        self.more: list[Callable[[Page], None]] = []
        """Writers of further metrics."""
        self.rollouts: Sequence[PoolRollout] = ()

    def begin(self, head: RequestHead) -> Reply | None:
        """Refuse requests that a browser sends for another site's page."""
        try:
            self._guard.check(head)
        except Forbidden as error:
            return reply.error_reply(error)
        return None

    def receive_buffer(self, head: RequestHead) -> memoryview | None:
        """Return None: bodies are ignored on this port."""
        return None

    def handle(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        """Answer a request."""
        if head.path in ("/metrics", "/metrics/") and head.method in ("GET", "HEAD"):
            connection.send([Reply(200, self.text(), _TYPE).encode()])
        elif head.path == "/v2/pools" and self._scaling is not None and head.method in ("GET", "HEAD"):
            rollouts = [rollout.status() for rollout in self.rollouts]
            connection.send([reply.json_reply({**self._scaling.report(), "rollouts": rollouts}).encode()])
        else:
            connection.send([(Reply(404, b"", _TYPE) if head.method == "GET" else reply.NOT_ALLOWED).encode()])

    def text(self) -> bytes:
        """Return the page."""
        page = Page()
        table, connections = self._table, self._members.open_connections
        page.write(ROUTER, [ROUTER.row(table)])
        page.write(POOLS, [POOLS.row(pool, pool.name) for pool in table.pools])
        if self._scaling is not None:
            page.write(SCALED, [SCALED.row(scaled, name) for name, scaled in self._scaling.scaled.items()])
        page.write(MEMBERS, [
            MEMBERS.row(
                _MemberFigures(load.ready, load.requests, load.work, connections.get(load.member.name, 0)),
                load.member.name,
                pool.name,
            )
            for pool in table.pools
            for load in pool.balancer.members
        ])  # fmt: skip
        page.write(ANSWERS, [
            (labels({"pool": pool.name, "member": member, "code": code}), _CodeFigures(count))
            for pool in table.pools
            for (member, code), count in sorted(pool.answers.items())
        ])  # fmt: skip
        page.write(COPIES, [
            COPIES.row(figures, model, placement.pool.name)
            for placement in self._placements
            for model, figures in placement.figures()
        ])  # fmt: skip
        page.write(ORDERS, [
            (labels({"pool": placement.pool.name, "step": step, "outcome": outcome}), _OrderFigures(count))
            for placement in self._placements
            for (step, outcome), count in sorted(placement.steps.items())
        ])  # fmt: skip
        self._bounds.write_metrics(page)
        if self._admission is not None:
            self._admission.write_metrics(page)
        for write in self.more:
            write(page)
        write_background_metrics(self._loops, page)
        page.write(ERRORS, [ERRORS.row(internal_errors)])
        page.write(INTERNAL_CACHES, [INTERNAL_CACHES.row(budget, budget.name) for budget in BUDGETS])
        return b"".join(page.pieces())

    def handle_again(self, connection: HttpExchange, meaning: Any, data: bytearray) -> None:
        """Fail: requests on this port have no data."""
        raise AssertionError("no request on this port has data")

    def answer(self, connection: HttpExchange, request: InferenceRequest, response: InferenceResponse) -> None:
        """Fail: this port has no inferences."""
        raise AssertionError("no inferences on this port")


def _counts(counter: Counter[str]) -> dict[str, float]:
    return dict(sorted(counter.items()))


ROUTER: Final = MetricTable[PoolTable]((
    Metric("nerite_route_cpu_seconds_total", "counter",
           "Processor time of the router, in seconds", lambda _: time.process_time()),
    Metric("nerite_router_decision_seconds", "histogram",
           "Time from the last byte of a request to the choice of its member, in seconds",
           lambda table: table.decisions),
    Metric("nerite_router_refused_total", "counter",
           "Requests that the router answered with an error of its own, by status",
           lambda table: _counts(table.refused), "code"),
))  # fmt: skip
POOLS: Final = MetricTable[RouterPool]((
    Metric("nerite_router_seconds", "histogram",
           "Time from the arrival of a request to the end of its answer, in seconds", lambda pool: pool.seconds),
    Metric("nerite_router_under_way", "gauge", "Requests at members of the pool", lambda pool: pool.under_way),
    Metric("nerite_router_lent", "gauge", "Requests of other pools at members of the pool",
           lambda pool: pool.lent_requests),
    Metric("nerite_router_preempted_total", "counter", "Requests that were stopped at members of the pool for others",
           lambda pool: pool.preempted),
    Metric("nerite_router_retries_total", "counter",
           "Requests that went on to another member, by what had happened at the one before",
           lambda pool: _counts(pool.retries), "reason"),
    Metric("nerite_router_retries_refused_total", "counter", "Retries that the retry budget did not allow",
           lambda pool: pool.balancer.budget.refused),
    Metric("nerite_router_picks_total", "counter", "Choices of a member, by why it was that one",
           lambda pool: _counts(pool.picks), "reason"),
    Metric("nerite_router_held", "gauge", "Requests that wait for a member, or for a copy of their model",
           lambda pool: pool.held),
    Metric("nerite_router_held_total", "counter", "Requests that have waited or could not, by how that ended",
           lambda pool: _counts(pool.holds), "outcome"),
    Metric("nerite_router_held_seconds", "histogram",
           "Time that requests have waited for a member, or for a copy of their model, in seconds",
           lambda pool: pool.hold_seconds),
    Metric("nerite_router_members", "gauge", "Members of the pool",
           lambda pool: sum(1 for _ in pool.balancer.members)),
    Metric("nerite_router_members_ready", "gauge", "Members of the pool that are ready",
           lambda pool: sum(1 for _ in pool.ready_members)),
    Metric("nerite_router_members_ejected", "gauge", "Members of the pool that were ejected because they failed",
           lambda pool: sum(load.ejected for load in pool.balancer.members)),
    Metric("nerite_router_members_draining", "gauge",
           "Members of the pool that get new requests only while there is no other",
           lambda pool: sum(load.draining for load in pool.balancer.members)),
    Metric("nerite_router_members_stalled", "gauge", "Members of the pool that have requests and send nothing",
           lambda pool: sum(load.stalled for load in pool.balancer.members)),
), labels=("pool",))  # fmt: skip
SCALED: Final = MetricTable[ScaledPool]((
    Metric("nerite_router_members_wanted", "gauge", "Members that autoscaling wants the pool to have",
           lambda scaled: scaled.wanted),
    Metric("nerite_router_demand", "gauge", "Work that arrives in a second, in tokens; a tensor request is one",
           lambda scaled: scaled.scaler.demand.rate),
    Metric("nerite_router_member_rate", "gauge",
           "Work that a member does in a second within the promises, as the demand; 0 while it is not known",
           lambda scaled: scaled.scaler.rate),
    Metric("nerite_router_late_share", "gauge", "Share of the last answers that broke a promise of the pool",
           lambda scaled: scaled.scaler.member_rate.late_share),
    Metric("nerite_router_start_seconds", "gauge", "Time that a member takes until it is ready; 0 while not known",
           lambda scaled: scaled.scaler.start_times.seconds),
), labels=("pool",))  # fmt: skip
MEMBERS: Final = MetricTable[_MemberFigures]((
    Metric("nerite_router_member_ready", "gauge", "Whether a member is ready", lambda each: int(each.ready)),
    Metric("nerite_router_member_requests", "gauge", "Requests under way at a member", lambda each: each.requests),
    Metric("nerite_router_member_work", "gauge",
           "Tokens that are still to be computed at a member, as far as the router knows", lambda each: each.work),
    Metric("nerite_router_member_connections", "gauge", "Connections to a member", lambda each: each.connections),
), labels=("member", "pool"))  # fmt: skip
COPIES: Final = MetricTable[CopyFigures]((
    Metric("nerite_router_model_copies", "gauge",
           "Members that have a model or load it, where the router places models", lambda each: each.copies),
    Metric("nerite_router_model_copies_wanted", "gauge",
           "Copies of a model that its demand asks for", lambda each: each.wanted),
), labels=("model", "pool"))  # fmt: skip
ORDERS: Final = MetricTable[_OrderFigures]((
    Metric("nerite_router_orders_total", "counter",
           "Orders to members to load or unload a model, by how they ended", lambda each: each.orders),
), labels=("outcome", "pool", "step"))  # fmt: skip
ANSWERS: Final = MetricTable[_CodeFigures]((
    Metric("nerite_router_requests", "counter",
           "Requests sent to members, by status, or by how they ended without one", lambda each: each.attempts),
), labels=("code", "member", "pool"))  # fmt: skip
