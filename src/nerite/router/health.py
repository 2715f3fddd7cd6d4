"""Health of members: whether each is ready, and which models it serves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson

from nerite.balancing.member import Member, ServerKind
from nerite.core.failures import report
from nerite.observability.log import log
from nerite.router.http_members import HttpMembers, MemberAnswer
from nerite.router.pools import RouterPool

_KSERVE: Final = (ServerKind.NERITE, ServerKind.TRITON, ServerKind.KSERVE)
_READY: Final = {
    **dict.fromkeys(_KSERVE, "/v2/health/ready"),
    ServerKind.VLLM: "/health",
    ServerKind.SGLANG: "/health",
    ServerKind.OPENAI: "/v1/models",
}
_LIST: Final = b'{"ready":true}'
_CONCURRENCY: Final = 32
"""Health checks at the same time, of all pools."""
_JITTER: Final = 0.2
"""Share of the interval by which checks are spread."""
_MAX_SECONDS: Final = 5.0
_PATIENCE: Final = 2
"""Checks without an answer after which a member that can be reached is not ready: it may only be busy."""
_MAX_MODELS: Final = 65_536


class MemberState(NamedTuple):
    """What a check has found."""

    ready: bool
    models: frozenset[str] | None = None
    """None: not known."""
    problem: str = ""
    """Why it is not ready, as the end of a sentence about the member."""
    missed: bool = False
    """It gave no answer, although something listens at its address."""
    metered: bool | None = None
    """It has a row of each of the router's requests in a ledger of its own; None: not known."""
    gone: bool = False
    """Nothing listens at its address: when it is back, it is another process."""


async def check_member(members: HttpMembers, member: Member, seconds: float, *, metering: bool = False) -> MemberState:
    """Check one member. ``metering``: find out whether it has a ledger that knows the router's requests."""
    path = _READY[member.kind]
    answer = await members.ask(member, "GET", path, seconds=seconds)
    if answer.problem:
        return MemberState(False, problem=answer.problem, missed=not answer.unreachable, gone=answer.unreachable)
    if answer.status != 200:
        return MemberState(False, problem=f"answered GET {path} with status {answer.status}")
    if member.kind in _KSERVE:
        models = _index_names(await members.ask(member, "POST", "/v2/repository/index", _LIST, seconds))
        if models is not None and member.kind is ServerKind.NERITE:
            models |= _openai_names(await members.ask(member, "GET", "/v1/models", seconds=seconds)) or frozenset()
    else:
        if member.kind is not ServerKind.OPENAI:
            answer = await members.ask(member, "GET", "/v1/models", seconds=seconds)
        models = _openai_names(answer)
    metered = None
    if metering and member.kind is ServerKind.NERITE:
        metered = _has_ledger(await members.ask(member, "GET", "/v2", seconds=seconds))
    return MemberState(True, models, metered=metered)


def _has_ledger(answer: MemberAnswer) -> bool | None:
    """Return whether a member's description of itself says that it has a ledger; None if it has not answered."""
    if answer.status != 200:
        return None
    try:
        found = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    extensions = found.get("extensions") if isinstance(found, dict) else None
    return isinstance(extensions, list) and "ledger" in extensions


def entries_of(answer: MemberAnswer, key: str = "") -> list[dict[str, Any]] | None:
    """Return the objects of a JSON list in an answer, or under ``key`` in it; None if there is no such list."""
    if answer.status != 200:
        return None
    try:
        found = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    if key:
        found = found.get(key) if isinstance(found, dict) else None
    return [each for each in found[:_MAX_MODELS] if isinstance(each, dict)] if isinstance(found, list) else None


def _index_names(answer: MemberAnswer) -> frozenset[str] | None:
    entries = entries_of(answer)
    if entries is None:
        return None
    return frozenset(str(each.get("name", "")) for each in entries if each.get("state", "READY") == "READY")


def _openai_names(answer: MemberAnswer) -> frozenset[str] | None:
    entries = entries_of(answer, "data")
    return None if entries is None else frozenset(str(each.get("id", "")) for each in entries)


class HealthChecks:
    """Checks all members of all pools periodically, and at once those that a request could not reach."""

    def __init__(self, pools: Sequence[RouterPool], members: HttpMembers) -> None:
        self._pools = pools
        self._members = members
        self._limit = asyncio.Semaphore(_CONCURRENCY)
        self._missed: dict[str, int] = {}
        """Checks without an answer in a row, by member."""
        self._known: dict[str, MemberState] = {}
        self.metering = False
        """The router has a ledger, and tells members who sends a request."""

    async def check_all(self) -> None:
        """Check every member once."""
        await asyncio.gather(*(self._check_pool(pool) for pool in self._pools))

    async def run(self, pool: RouterPool) -> None:
        """Check the members of one pool, for ever."""
        interval = pool.settings.health_interval
        while True:
            await asyncio.sleep(interval * random.uniform(1 - _JITTER, 1 + _JITTER))
            await self._check_pool(pool)
            names = {load.member.name for pool in self._pools for load in pool.balancer.members}
            self._members.keep(names)
            for name in [name for name in self._known if name not in names]:
                del self._known[name]
                self._missed.pop(name, None)

    async def run_suspects(self) -> None:
        """Check members that a request could not reach, for ever, and each at most every half interval."""
        while True:
            await self._members.suspected.wait()
            self._members.suspected.clear()
            suspects = list(self._members.suspects)
            self._members.suspects.clear()
            await asyncio.gather(*(
                self._check(pool, load.member)
                for pool, name in suspects
                for load in pool.balancer.members
                if load.member.name == name
            ))  # fmt: skip
            await asyncio.sleep(min(pool.settings.health_interval for pool in self._pools) / 2)

    async def _check_pool(self, pool: RouterPool) -> None:
        members = [load.member for load in pool.balancer.members]
        await asyncio.gather(*(self._check(pool, member) for member in members))

    async def _check(self, pool: RouterPool, member: Member) -> None:
        seconds = min(max(pool.settings.health_interval, 0.5), _MAX_SECONDS)
        try:
            async with self._limit:
                state = await check_member(self._members, member, seconds, metering=self.metering)
        except Exception as error:
            report("router", error, f"in the health check of member '{member.name}'")
            return
        self._take(pool, member.name, state)

    def _take(self, pool: RouterPool, name: str, state: MemberState) -> None:
        before = self._known.get(name)
        if state.missed and before is not None and before.ready:
            missed = self._missed[name] = self._missed.get(name, 0) + 1
            if missed < _PATIENCE:
                return
        self._missed.pop(name, None)
        self._known[name] = state
        if state.ready and before is not None and before.gone:
            pool.balancer.restarted(name)
        if state.metered:
            pool.metered.add(name)
        elif state.metered is False:
            pool.metered.discard(name)
        models = state.models
        pool.set_ready(name, state.ready, None if models is None else models.union(pool.settings.serves))
        if before is None or before.ready != state.ready:
            if state.ready:
                count = "unknown models" if state.models is None else f"{len(state.models)} models"
                log.info(f"Member '{name}' of pool '{pool.name}' is ready with {count}")
            else:
                log.warning(f"Member '{name}' of pool '{pool.name}' {state.problem}: it gets no requests")
