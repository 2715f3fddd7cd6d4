"""Slots over gRPC: a call for each request, or a stream on which one follows the other."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from time import perf_counter
from typing import Final

from nerite.bench.generator.grpc_line import Call, GrpcLine
from nerite.bench.generator.slot import Slot, Work
from nerite.bench.scripts import Script
from nerite.client.address import Address
from nerite.http2.compression import encode_fields
from nerite.wire import grpc_service

SERVICE: Final = "/inference.GRPCInferenceService/"
_SHARED_BY: Final = 8
"""Slots that share a connection."""
_PREFIX: Final = 5


class GrpcPort:
    """Where slots connect to."""

    def __init__(
        self,
        address: Address,
        context: ssl.SSLContext | None,
        headers: Mapping[str, str],
        *,
        streaming: bool = False,
        decoupled: bool = False,
    ) -> None:
        self._address = address
        self._context = context
        self._block = header_block(address, "ModelStreamInfer" if streaming else "ModelInfer", headers)
        self._streaming = streaming
        self._decoupled = decoupled
        self._lines: list[GrpcLine] = []
        self._slots = 0

    def slot(self, work: Work, script: Script) -> Slot:
        """Make a slot."""
        if self._slots % _SHARED_BY == 0:
            self._lines.append(GrpcLine(self._address, self._context, self._block))
        self._slots += 1
        line = self._lines[-1]
        if self._streaming:
            return StreamSlot(line, work, script, decoupled=self._decoupled)
        return CallSlot(line, work, script)


def header_block(address: Address, method: str, headers: Mapping[str, str]) -> bytes:
    """Return the headers of a call, in a form that does not depend on what was sent before."""
    authority = f"{address.host}:{address.port}"
    fields = [(":method", "POST"), (":scheme", "https" if address.tls else "http"), (":path", SERVICE + method)]
    fields += [(":authority", authority), ("content-type", "application/grpc"), ("te", "trailers")]
    fields += [(name.lower(), value) for name, value in headers.items()]
    return encode_fields([(name.encode(), value.encode()) for name, value in fields])


class CallSlot(Slot, Call):
    """A call for each request."""

    def __init__(self, line: GrpcLine, work: Work, script: Script) -> None:
        Slot.__init__(self, work, script)
        Call.__init__(self, reads=False)
        self._line = line

    def ask(self) -> None:
        """Send the next request."""
        self._line.open(self, self.next(), last=True)

    def abandon(self, reason: str) -> None:
        """Cancel the call."""
        self._line.cancel(self)
        self.ended(reason)

    def close(self) -> None:
        """Hang up, for all that share the line."""
        self._line.close()

    def received(self, data: bytes) -> None:
        """Nobody wants to read it."""

    def ended(self, reason: str) -> None:
        """Say what came of the request."""
        if reason:
            self.outbox.clear()
            self.work.failed(self, reason)
        else:
            self.work.answered(self)


class StreamSlot(CallSlot):
    """A stream, on which a request is sent when the responses to the last one have all come."""

    def __init__(self, line: GrpcLine, work: Work, script: Script, *, decoupled: bool) -> None:
        super().__init__(line, work, script)
        self.reads = True
        self._decoupled = decoupled
        self._open = False
        self._received = bytearray()
        self._times: list[float] = []

    def ask(self) -> None:
        """Send the next request; open the stream before the first."""
        self._times.clear()
        if self._open:
            self._line.send(self, self.next())
        else:
            self._open = True
            self._line.open(self, self.next(), last=False)

    def received(self, data: bytes) -> None:
        """Take the responses that are complete."""
        received = self._received
        received += data
        while len(received) >= _PREFIX:
            end = _PREFIX + int.from_bytes(received[1:_PREFIX])
            if len(received) < end:
                return
            message = grpc_service.ModelStreamInferResponse.FromString(bytes(received[_PREFIX:end]))
            del received[:end]
            self._take(message)

    def _take(self, message: grpc_service.ModelStreamInferResponse) -> None:
        if message.error_message:
            self.work.failed(self, message.error_message)
            return
        response = message.infer_response
        if response.outputs:
            self._times.append(perf_counter())
        if not self._decoupled or response.parameters["triton_final_response"].bool_param:
            if self._times:
                self.work.recorder.came(self._times, 0)
                self.work.answered(self)
            else:
                self.work.failed(self, "an answer without content")

    def ended(self, reason: str) -> None:
        """Open another stream for the next request."""
        self._open = False
        self._received.clear()
        self.outbox.clear()
        if self.sent:
            self.work.failed(self, reason or "the server ended the stream")
