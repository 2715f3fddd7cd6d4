"""The methods of the picker's port: ``Process`` of external processing, and gRPC's health service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from nerite.http2 import RequestHeaders
from nerite.picker.process_stream import PickSessions, ProcessStream
from nerite.picker.session import PickSession
from nerite.router.grpc_service import RefusedTarget
from nerite.transports.grpc import messages
from nerite.transports.grpc.connection import CallTarget, GrpcCall, GrpcConnection
from nerite.wire.health import HealthCheckRequest, HealthCheckResponse

_EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_PROCESS: Final = f"/{_EXT_PROC}/Process"
_CHECK: Final = "/grpc.health.v1.Health/Check"
_LIVENESS: Final = "liveness"
_READINESS: Final = ("", "readiness", _EXT_PROC)
_NOT_FOUND: Final = 5
_PREFIX_SIZE: Final = 5


class PickerConnection(GrpcConnection):
    """A gateway's connection."""

    _streaming = ProcessStream


class ProcessTarget(RefusedTarget):
    """Target of the calls to ``Process``."""

    def __init__(self, stream: PickSessions) -> None:
        super().__init__(None)
        self.stream = stream
        self.max_message = stream.max_message


class HealthTarget(RefusedTarget):
    """Target of health checks: of the process, and of whether it has endpoints."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        super().__init__(None)
        self.max_message = messages.MAX_QUESTION
        self._ready = ready

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Answer."""
        try:
            service = HealthCheckRequest.FromString(bytes(framed[_PREFIX_SIZE:])).service
        except DecodeError:
            call.fail(messages.trailers_only(messages.INTERNAL, "the message is not a HealthCheckRequest"))
            return
        if service != _LIVENESS and service not in _READINESS:
            call.fail(messages.trailers_only(_NOT_FOUND, f"there is no service '{service[:256]}'"))
            return
        serving = service == _LIVENESS or self._ready()
        answer = HealthCheckResponse(status="SERVING" if serving else "NOT_SERVING")
        call.reply(messages.HEAD, (messages.framed(answer.SerializeToString()),))


class PickerService:
    """Resolves the target of each call, and memoizes it on the headers."""

    def __init__(self, sessions: Callable[[], PickSession], ready: Callable[[], bool], max_message: int) -> None:
        self._sessions = PickSessions(sessions, max_message)
        self._health: CallTarget = HealthTarget(ready)

    def target(self, headers: RequestHeaders) -> CallTarget:
        """Return the target of a call."""
        content_type = headers.get(b"content-type") or b""
        path = headers.path.decode("latin-1")
        target: CallTarget
        if headers.method != b"POST" or not content_type.startswith(b"application/grpc"):
            target = RefusedTarget(messages.NOT_GRPC)
        elif path == _PROCESS:
            target = ProcessTarget(self._sessions)
        elif path == _CHECK:
            target = self._health
        else:
            target = RefusedTarget(messages.trailers_only(messages.UNIMPLEMENTED, f"{path[:256]} is not served here"))
        timeout = headers.get(b"grpc-timeout")
        if timeout is not None and isinstance(target, ProcessTarget):
            target.timeout = messages.timeout_seconds(timeout)
        headers.memo = target
        return target
