"""``nerite rollout start --fleet``: leads the rollout of all replicas until it has ended on each.

It keeps no state: what it needs is on the replicas and in Prometheus. So it may be killed and started again.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

import orjson

from nerite.cli.command import UsageError, add_repeated, show
from nerite.client import ClientError
from nerite.config.rollout_spec import RolloutSpec, WhenLost
from nerite.core.durations import duration_of
from nerite.core.errors import NeriteError
from nerite.rollouts.fleet import FleetRollout, order_under_way
from nerite.rollouts.rollout import RolloutDecision
from nerite.rollouts.webhook import Delivery, WebhookClient, deliver
from nerite.tools.connection import read_header
from nerite.tools.rollout import view
from nerite.tools.rollout.prometheus import Prometheus, PrometheusError
from nerite.tools.rollout.replicas import Replicas, ReplicaSource
from nerite.tools.rollout.watch import STATUSES

_AT_ONCE: Final = 32
"""Replicas that are asked at the same time."""
_LINE_SECONDS: Final = 30.0
"""Longest time between two lines."""
_MAX_TIMEOUT: Final = 10.0
"""Seconds that one replica may delay the others."""
_FLAGS: Final = ("replica", "replicas", "prometheus", "prometheus-header")


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a fleet to those of ``start``."""
    group = parser.add_argument_group("a fleet of replicas (docs/rollout-fleet.md)")
    group.add_argument(
        "--fleet", action="store_true", help="lead the rollout on all replicas, until it ends; may be started again"
    )
    add_repeated(group, "--replica", "URL", "HTTP port of a replica, as in gpu-1:8000; once for each")
    where = (
        "dns:NAME:PORT: all addresses of the name; pool:ROUTER:PORT/POOL: the members of a pool, asked at the metrics "
        "port of its router; or the path of a file with a URL in each line"
    )
    group.add_argument("--replicas", metavar="WHERE", default="", help=where)
    group.add_argument(
        "--prometheus", metavar="URL", default="", help="Prometheus that reads the metrics of all replicas"
    )
    add_repeated(group, "--prometheus-header", "'NAME: VALUE'", "header to send to Prometheus", read_header)
    group.add_argument(
        "--unreachable",
        choices=tuple(map(str, WhenLost)),
        default=str(WhenLost.HOLD),
        help="while a replica cannot be reached or refuses: stay at the step, go on without it, or roll back after a "
        f"minute (default: {WhenLost.HOLD})",
    )
    lease = "time after which a replica that hears nothing watches for harm by itself (default: 1m)"
    group.add_argument("--lease", metavar="TIME", default="1m", help=lease)


def run_fleet(options: argparse.Namespace, spec: RolloutSpec) -> int:
    """Lead the rollout of a fleet; return the exit status."""
    if not spec.baseline:
        raise UsageError("--fleet needs --from VERSION: the same version is the baseline on every replica")
    if spec.shadow:
        raise UsageError("--fleet cannot begin with --shadow: give each replica a [shadow] in its route.toml instead")
    if urlsplit(options.prometheus).scheme not in ("http", "https"):
        raise UsageError("--fleet needs --prometheus URL, as in http://prometheus:9090")
    try:
        lease = duration_of(options.lease)
    except ValueError as error:
        raise UsageError(f"--lease: {error}") from None
    if lease < 5 * options.interval or lease < 1:
        raise UsageError("--lease: must be at least 1s, and five times the --interval")
    source = ReplicaSource(options.replica or (), options.replicas)
    with ThreadPoolExecutor(_AT_ONCE) as executor:
        replicas = Replicas(options.model, dict(options.header), min(options.timeout, _MAX_TIMEOUT), executor)
        try:
            return _FleetCommand(options, spec, source, replicas, executor, lease).run()
        except NeriteError as error:
            raise ClientError(error.message) from None
        finally:
            replicas.close()


def refuse_fleet_arguments(options: argparse.Namespace) -> None:
    """Raise ``UsageError`` if an option of fleets was given without ``--fleet``."""
    for name in _FLAGS:
        if getattr(options, name.replace("-", "_")):
            raise UsageError(f"--{name} needs --fleet")


class _FleetCommand:
    """One run of the command."""

    def __init__(
        self,
        options: argparse.Namespace,
        spec: RolloutSpec,
        source: ReplicaSource,
        replicas: Replicas,
        executor: Executor,
        lease: float,
    ) -> None:
        self._options = options
        self._spec = spec
        self._source = source
        self._replicas = replicas
        self._executor = executor
        self._webhooks = WebhookClient()
        self._lease = lease
        self._said: dict[str, str] = {}
        self._line_at = 0.0

    def run(self) -> int:
        """Lead until the rollout has ended on every replica; return the exit status."""
        fleet = self._begin()
        since = datetime.fromisoformat(fleet.started).timestamp()
        prometheus = Prometheus(self._options.prometheus, dict(self._options.prometheus_header), fleet.model, fleet.id)
        while True:
            fleet.members(self._source.look())
            self._say_changes({"replicas": self._source.problem})
            try:
                found = prometheus.read(time.time(), since)
                fleet.count(found.samples, found.boots, time.monotonic_ns())
            except PrometheusError as error:
                fleet.miss(str(error), time.monotonic_ns())
            for decision in fleet.decide(time.monotonic_ns()):
                self._tell_of(fleet, decision)
            for refused in fleet.refused:
                self._say(f"refused: {refused}")
            orders = {name: fleet.order(name) for name in fleet.replicas}
            for name, replica in self._replicas.tell(orders).items():
                fleet.see(name, replica, time.monotonic_ns())
            status = fleet.status()
            self._say_status(fleet, status)
            if fleet.done:
                self._say(f"{status['state']} on {len(fleet.replicas)} replicas: {fleet.text}")
                return STATUSES[status["state"]]
            time.sleep(self._options.interval)

    def _begin(self) -> FleetRollout:
        """Wait for the replicas, and return their rollout."""
        when_lost = WhenLost(self._options.unreachable)
        while True:
            names = self._source.look()
            found = self._replicas.look(names)
            self._say_changes(
                {"replicas": self._source.problem, **{name: each.problem for name, each in found.items()}}
            )
            answered = {name: each for name, each in found.items() if not each.problem}
            under_way = order_under_way(answered, self._spec)
            complete = len(answered) == len(names) or when_lost is WhenLost.GO_ON
            if answered and (under_way is not None or complete):
                break
            time.sleep(self._options.interval)
        fleet = FleetRollout.begin(
            self._options.model,
            self._spec,
            answered,
            uuid4().hex[:12],
            datetime.now(UTC).isoformat(timespec="seconds"),
            lease=self._lease,
            when_lost=when_lost,
        )
        fleet.members(names)
        for name, replica in found.items():
            fleet.see(name, replica, time.monotonic_ns())
        how = "goes on" if under_way is not None else "begins"
        self._say(
            f"the rollout {fleet.id} of '{fleet.model}' from version {self._spec.baseline} to {self._spec.to} {how} "
            f"on {len(names)} replicas"
        )
        return fleet

    def _tell_of(self, fleet: FleetRollout, decision: RolloutDecision) -> None:
        """Print a decision, and post it to the webhook."""
        self._say(f"{decision.state}, weight {decision.weight:g} %: {decision.text}")
        if not self._spec.webhook:
            return
        entry = {**fleet.status(), "at": datetime.now(UTC).isoformat(timespec="milliseconds")}
        self._executor.submit(self._post, Delivery(self._spec.webhook, orjson.dumps(entry), own=True))

    def _post(self, delivery: Delivery) -> None:
        failure = asyncio.run(deliver(delivery, self._webhooks.post))
        if failure is not None:
            self._say(f"a decision was not posted to the webhook: {failure}")

    def _say_status(self, fleet: FleetRollout, status: dict[str, Any]) -> None:
        """Print what has changed, and a line from time to time."""
        told: Sequence[str] = list(status["problems"])
        changes = {**dict.fromkeys(fleet.replicas, ""), **status["problems"]}
        common = [hold for hold in fleet.holds if hold.partition(": ")[0] not in told]
        changes["holds"] = "; ".join(common)
        self._say_changes(changes)
        if time.monotonic() - self._line_at >= _LINE_SECONDS:
            self._line_at = time.monotonic()
            self._say(view.line(status))
            if fleet.rollout.state.is_end and fleet.behind:
                self._say(f"not there yet: {', '.join(fleet.behind)}")

    def _say_changes(self, texts: dict[str, str]) -> None:
        for name, text in texts.items():
            if text != self._said.get(name, ""):
                self._said[name] = text
                self._say(f"{name}: {text or 'well again'}")

    @staticmethod
    def _say(text: str) -> None:
        show(f"{time.strftime('%H:%M:%S')} {text}")
