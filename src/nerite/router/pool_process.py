"""What the router and the picker have in common: pools, their members and health, and the life of the process."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from nerite.balancing.member import Member
from nerite.cluster.settings import ClusterSettings, RouterSettings
from nerite.config.watched_file import watched
from nerite.core.background import BackgroundWork, report_unhandled, start_background
from nerite.core.errors import NeriteError
from nerite.core.work_loop import WorkLoops
from nerite.observability.log import log
from nerite.observability.machine import usable_memory
from nerite.router.discovery import Discovery
from nerite.router.health import HealthChecks
from nerite.router.http_members import HttpMembers
from nerite.router.member_tls import HTTP, MemberContexts
from nerite.router.pools import PoolTable, RouterPool
from nerite.transports.access import AccessKeys, KeyFile, Lock, check_key_files
from nerite.transports.limits import bytes_for

BYTES_SETTING: Final = "max-bytes-in-flight in [router] of the cluster file"


def most_bytes(router: RouterSettings) -> int:
    """Return how many bytes of requests may be in flight; 0: any number."""
    most = router.max_bytes_in_flight
    return bytes_for(usable_memory()) if most < 0 else most


class PoolProcess(ABC):
    """A process in front of pools: finds their members, checks their health, and serves until a signal arrives."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Raises ``InvalidArgument`` for a file of TLS that cannot be used."""
        self.settings = settings
        self.loops = WorkLoops()
        """What runs beside the requests."""
        self._stop_requested = asyncio.Event()
        self.pools = [RouterPool(pool, random.getrandbits(62)) for pool in settings.pools]
        self.table = PoolTable(self.pools)
        self.table.obstacle = lambda: self.loops.obstacle
        self.members = HttpMembers(settings.router.connect_timeout, MemberContexts(settings.pools, HTTP))
        self.key_files = [file for pool in self.pools if (file := _set_key(pool, self.members)) is not None]
        """Files with keys, which are followed."""
        self.health = HealthChecks(self.pools, self.members)
        self._discoveries = [Discovery(pool.settings, partial(self._take_members, pool)) for pool in self.pools]
        self.session_headers = tuple(dict.fromkeys(pool.session_header for pool in settings.pools))

    async def serve(self) -> int:
        """Start, wait for a signal, and stop; return the exit status."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(report_unhandled)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._request_stop)
        background: list[asyncio.Task[None]] = []
        try:
            await self.start()
            background = start_background(self.background_work(), self.loops)
            await self._stop_requested.wait()
            await self.stop()
        except NeriteError as error:
            log.error(error.message)
            return 1
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self.close()
        return 0

    @abstractmethod
    async def start(self) -> None:
        """Find the members and open the ports. Raises ``NeriteError``."""

    @abstractmethod
    async def stop(self) -> None:
        """Announce the end, stop accepting, and wait for requests in progress."""

    @abstractmethod
    async def close(self) -> None:
        """Release what is still open, however the process ended."""

    def background_work(self) -> Iterator[BackgroundWork]:
        """Yield what runs beside the requests; work that fails is reported and started again."""
        yield from self.health.works()
        for discovery in self._discoveries:
            yield BackgroundWork(discovery.loop, discovery.run)
        for file in self.key_files:
            yield watched(file, partial(_key_changed, file))

    async def find_members(self) -> None:
        """Find the members of all pools, and check each once. Raises ``NeriteError``."""
        for discovery in self._discoveries:
            await discovery.start()
        await self.health.check_all()
        self.members.suspects.clear()  # the new ones among them were checked now

    def _take_members(self, pool: RouterPool, members: Sequence[Member]) -> None:
        """Take what discovery has found; new members are checked at once, so that they get requests soon."""
        known = {load.member.name for load in pool.balancer.members}
        pool.set_members(members)
        for member in members:
            if member.name not in known:
                self.members.check_soon(pool, member)

    @property
    def members_known(self) -> int:
        """Return the number of members, ready or not."""
        return sum(len(list(pool.balancer.members)) for pool in self.pools)

    @property
    def members_ready(self) -> int:
        """Return the number of members that are ready."""
        return sum(len(list(pool.ready_members)) for pool in self.pools)

    def _request_stop(self) -> None:
        """Begin a graceful shutdown; on the second signal, exit immediately."""
        if self._stop_requested.is_set():
            os._exit(1)
        self._stop_requested.set()


def _set_key(pool: RouterPool, members: HttpMembers) -> KeyFile | None:
    """Have the key of a pool's members sent to them; return the file that it is in. Raises ``InvalidArgument``."""
    asked = pool.settings.placement or pool.settings.rollout
    if asked is None or not asked.key:
        return None
    lock = open_lock(asked.key)
    members.set_key(lock.header, lambda: lock.keys.values[0], pool)
    return lock.keys if isinstance(lock.keys, KeyFile) else None


def open_lock(text: str) -> Lock:
    """Return what ``HEADER=VALUE`` or ``HEADER=@FILE`` says. Raises ``InvalidArgument`` for a file without keys."""
    header, _, key = text.partition("=")
    keys = KeyFile(key[1:], check_key_files(key[1:])) if key.startswith("@") else AccessKeys((key.encode(),))
    return Lock(header, keys)


def _key_changed(file: KeyFile) -> None:
    (log.warning if file.problem else log.info)(file.news())
