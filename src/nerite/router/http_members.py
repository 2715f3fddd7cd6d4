"""The members of all pools over HTTP: their connections, and requests of the router itself to them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final, NamedTuple

from nerite.balancing.member import Member
from nerite.core.tensor import Buffer
from nerite.observability.log import log
from nerite.router.member_connection import MemberConnection, MemberConnections
from nerite.router.pools import RouterPool
from nerite.router.response_body import ChunkScanner, pieces_of
from nerite.router.response_head import ResponseHead, ResponseHeads

_MAX_ANSWER: Final = 16 << 20
"""Bytes of an answer that the router reads itself."""


class MemberAnswer(NamedTuple):
    """Answer of a member to a request of the router itself."""

    status: int
    body: bytes = b""
    problem: str = ""
    """Why there is no answer, as the end of a sentence about the member; empty if there is one."""
    unreachable: bool = False
    """Nothing listens at its address."""


class _Question:
    """Waits for a connection and for the response, and collects it."""

    def __init__(self, connections: MemberConnections, request: bytes) -> None:
        self.answer: asyncio.Future[MemberAnswer] = asyncio.get_running_loop().create_future()
        self._connections = connections
        self._connection: MemberConnection | None = None
        self._request = request
        self._status = 0
        self._body = bytearray()
        self._over = False
        connections.acquire(self)

    def withdraw(self) -> None:
        """Give up."""
        self._connections.withdraw(self)
        if self._connection is not None and not self._over:
            self._connection.abandon()

    def connected(self, connection: MemberConnection) -> None:
        self._connection = connection
        connection.request(self, [self._request])

    def unconnected(self, cause: str) -> None:
        self._set(MemberAnswer(0, problem=cause, unreachable=True))

    def take_whole(self, head: ResponseHead, load: bytes, body: Buffer) -> None:
        self._set(MemberAnswer(head.status, bytes(body)))

    def take_head(self, head: ResponseHead, load: bytes) -> None:
        self._status = head.status

    def take_data(self, data: Buffer, scanner: ChunkScanner | None) -> None:
        for piece in [data] if scanner is None else pieces_of(bytes(data), scanner):
            self._body += piece
        if len(self._body) > _MAX_ANSWER and self._connection is not None:
            self._connection.abandon()
            self._set(MemberAnswer(0, problem=f"sent an answer of more than {_MAX_ANSWER} bytes"))

    def take_end(self) -> None:
        self._set(MemberAnswer(self._status, bytes(self._body)))

    def take_loss(self, cause: str, *, stale: bool) -> None:
        if stale:
            self._connections.acquire(self, fresh=True)
        else:
            self._set(MemberAnswer(0, problem=cause))

    def _set(self, answer: MemberAnswer) -> None:
        self._over = True
        if not self.answer.done():
            self.answer.set_result(answer)


class HttpMembers:
    """Connections by the names of members, and whom a request could not reach."""

    def __init__(self, connect_timeout: float) -> None:
        self._connect_timeout = connect_timeout
        self._heads = ResponseHeads()
        self._connections: dict[str, MemberConnections] = {}
        self.suspects: dict[tuple[RouterPool, str], None] = {}
        """Members that could not be reached since their last health check, in order."""
        self.suspected = asyncio.Event()
        """Set when there is a suspect."""

    def of(self, member: Member) -> MemberConnections:
        """Return the connections to a member."""
        found = self._connections.get(member.name)
        if found is None or found.address != member.http:
            if found is not None:
                found.retire()
            found = self._connections[member.name] = MemberConnections(member.http, self._heads, self._connect_timeout)
        return found

    @property
    def open_connections(self) -> dict[str, int]:
        """Number of open connections by member."""
        return {name: each.open for name, each in self._connections.items()}

    def keep(self, names: Collection[str]) -> None:
        """Close the connections to all members but these, and those that have not been used for long."""
        now = asyncio.get_running_loop().time()
        for name in [name for name in self._connections if name not in names]:
            self._connections.pop(name).retire()
        for each in self._connections.values():
            each.close_idle(now)

    def suspect(self, pool: RouterPool, member: Member, cause: str) -> None:
        """Take a member out until its health has been checked: a request could not reach it."""
        if any(load.member.name == member.name and load.ready for load in pool.balancer.members):
            log.warning(f"Member '{member.name}' of pool '{pool.name}' {cause}")
        pool.set_ready(member.name, False)
        self.check_soon(pool, member)

    def check_soon(self, pool: RouterPool, member: Member) -> None:
        """Have the health of a member checked before its next turn."""
        self.suspects[pool, member.name] = None
        self.suspected.set()

    async def ask(
        self, member: Member, method: str, path: str, body: bytes = b"", seconds: float = 5.0
    ) -> MemberAnswer:
        """Send a request of the router itself, and return the answer or why there is none."""
        length = (
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body or method == "POST" else ""
        )
        head = f"{method} {path} HTTP/1.1\r\nHost: {member.http}\r\nUser-Agent: nerite-route\r\n{length}\r\n"
        question = _Question(self.of(member), head.encode() + body)
        try:
            async with asyncio.timeout(seconds):
                return await question.answer
        except TimeoutError:
            return MemberAnswer(0, problem=f"did not answer {method} {path} within {seconds:g} s")
        finally:
            question.withdraw()
