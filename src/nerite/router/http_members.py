"""The members of all pools over HTTP: their connections, and requests of the router itself to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

import orjson

from nerite.balancing.member import Member
from nerite.core.tensor import Buffer
from nerite.core.text import quoted_text
from nerite.observability.log import log
from nerite.router.member_connection import MemberConnection, MemberConnections
from nerite.router.member_tls import HTTP, MemberContexts
from nerite.router.pools import RouterPool
from nerite.router.response_body import ChunkScanner, pieces_of
from nerite.router.response_head import ResponseHead, ResponseHeads
from nerite.transports.http.head import field_line, request_line

_REASON: Final = 300
"""Characters of a member's error that are quoted."""
MAX_ANSWER: Final = 16 << 20
"""Bytes of an answer that the router reads itself."""
_AGENT: Final = field_line("User-Agent", "nerite-route")
_JSON: Final = field_line("Content-Type", "application/json")


class MemberAnswer(NamedTuple):
    """Answer of a member to a request of the router itself."""

    status: int
    body: bytes = b""
    problem: str = ""
    """Why there is no answer, as the end of a sentence about the member; empty if there is one."""
    unreachable: bool = False
    """Nothing listens at its address."""

    @property
    def failure(self) -> str:
        """Why it is no success, as the end of a sentence about the member."""
        if self.problem:
            return self.problem
        try:
            text = str(orjson.loads(self.body)["error"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = self.body.decode(errors="replace")
        line = text.partition("\n")[0]
        return f"answered with status {self.status}: {quoted_text(line, _REASON)}"


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
        if len(self._body) > MAX_ANSWER and self._connection is not None:
            self._connection.abandon()
            self._set(MemberAnswer(0, problem=f"sent an answer of more than {MAX_ANSWER} bytes"))

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

    def __init__(self, connect_timeout: float, contexts: MemberContexts | None = None) -> None:
        """``contexts`` are those of members that speak TLS."""
        self._connect_timeout = connect_timeout
        self._contexts = contexts or MemberContexts((), HTTP)
        self._heads = ResponseHeads()
        self._keys: dict[str, Callable[[], bytes]] = {}
        self._connections: dict[str, MemberConnections] = {}
        self.suspects: dict[tuple[RouterPool, str], None] = {}
        """Members that could not be reached since their last health check, in order."""
        self.suspected = asyncio.Event()
        """Set when there is a suspect."""

    def set_key(self, header: str, key: Callable[[], bytes], pool: RouterPool) -> None:
        """Send a header with the router's own requests to the members of a pool."""
        self._keys[pool.name] = lambda: b"%b: %b\r\n" % (header.encode(), key())

    def key_of(self, pool: RouterPool) -> bytes:
        """Return the header line that opens the restricted parts of the API of a pool's members; empty without one."""
        key = self._keys.get(pool.name)
        return key() if key is not None else b""

    def of(self, member: Member) -> MemberConnections:
        """Return the connections to a member."""
        found = self._connections.get(member.name)
        if found is None or found.address != member.http:
            if found is not None:
                found.retire()
            tls = self._contexts.of(member, member.http)
            found = MemberConnections(member.http, self._heads, self._connect_timeout, tls)
            self._connections[member.name] = found
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
        self, member: Member, method: str, path: str, body: bytes = b"", seconds: float = 5.0, fields: bytes = b""
    ) -> MemberAnswer:
        """Send a request of the router itself, and return the answer or why there is none.

        ``fields`` are further header lines.
        """
        lines = [request_line(method, path), field_line("Host", member.http), _AGENT]
        if body or method == "POST":
            lines += [_JSON, field_line("Content-Length", str(len(body)))]
        question = _Question(self.of(member), b"".join((*lines, fields, b"\r\n", body)))
        try:
            async with asyncio.timeout(seconds):
                return await question.answer
        except TimeoutError:
            return MemberAnswer(0, problem=f"did not answer {method} {path} within {seconds:g} s")
        finally:
            question.withdraw()
