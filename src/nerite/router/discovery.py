"""Who is in the pools: members of the cluster file, of a members file, of a name in DNS, of Kubernetes, of Ray."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Final

from nerite.balancing.member import Member
from nerite.cluster.addresses import MAX_MEMBERS, join_address, members_of_text, split_address
from nerite.cluster.settings import PoolSettings
from nerite.config.watched_file import FileContent, WatchedFile, read_content, watch_files
from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.core.work_loop import WorkLoop
from nerite.kubernetes.endpoint_discovery import watch_endpoints
from nerite.kubernetes.object_watch import ObjectWatch
from nerite.observability.log import log
from nerite.router.ray_members import RayMembers

_MAX_FILE: Final = 4 << 20
RESOLVE_SECONDS: Final = 5.0
"""Seconds between two resolutions of a name."""

TakeMembers = Callable[[Sequence[Member]], None]


class MembersFile(WatchedFile[FileContent]):
    """A members file; the last valid content is in force."""

    def __init__(self, pool: PoolSettings) -> None:
        """Read the file. Raises ``InvalidArgument`` for a mistake in it. Blocks on file I/O."""
        self._pool = pool
        found = read_content(pool.source.file, _MAX_FILE)
        super().__init__(pool.source.file, found)
        self.members = self._parsed(found)

    def _parsed(self, found: FileContent) -> tuple[Member, ...]:
        if found.problem:
            raise InvalidArgument(f"the members file '{self.path}' of pool '{self._pool.name}' {found.problem}")
        text = found.data.decode(errors="replace")
        pool = self._pool
        return members_of_text(text, self.path, pool.kind, pool.grpc_port, pool.metrics_port)

    def _take(self, found: FileContent) -> None:
        try:
            self.members = self._parsed(found)
            self.problem = ""
        except InvalidArgument as error:
            self.problem = error.message

    def poll(self) -> FileContent:
        """Read the file. Blocks on file I/O."""
        return read_content(self.path, _MAX_FILE)

    def news(self) -> str:
        """Return the log message after a change."""
        if self.problem:
            return f"{self.problem}\nThe previous members stay in force until it is corrected"
        return f"the members file '{self.path}' was read and is in force: {len(self.members)} members"


class Discovery:
    """Finds the members of one pool, and goes on finding them."""

    def __init__(self, pool: PoolSettings, take: TakeMembers) -> None:
        """``take`` is called with all members when they have changed."""
        self._pool = pool
        self._on_change = take
        self._file: MembersFile | None = None
        self._endpoints: ObjectWatch | None = None
        self._ray: RayMembers | None = None
        self._resolved: tuple[Member, ...] | None = None
        followed = pool.source.file or pool.source.dns  # the others have connections of their own, which may be silent
        self.loop = WorkLoop("discovery", f"pool '{pool.name}'", waiting=lambda: 1 if followed else 0)

    async def start(self) -> None:
        """Find the members for the first time. Raises ``NeriteError`` for a file with a mistake, or without Ray."""
        source = self._pool.source
        if source.models:
            raise Unsupported(
                f"pool '{self._pool.name}' has models instead of members: start it with nerite up or nerite ray up, "
                "or write members in the cluster file"
            )
        if source.file:
            self._file = await asyncio.to_thread(MembersFile, self._pool)
            self._take(self._file.members)
        elif source.kubernetes is not None:
            self._endpoints = await watch_endpoints(self._pool, source.kubernetes, self._take)
        elif source.ray:
            self._ray = RayMembers(self._pool, self._take)
            self._take(())
        elif source.dns:
            await self._resolve()
        else:
            self._take(source.members)

    def _take(self, members: Sequence[Member]) -> None:
        pool = self._pool
        self._on_change(members if pool.tls is None else [member._replace(tls=pool.name) for member in members])

    async def run(self) -> None:
        """Follow changes until it is cancelled."""
        if self._file is not None:
            await watch_files(self._file, self._file_changed, self.loop)
        if self._endpoints is not None:
            await self._endpoints.run(self.loop)
        if self._ray is not None:
            await self._ray.run(self.loop)
        while self._pool.source.dns:
            await asyncio.sleep(RESOLVE_SECONDS)
            with self.loop.step("the name"):
                await self._resolve()

    def _file_changed(self) -> None:
        assert self._file is not None
        (log.warning if self._file.problem else log.info)(self._file.news())
        self._take(self._file.members)

    async def _resolve(self) -> None:
        """Resolve the name. Without an answer the last members stay."""
        pool = self._pool
        host, port = split_address(pool.source.dns)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            log.warning(f"pool '{pool.name}': cannot resolve '{host}': {error.strerror}. The last members stay")
            if self._resolved is None:
                self._take(())
                self._resolved = ()
            return
        addresses = sorted({str(place[0]) for _, _, _, _, place in found})[:MAX_MEMBERS]
        members = tuple(
            Member(
                join_address(address, port),
                join_address(address, port),
                join_address(address, pool.grpc_port) if pool.grpc_port else "",
                pool.kind,
                metrics=join_address(address, pool.metrics_port) if pool.metrics_port else "",
            )
            for address in addresses
        )
        if members != self._resolved:
            log.info(f"pool '{pool.name}': '{host}' has {len(members)} addresses")
            self._take(members)
            self._resolved = members  # only now, or members that could not be taken would not be tried again


def check_sources(pools: Sequence[PoolSettings]) -> list[str]:
    """Return the mistakes in the files that pools name. Blocks on file I/O."""
    mistakes = []
    for pool in pools:
        if pool.source.file:
            try:
                MembersFile(pool)
            except NeriteError as error:
                mistakes.append(error.message)
    return mistakes
