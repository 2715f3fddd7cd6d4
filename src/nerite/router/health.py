"""Health of members: whether each is ready, and which models it serves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import orjson

from nerite.balancing.member import Member, ServerKind
from nerite.core.background import BackgroundWork
from nerite.core.work_loop import STALL_SECONDS, WorkLoop
from nerite.observability.log import log
from nerite.repository.version_state import ASLEEP, ON_DEMAND
from nerite.router.http_members import HttpMembers, MemberAnswer
from nerite.router.pools import MemberIndex, RouterPool

_KSERVE: Final = (ServerKind.NERITE, ServerKind.TRITON, ServerKind.KSERVE)
_READY: Final = {
    **dict.fromkeys(_KSERVE, "/v2/health/ready"),
    ServerKind.VLLM: "/health",
    ServerKind.SGLANG: "/health",
    ServerKind.OPENAI: "/v1/models",
}
_READY_ONES: Final = b'{"ready":true}'
_ALL: Final = b"{}"
_IN_MEMORY: Final = ("READY", "LOADING", "UNLOADING")
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
    repository: MemberIndex | None = None
    """None: not asked for, or not known."""
    problem: str = ""
    """Why it is not ready, as the end of a sentence about the member."""
    missed: bool = False
    """It gave no answer, although something listens at its address."""
    metered: bool | None = None
    """It has a row of each of the router's requests in a ledger of its own; None: not known."""
    gone: bool = False
    """Nothing listens at its address: when it is back, it is another process."""
    adapters: frozenset[str] = frozenset()
    """Models that are LoRA adapters of others."""


async def check_member(
    members: HttpMembers,
    member: Member,
    seconds: float,
    fields: bytes = b"",
    *,
    whole: bool = False,
    metering: bool = False,
) -> MemberState:
    """Check one member. ``fields``: header lines for its repository. ``whole``: ask for models that are not ready.

    ``metering``: find out whether it has a ledger that knows the router's requests.
    """
    path = _READY[member.kind]
    answer = await members.ask(member, "GET", path, seconds=seconds)
    if answer.problem:
        return MemberState(False, problem=answer.problem, missed=not answer.unreachable, gone=answer.unreachable)
    unready = "" if answer.status == 200 else f"answered GET {path} with status {answer.status}"
    if unready and not (whole and member.kind in _KSERVE):
        return MemberState(False, problem=unready)
    index = None
    adapters: frozenset[str] = frozenset()
    if member.kind in _KSERVE:
        asked = _ALL if whole or member.kind is ServerKind.NERITE else _READY_ONES
        entries = entries_of(await members.ask(member, "POST", "/v2/repository/index", asked, seconds, fields))
        if entries is None:
            models = None
        elif whole:
            models = _names(entries, ("READY",)) | _loadable(entries)
            if unready and any(map(_makes_unready, entries)):
                unready = ""
            index = MemberIndex(_names(entries), _names(entries, _IN_MEMORY))
        elif asked is _ALL:
            models = _names(entries, ("READY",)) | _loadable(entries)
        else:  # an entry that says nothing of its state is ready, because nothing else was asked for
            models = _names(entries, ("READY", None))
        if models is not None and member.kind is ServerKind.NERITE:
            answer = await members.ask(member, "GET", "/v1/models", seconds=seconds)
            models |= _openai_names(answer) or frozenset()
            adapters = _adapters(answer)
    else:
        if member.kind is not ServerKind.OPENAI:
            answer = await members.ask(member, "GET", "/v1/models", seconds=seconds)
        models, adapters = _openai_names(answer), _adapters(answer)
    metered = None
    if metering and member.kind is ServerKind.NERITE:
        metered = _has_ledger(await members.ask(member, "GET", "/v2", seconds=seconds))
    return MemberState(not unready, models, index, unready, metered=metered, adapters=adapters)


def _makes_unready(entry: Mapping[str, Any]) -> bool:
    """Whether a version is the reason why its server is not ready, although it serves others.

    With strict readiness a server is not ready while it loads a model, and after a load has failed.
    """
    return entry.get("state", "READY") != "READY" and not str(entry.get("reason")).startswith("unloaded")


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


def _loadable(entries: list[dict[str, Any]]) -> frozenset[str]:
    """Return the models that a member loads when a request asks for them."""
    return _names([entry for entry in entries if entry.get("reason") in (ON_DEMAND, ASLEEP)])


def _names(entries: list[dict[str, Any]], states: Collection[str | None] = ()) -> frozenset[str]:
    """Return the names of an index, or those with a version in one of these states (None: it has none)."""
    return frozenset(str(each.get("name", "")) for each in entries if not states or each.get("state") in states)


def _openai_names(answer: MemberAnswer) -> frozenset[str] | None:
    entries = entries_of(answer, "data")
    return None if entries is None else frozenset(str(each.get("id", "")) for each in entries)


def _adapters(answer: MemberAnswer) -> frozenset[str]:
    """Return the models of a list that have another one as their parent, as vLLM lists adapters."""
    entries = entries_of(answer, "data") or ()
    return frozenset(str(each.get("id", "")) for each in entries if isinstance(each.get("parent"), str))


def _loop_of(pool: RouterPool) -> WorkLoop:
    """Return the loop of a pool's checks. Without them nobody would learn which members are ready."""
    stall_seconds = STALL_SECONDS + 3 * pool.settings.health_interval
    return WorkLoop("health", f"pool '{pool.name}'", essential=True, stall_seconds=stall_seconds)


def _unit(member: str) -> str:
    return f"member '{member}'"


class HealthChecks:
    """Checks all members of all pools periodically, and at once those that a request could not reach."""

    def __init__(self, pools: Sequence[RouterPool], members: HttpMembers) -> None:
        self._pools = pools
        self._members = members
        self._limit = asyncio.Semaphore(_CONCURRENCY)
        self._loops = {pool.name: _loop_of(pool) for pool in pools}
        """By pool."""
        self._missed: dict[str, int] = {}
        """Checks without an answer in a row, by member."""
        self._known: dict[str, MemberState] = {}
        self._began: dict[str, int] = {}
        """Number of the newest check that was taken, by member."""
        self._checks = 0
        self.metering = False
        """The router has a ledger, and tells members who sends a request."""

    async def check_all(self) -> None:
        """Check every member once."""
        await asyncio.gather(*(self._check_pool(pool) for pool in self._pools))

    def works(self) -> Iterator[BackgroundWork]:
        """Yield what checks members periodically. Without it nobody learns that a member is ready, or has failed."""
        for pool in self._pools:
            loop = self._loops[pool.name]
            yield BackgroundWork(loop, partial(self._run, pool, loop))
        suspects = WorkLoop("health", "suspects", waiting=lambda: len(self._members.suspects), essential=True)
        yield BackgroundWork(suspects, partial(self._run_suspects, suspects))

    async def _run(self, pool: RouterPool, loop: WorkLoop) -> None:
        """Check the members of one pool until it is cancelled."""
        interval = pool.settings.health_interval
        while True:
            await asyncio.sleep(interval * random.uniform(1 - _JITTER, 1 + _JITTER))
            await self._check_pool(pool)
            loop.advanced()
            with loop.step("members that have left"):
                self._forget_others()

    def _forget_others(self) -> None:
        """Forget members that have left their pools, and close the connections to them."""
        names = {load.member.name for pool in self._pools for load in pool.balancer.members}
        self._members.keep(names)
        for name in [name for name in self._known if name not in names]:
            del self._known[name]
            self._began.pop(name, None)
            self._missed.pop(name, None)
            for loop in self._loops.values():
                loop.forget(_unit(name))

    async def _run_suspects(self, loop: WorkLoop) -> None:
        """Check members that a request could not reach, each at most every half interval, until it is cancelled."""
        while True:
            await self._members.suspected.wait()
            self._members.suspected.clear()
            suspects = list(self._members.suspects)
            self._members.suspects.clear()
            await asyncio.gather(*(
                self.check(pool, load.member)
                for pool, name in suspects
                for load in pool.balancer.members
                if load.member.name == name
            ))  # fmt: skip
            loop.advanced()
            await asyncio.sleep(min(pool.settings.health_interval for pool in self._pools) / 2)

    async def _check_pool(self, pool: RouterPool) -> None:
        members = [load.member for load in pool.balancer.members]
        await asyncio.gather(*(self.check(pool, member) for member in members))

    async def check(self, pool: RouterPool, member: Member) -> None:
        """Check a member now. Never raises: a member whose check fails is not ready, and is checked again."""
        loop, unit = self._loops[pool.name], _unit(member.name)
        with loop.step(unit):
            await self._check(pool, member)
            return
        state = MemberState(False, problem=f"could not be checked: {loop.failing.get(unit, '')}")
        with loop.step(f"{unit} after a check that failed"):
            self._take(pool, member.name, state)

    async def _check(self, pool: RouterPool, member: Member) -> None:
        seconds = min(max(pool.settings.health_interval, 0.5), _MAX_SECONDS)
        async with self._limit:
            self._checks += 1
            number = self._checks
            key, whole = self._members.key_of(pool), pool.settings.placement is not None
            state = await check_member(self._members, member, seconds, key, whole=whole, metering=self.metering)
        if number >= self._began.get(member.name, 0):  # otherwise it has been overtaken by another check
            self._began[member.name] = number
            self._take(pool, member.name, state)

    def _take(self, pool: RouterPool, name: str, state: MemberState) -> None:
        before = self._known.get(name)
        if state.missed and before is not None and before.ready:
            missed = self._missed[name] = self._missed.get(name, 0) + 1
            if missed < _PATIENCE:
                return
        self._missed.pop(name, None)
        if state.ready and before is not None and before.gone:
            pool.balancer.restarted(name)
        if state.metered:
            pool.metered.add(name)
        elif state.metered is False:
            pool.metered.discard(name)
        models = state.models
        models = None if models is None else models.union(pool.settings.serves)
        pool.set_adapters(name, state.adapters)
        pool.set_ready(name, state.ready, models, state.repository)
        self._known[name] = state
        if before is None or before.ready != state.ready:
            if state.ready:
                count = "unknown models" if state.models is None else f"{len(state.models)} models"
                log.info(f"Member '{name}' of pool '{pool.name}' is ready with {count}")
            else:
                log.warning(f"Member '{name}' of pool '{pool.name}' {state.problem}: it gets no requests")
