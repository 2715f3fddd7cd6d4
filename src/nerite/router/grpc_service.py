"""The gRPC methods of the router: which go to a member, which concern all of them, and which it answers itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from nerite.admission.policy import IDLE
from nerite.balancing.member import Member, RoutedRequest, ServerKind
from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument, NeriteError, NotFound, Unavailable
from nerite.core.execution_observer import REQUEST_ID
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.http2 import Buffer, ReplyHeaders, RequestHeaders, encode_headers, encode_request
from nerite.router import grpc_routing, load_reports
from nerite.router.accounting import RoutedAccount
from nerite.router.admission import ANYBODY
from nerite.router.grpc_calls import RoutedCall
from nerite.router.grpc_member import GrpcMemberCall
from nerite.router.grpc_relay import CallRouter
from nerite.router.http_members import MAX_ANSWER
from nerite.router.pools import PoolTable
from nerite.transports import access
from nerite.transports.access import Callers
from nerite.transports.grpc import messages
from nerite.transports.grpc.connection import CallTarget, GrpcCall
from nerite.wire import grpc_service as wire
from nerite.wire.health import HealthCheckResponse

_SERVICE: Final = "/inference.GRPCInferenceService/"
_NAME: Final = 0x0A
_CLASS: Final = access.CLASS.encode()
_OF_ROUTERS: Final = frozenset(name.encode() for name in access.OF_ROUTERS)


class MethodKind(Enum):
    """Where the calls of a method go."""

    INFER = auto()
    STREAM = auto()
    ANY = auto()
    """To any member that has the model, if one is named."""
    ALL = auto()
    """To all members, whose answers are merged."""
    ROUTER = auto()
    """To nobody: the router answers."""
    MEMBER = auto()
    """Nowhere: it concerns one server, which has to be asked itself."""


class RouterMethod(NamedTuple):
    """A method of the gRPC port."""

    kind: MethodKind
    name_tag: int = 0
    """Field of the message that names the model; 0 if none does."""
    repeatable: bool = True


_KINDS: Final[Mapping[str, RouterMethod]] = {
    f"{_SERVICE}ModelInfer": RouterMethod(MethodKind.INFER),
    f"{_SERVICE}ModelStreamInfer": RouterMethod(MethodKind.STREAM, repeatable=False),
    f"{_SERVICE}ServerLive": RouterMethod(MethodKind.ROUTER),
    f"{_SERVICE}ServerReady": RouterMethod(MethodKind.ROUTER),
    "/grpc.health.v1.Health/Check": RouterMethod(MethodKind.ROUTER),
    f"{_SERVICE}ModelReady": RouterMethod(MethodKind.ANY, _NAME),
    f"{_SERVICE}ServerMetadata": RouterMethod(MethodKind.ANY),
    f"{_SERVICE}ModelMetadata": RouterMethod(MethodKind.ANY, _NAME),
    f"{_SERVICE}ModelConfig": RouterMethod(MethodKind.ANY, _NAME),
    f"{_SERVICE}RepositoryIndex": RouterMethod(MethodKind.ALL),
    **{
        f"{_SERVICE}{name}": RouterMethod(MethodKind.MEMBER)
        for name in (
            "ModelStatistics", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings",
            "SystemSharedMemoryStatus", "SystemSharedMemoryRegister",
            "SystemSharedMemoryUnregister", "CudaSharedMemoryStatus", "CudaSharedMemoryRegister",
            "CudaSharedMemoryUnregister",
        )
    },
}  # fmt: skip


class RefusedTarget:
    """Target of calls that are refused whatever their message."""

    stream: object = None
    timeout: float | None = None
    max_message = 0
    outer_span = None

    def __init__(self, refusal: bytes | None) -> None:
        self.refusal = refusal

    def start_known(self, call: GrpcCall, framed: bytes | memoryview) -> bool:
        """Recognise no message."""
        return False

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return a new buffer."""
        return memoryview(bytearray(size))

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Do nothing: the call was refused."""

    def answer(self, call: GrpcCall, request: InferenceRequest, response: InferenceResponse) -> None:
        """Do nothing: no inference runs in a router."""

    def too_large(self, size: int) -> NeriteError:
        """Return the error for a message that is too large."""
        return InvalidArgument(
            f"Received message larger than max ({size} vs. {self.max_message}). Increase max-body of [router] in the "
            "cluster file, or send less."
        )


class OwnTarget(RefusedTarget):
    """Target of calls that the router answers itself."""

    def __init__(self, reply: Callable[[], bytes], max_message: int) -> None:
        super().__init__(None)
        self._reply = reply
        self.max_message = max_message

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Answer."""
        call.reply(messages.HEAD, (messages.framed(self._reply()),))


class MemberTarget(RefusedTarget):
    """Target of calls that go to a member."""

    def __init__(
        self,
        router: CallRouter,
        method: RouterMethod,
        headers: RequestHeaders,
        session_headers: Sequence[str],
        max_message: int,
        callers: Callers | None,
        member_key: str,
    ) -> None:
        """Raises ``InvalidArgument`` for headers with wrong values."""
        super().__init__(None)
        path = headers.path
        get = access.texts(lambda name: _text(headers.get(name.encode())))
        self.router = router
        self.stream = self if method.kind is MethodKind.STREAM else None
        self.max_message = max_message
        self.level = checked(get(access.CLASS) or "", f"header '{access.CLASS}'")
        seconds = _grpc_timeout(headers)
        limits = [each for each in (seconds, access.timeout_of(get) or None) if each is not None]
        self.timeout = min(limits, default=None)
        self.waits = method.kind is not MethodKind.ANY
        self.caller = None
        if method.kind is not MethodKind.ANY:
            self.caller = ANYBODY if callers is None else callers.of(get, seconds)
        self._tenant = "" if callers is None or self.caller is None else self.caller.tenant
        self.single = method.kind is not MethodKind.STREAM
        self.reports = headers.get(load_reports.FORMAT) is not None
        self._headers = headers
        self._blocks: dict[tuple[bool, bool, bool], bytes] = {}
        told = access.identity(member_key, self.caller) if self.caller is not None else []
        self._identity = encode_headers([(name.encode(), value.encode()) for name, value in told])
        self._method = method
        self._ready = path.endswith(b"/ModelReady")
        self._window = messages.WINDOWS.get((headers.get(b"grpc-encoding") or b"").decode("latin-1"), 0)
        session = next((value for name in session_headers if (value := get(name))), "")
        self._session = checked(session, "the session in a header")

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Send the call to a member."""
        assert isinstance(call, RoutedCall)
        call.route(self, framed)

    def block_for(self, member: Member, account: RoutedAccount | None, *, idle: bool, reports: bool) -> bytes:
        """Return the headers for a member."""
        key = (idle, bool(member.tls), reports and not self.reports)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _member_block(self._headers, *key)
        if member.kind is not ServerKind.NERITE:
            return block
        if account is None:
            return block + self._identity
        return block + self._identity + encode_headers([(REQUEST_ID.encode(), account.request_id.encode())])

    def routed(self, message: memoryview, complete: bool) -> RoutedRequest | None:
        """Return what the choice of a member depends on; None if more of the message is needed."""
        method = self._method
        if method.kind is MethodKind.ANY:
            name = grpc_routing.name_of(message, self._window, method.name_tag) if method.name_tag else ""
            return RoutedRequest(name, repeatable=method.repeatable)
        facts = grpc_routing.facts_of(message, self._window, complete=complete)
        if facts is None:
            return None
        return grpc_routing.routed_request(
            facts, self._session, single=self.single, repeatable=method.repeatable, tenant=self._tenant
        )

    def refusal_of(self, error: NeriteError) -> tuple[bytes, bytes]:
        """Return what answers a call for which there is no member: a model without one is not ready."""
        if self._ready and isinstance(error, NotFound | Unavailable):
            return messages.HEAD, messages.framed(wire.ModelReadyResponse(ready=False).SerializeToString())
        return messages.of_error(error), b""


class IndexTarget(RefusedTarget):
    """Target of calls that all members answer: ``RepositoryIndex``."""

    def __init__(self, router: CallRouter, table: PoolTable, headers: RequestHeaders, max_message: int) -> None:
        super().__init__(None)
        self._router = router
        self._table = table
        self._headers = headers
        self.timeout = _grpc_timeout(headers)
        self.max_message = max_message

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Ask all members that are ready."""
        members = {member.grpc: member for pool in self._table.pools for member in pool.ready_members if member.grpc}
        if not members:
            call.fail(messages.of_error(Unavailable("no member with a gRPC port is ready")))
            return
        answers = IndexAnswers(call, len(members))
        for member in members.values():
            block = _member_block(self._headers, False, bool(member.tls), False)
            answer = _IndexAnswer(answers)
            answer.call = self._router.call(member, block, answer)
            answer.call.send((framed,), True)


class IndexAnswers:
    """The answers of all members to one ``RepositoryIndex``."""

    def __init__(self, call: GrpcCall, expected: int) -> None:
        self._call = call
        self._expected = expected
        self._answers: list[wire.RepositoryIndexResponse] = []
        self._failure = ""

    def take(self, answer: wire.RepositoryIndexResponse | None, why: str = "") -> None:
        """Take the answer of a member, or why it has none; reply after the last. One that fails is left out."""
        self._expected -= 1
        if answer is None:
            self._failure = why
        else:
            self._answers.append(answer)
        if self._expected or self._call.connection.calls.get(self._call.stream_id) is not self._call:
            return
        if self._answers:
            self._call.reply(messages.HEAD, (messages.framed(merged_index(self._answers)),))
        else:
            self._call.fail(messages.of_error(Unavailable(f"no member has answered; the last {self._failure}")))


class _IndexAnswer:
    """Collects the answer of one member."""

    def __init__(self, answers: IndexAnswers) -> None:
        self._answers = answers
        self._data = bytearray()
        self.call: GrpcMemberCall | None = None

    def response_started(self, headers: ReplyHeaders, end: bool) -> None:
        if end:
            self._answers.take(None, f"answered with status {(headers.get(b'grpc-status') or b'?').decode('latin-1')}")

    def response_data(self, data: Buffer, end: bool) -> None:
        self._data += data
        if end:
            self._answers.take(None, "ended an answer without a status")
        elif len(self._data) > MAX_ANSWER:
            assert self.call is not None
            self.call.cancel()
            self._answers.take(None, f"sent an answer of more than {MAX_ANSWER} bytes")

    def trailers_received(self, trailers: ReplyHeaders) -> None:
        if trailers.get(b"grpc-status") != b"0" or self._data[:1] != b"\0":
            self._answers.take(None, "failed")
            return
        try:
            found = wire.RepositoryIndexResponse.FromString(bytes(self._data[grpc_routing.PREFIX_SIZE :]))
        except DecodeError:
            self._answers.take(None, "sent what is no repository index")
        else:
            self._answers.take(found)

    def call_lost(self, why: str, unprocessed: bool) -> None:
        self._answers.take(None, why)

    def member_writable(self) -> None:
        pass


def merged_index(answers: Sequence[wire.RepositoryIndexResponse]) -> bytes:
    """Return one index of all models and versions: each once, ready if it is so at any member."""
    rows: dict[tuple[str, str], wire.RepositoryIndexResponse.ModelIndex] = {}
    for answer in answers:
        for row in answer.models:
            known = rows.get((row.name, row.version))
            if known is None or (row.state == "READY" and known.state != "READY"):
                rows[row.name, row.version] = row
    return bytes(wire.RepositoryIndexResponse(models=[rows[key] for key in sorted(rows)]).SerializeToString())


def _member_block(headers: RequestHeaders, idle: bool, secure: bool, reports: bool) -> bytes:
    """Return the headers for a member: those of the client. HTTP/2 has none that concern only one connection."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"https" if secure else b"http"),
        (b":path", headers.path),
        (b":authority", headers.authority or b"router"),
        *((name, value) for name, value in headers.fields if name not in _OF_ROUTERS and not (idle and name == _CLASS)),
    ]
    if idle:
        fields.append((_CLASS, IDLE.name.encode()))
    if reports:
        fields.append((load_reports.FORMAT, b"bin"))
    return encode_request(fields)


class GrpcRouterService:
    """Resolves the target of each call, and memoizes it on the headers."""

    def __init__(
        self,
        router: CallRouter,
        table: PoolTable,
        session_headers: Sequence[str],
        max_message: int,
        callers: Callers | None = None,
        scaler: Callable[[str], CallTarget | None] | None = None,
        member_key: str = "",
    ) -> None:
        """``scaler`` returns the target of a path of KEDA's external scaler.

        ``member_key`` is what members know the router by.
        """
        self._scaler = scaler
        self._member_key = member_key
        self._router = router
        self._table = table
        self._sessions = session_headers
        self._callers = callers
        self._max_message = max_message
        self.draining = False
        """The router stops: it is not ready any more."""
        self._own: Mapping[str, CallTarget] = {
            f"{_SERVICE}ServerLive": self._answering(lambda: wire.ServerLiveResponse(live=True).SerializeToString()),
            f"{_SERVICE}ServerReady": self._answering(
                lambda: wire.ServerReadyResponse(ready=self.ready).SerializeToString()
            ),
            "/grpc.health.v1.Health/Check": self._answering(
                lambda: HealthCheckResponse(status="SERVING" if self.ready else "NOT_SERVING").SerializeToString()
            ),
        }

    def _answering(self, reply: Callable[[], bytes]) -> CallTarget:
        return OwnTarget(reply, messages.MAX_QUESTION)

    @property
    def ready(self) -> bool:
        """Whether a member is ready."""
        return self._table.ready and not self.draining

    def target(self, headers: RequestHeaders) -> CallTarget:
        """Return the target of a call."""
        target: CallTarget = self._target(headers)
        headers.memo = target
        return target

    def _target(self, headers: RequestHeaders) -> CallTarget:
        path = headers.path.decode("latin-1")
        content_type = headers.get(b"content-type") or b""
        if headers.method != b"POST" or not content_type.startswith(b"application/grpc"):
            return RefusedTarget(messages.NOT_GRPC)
        method = _KINDS.get(path)
        if method is None and self._scaler is not None and (target := self._scaler(path)) is not None:
            target.timeout = _grpc_timeout(headers)
            return target
        if method is None:
            return RefusedTarget(messages.trailers_only(messages.UNIMPLEMENTED, ""))
        if method.kind is MethodKind.ROUTER:
            return self._own[path]
        if method.kind is MethodKind.MEMBER:
            text = f"{path.rpartition('/')[2]} concerns one server. Call the gRPC port of that member, not the router."
            return RefusedTarget(messages.trailers_only(messages.UNIMPLEMENTED, text))
        try:
            return (
                IndexTarget(self._router, self._table, headers, messages.MAX_QUESTION)
                if method.kind is MethodKind.ALL
                else MemberTarget(
                    self._router, method, headers, self._sessions, self._max_message, self._callers, self._member_key
                )
            )
        except NeriteError as error:
            return RefusedTarget(messages.of_error(error))


def _grpc_timeout(headers: RequestHeaders) -> float | None:
    """Return the seconds that the client waits; None if it does not say."""
    value = headers.get(b"grpc-timeout")
    return None if value is None else messages.timeout_seconds(value)


def _text(value: bytes | None) -> str | None:
    """Return a header's value as the HTTP port has it."""
    return None if value is None else value.decode("latin-1")
