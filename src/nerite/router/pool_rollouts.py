"""Rollouts that the cluster file asks for: the router leads each on all members of its pool, and decides once for all.

``FleetRollout`` decides. It keeps nothing here: members keep its last order and what they have counted, so another
router, or this one after a restart, goes on where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from time import monotonic_ns
from typing import Any, Final
from urllib.parse import quote
from uuid import uuid4

import orjson

from nerite.balancing.member import Member
from nerite.cluster.settings import RolloutSettings
from nerite.config.rollout_spec import WhenLost
from nerite.core.errors import Conflict, NeriteError
from nerite.core.work_loop import WorkLoop
from nerite.observability.log import log
from nerite.rollouts.fleet import FleetRollout, Replica, newest_order
from nerite.rollouts.fleet_counts import samples_of
from nerite.rollouts.webhook import Webhooks
from nerite.router.http_members import HttpMembers, MemberAnswer
from nerite.router.pools import RouterPool

_INTERVAL: Final = 1.0
_LEASE: Final = 30.0
"""Seconds of silence after which members watch for harm by themselves, and another router leads."""
_SECONDS: Final = 5.0
"""Time that a member may take to answer."""


class PoolRollout:
    """The rollout of one model on the members of a pool."""

    def __init__(
        self, pool: RouterPool, settings: RolloutSettings, model: str, members: HttpMembers, webhooks: Webhooks
    ) -> None:
        self.pool = pool
        self.model = model
        self.loop = WorkLoop("rollouts", f"model '{model}' of pool '{pool.name}'")
        self._spec = settings.models[model]
        self._when_lost = settings.unreachable
        self._members = members
        self._webhooks = webhooks
        self._path = f"/v2/models/{quote(model, safe='')}/rollout"
        self._fleet: FleetRollout | None = None
        """None: this router does not lead."""
        self._overtaken = False
        """Another router leads, or has led."""
        self._samples: list[tuple[Mapping[str, str], float]] = []
        self._boots: list[str] = []
        """What members have told in this step: their counts, and the processes that have counted."""
        self._said: dict[str, str] = {}

    def status(self) -> dict[str, Any]:
        """Return what ``GET /v2/pools`` tells."""
        named = {"pool": self.pool.name, "model": self.model}
        if self._fleet is None:
            return {**named, "state": "", "text": "; ".join(filter(None, self._said.values()))}
        told = self._fleet.status()
        keys = ("id", "from", "to", "state", "weight", "text", "holds", "replicas")
        return {**named, **{key: told[key] for key in keys}}

    async def run(self) -> None:
        """Lead, or wait until this router may, until it is cancelled."""
        while True:
            with self.loop.step("members"):
                await self.step()
            await asyncio.sleep(_INTERVAL)

    async def step(self) -> None:
        """Ask and tell all members once."""
        members = [load.member for load in self.pool.balancer.members]
        try:
            if self._fleet is None and members:
                await self._begin(members)
            if self._fleet is not None:
                await self._lead(self._fleet, members)
        except Conflict as error:
            self._say("", error.message)

    async def _begin(self, members: Sequence[Member]) -> None:
        """Lead from now on, unless it is not known what all members do, or another router does. Raises ``Conflict``."""
        found = await self._each(members, self._look)
        answered = {name: replica for name, replica in found.items() if not replica.problem}
        last = newest_order(answered)
        if self._overtaken and last is not None:
            silent = [each.status["fleet"]["silent"] for each in answered.values() if each.order is not None]
            if not last.declares(self._spec) or min(silent) < _LEASE:
                return
        complete = len(answered) == len(found) or self._when_lost is WhenLost.GO_ON
        if not answered or not (complete or (last is not None and last.declared)):
            for name, replica in found.items():
                self._say(name, replica.problem)
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        fleet = FleetRollout.of_declaration(
            self.model, self._spec, answered, uuid4().hex[:12], now, lease=_LEASE, when_lost=self._when_lost
        )
        fleet.members(found)
        for name, replica in answered.items():
            fleet.see(name, replica, monotonic_ns())
        self._fleet = fleet
        self._say("", "")
        log.info(
            f"This router leads the rollout {fleet.id} of '{self.model}' in pool '{self.pool.name}' from version "
            f"{self._spec.baseline} to {self._spec.to}: {fleet.text or fleet.rollout.state}"
        )

    async def _lead(self, fleet: FleetRollout, members: Sequence[Member]) -> None:
        """Tell the members where the rollout is, and decide by what they answer. Raises ``Conflict``."""
        fleet.members(member.name for member in members)
        self._samples, self._boots = [], []
        found = await self._each(members, self._tell)
        now = monotonic_ns()
        for name, replica in found.items():
            if why := fleet.overtaken(replica.order):
                self._fleet, self._overtaken = None, True
                raise Conflict(f"this router no longer leads the rollout: {why}")
            fleet.see(name, replica, now)
        fleet.count(self._samples, self._boots, now)
        for decision in fleet.decide(now):
            self._say("", f"{decision.state}, weight {decision.weight:g} %: {decision.text}")
            if self._spec.webhook:
                at = datetime.now(UTC).isoformat(timespec="milliseconds")
                self._webhooks.send(self._spec.webhook, {**fleet.status(), "at": at}, own=True)
        for refused in fleet.refused:
            self._say("", f"refused: {refused}")
        self._said = {name: text for name, text in self._said.items() if not name or name in found}
        for name in found:
            self._say(name, fleet.problems.get(name, ""))

    async def _each(self, members: Sequence[Member], ask: Callable[[Member], Awaitable[Replica]]) -> dict[str, Replica]:
        async def answer(member: Member) -> Replica:
            try:
                return await ask(member)
            except (NeriteError, LookupError, TypeError, ValueError) as error:
                return Replica(f"its status cannot be read, is it of another release? {error}")

        replicas = await asyncio.gather(*map(answer, members))
        return dict(zip((member.name for member in members), replicas, strict=True))

    async def _look(self, member: Member) -> Replica:
        """Return what a member says of its rollout."""
        answer = await self._ask(member, "GET", self._path)
        if answer.status == 404:
            return Replica()  # no rollout; if the model is unknown, the start of the rollout fails
        return Replica(answer.failure) if answer.status != 200 else Replica.of_status(orjson.loads(answer.body))

    async def _tell(self, member: Member) -> Replica:
        """Send a member its order; return what it says then."""
        assert self._fleet is not None
        order = orjson.dumps(self._fleet.order(member.name).as_json())
        answer = await self._ask(member, "POST", f"{self._path}/follow", order)
        if answer.status == 409:
            seen = await self._look(member)
            return seen if self._fleet.overtaken(seen.order) else Replica(answer.failure)
        if answer.status != 200:
            return Replica(answer.failure)
        replica = Replica.of_status(orjson.loads(answer.body))
        told = replica.status["fleet"]
        self._samples += samples_of(told["counts"], told["boot"])
        self._boots.append(told["boot"])
        return replica

    async def _ask(self, member: Member, method: str, path: str, body: bytes = b"") -> MemberAnswer:
        return await self._members.ask(member, method, path, body, _SECONDS, self._members.key_of(self.pool))

    def _say(self, name: str, text: str) -> None:
        """Log what has changed: of a member, or of the rollout."""
        before = self._said.get(name, "")
        self._said[name] = text
        if text != before and (text or name):
            place = f"rollout of '{self.model}' in pool '{self.pool.name}'{f': {name}' if name else ''}"
            (log.warning if name and text else log.info)(f"{place}: {text or 'well again'}")
