"""A stand-in for an engine behind the OpenAI API: the simulated member of ``balancing_members.py``, in real time.

It has a real prefix cache, continuous batching and chunked prefill; only the arithmetic is missing, so that several fit
on a processor beside a router and a client. Each answer ends with ``usage``, which says how much of the prompt was
cached. With ``--fixed`` it has no cache, answers every request after so many seconds in one piece, and says how long
it had the request.

    python benchmarks/paced_engine.py PORT [--slowness F] [--cached TOKENS] [--fixed SECONDS]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from array import array
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from balancing_members import SimulatedMember, SimulatedRequest

MODEL: Final = "m"
_LATE: Final = 0.05
"""Seconds behind its plan after which an engine plans anew, instead of making up for the time: it stood still."""
_LENGTH: Final = re.compile(rb"content-length: *(\d+)")
_STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS: Final = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "me", "created": 1}]}


class TokenSink(Protocol):
    """Takes the tokens of one answer."""

    def tokens(self, request: SimulatedRequest, count: int) -> None:
        """Take the next tokens."""

    def end(self, request: SimulatedRequest) -> None:
        """Take the end."""


class PacedEngine:
    """Runs the steps of a simulated member at their times."""

    def __init__(self, member: SimulatedMember) -> None:
        self._member = member
        self._due = 0.0
        self._sinks: dict[SimulatedRequest, TokenSink] = {}

    def submit(self, prompt: bytes, answer: int, sink: TokenSink) -> SimulatedRequest:
        """Add a request."""
        request = SimulatedRequest(prompt, answer, 0.0)
        self._sinks[request] = sink
        self._member.waiting.append(request)
        if not self._member.stepping:
            self._due = asyncio.get_running_loop().time()
            self._step()
        return request

    def withdraw(self, request: SimulatedRequest) -> None:
        """Drop a request: nobody waits for it any more."""
        if self._sinks.pop(request, None) is not None:
            for place in (self._member.waiting, self._member.running):
                if request in place:
                    place.remove(request)

    def _step(self) -> None:
        member = self._member
        member.stepping = bool(member.waiting or member.running)
        if not member.stepping:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now > self._due + _LATE:
            self._due = now
        # Timers are late by up to a millisecond; steps that are planned from their plans are late no more than that.
        self._due += member.plan_step()
        loop.call_at(self._due, self._end_step)

    def _end_step(self) -> None:
        ended = self._member.end_step(self._due, lambda request, count: self._sinks[request].tokens(request, count))
        for request in ended:
            self._sinks.pop(request).end(request)
        self._step()


def usage(request: SimulatedRequest) -> dict[str, Any]:
    """Return what an answer says of its tokens."""
    return {
        "prompt_tokens": request.tokens,
        "completion_tokens": request.answer,
        "total_tokens": request.tokens + request.answer,
        "prompt_tokens_details": {"cached_tokens": request.cached},
    }


def event(chat: bool, text: str, request: SimulatedRequest | None = None) -> bytes:
    """Return an event of a stream; with ``request``, its last one but ``[DONE]``."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": None if request is None else "length"}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    kind = "chat.completion.chunk" if chat else "text_completion"
    fields: dict[str, Any] = {"id": "a", "object": kind, "created": 1, "model": MODEL, "choices": [choice]}
    if request is not None:
        fields["usage"] = usage(request)
    return b"data: %b\n\n" % json.dumps(fields, separators=(",", ":")).encode()


def whole(chat: bool, text: str, more: dict[str, Any]) -> bytes:
    """Return the body of an answer in one piece."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    kind = "chat.completion" if chat else "text_completion"
    return json.dumps({"id": "a", "object": kind, "created": 1, "model": MODEL, "choices": [choice], **more}).encode()


def prompt_of(fields: dict[str, Any]) -> bytes:
    """Return the text that the cache sees."""
    messages = fields.get("messages")
    if messages is None:
        return str(fields["prompt"]).encode()
    return "\n".join(f"{each['role']}: {each['content']}" for each in messages).encode()


def rendered(prompt: bytes) -> bytes:
    """Return a prompt as tokens, the way vLLM's servers tell routers that ask for it."""
    tokens = [each % 100_000 for each in array("I", prompt[: len(prompt) // 4 * 4])]
    return json.dumps({"request_id": "a", "token_ids": tokens, "sampling_params": {}, "model": MODEL}).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_EVENTS: Final = {chat: _chunk(event(chat, " two words")) for chat in (False, True)}
_LAST: Final = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class EngineConnection(asyncio.Protocol):
    """A connection of HTTP/1.1 to the engine, with one request at a time."""

    def __init__(self, engine: PacedEngine, fixed: float | None) -> None:
        self._engine = engine
        self._fixed = fixed
        self._received = b""
        self._request: SimulatedRequest | None = None
        self._chat = self._streams = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what is under way."""
        if self._request is not None:
            self._engine.withdraw(self._request)

    def data_received(self, data: bytes) -> None:
        """Answer the requests that are complete."""
        self._received += data
        while (end := self._received.find(b"\r\n\r\n") + 4) > 3:
            head = self._received[:end].lower()
            length = _LENGTH.search(head)
            size = int(length[1]) if length else 0
            if len(self._received) < end + size:
                return
            body = self._received[end : end + size]
            self._received = self._received[end + size :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith((b"post /v1/chat/completions ", b"post /v1/completions ")):
            self._chat = head.startswith(b"post /v1/chat/")
            if self._fixed is None:
                fields = json.loads(body)
                self._streams = bool(fields.get("stream"))
                self._request = self._engine.submit(prompt_of(fields), int(fields["max_tokens"]), self)
            else:
                asyncio.get_running_loop().call_later(self._fixed, self._answer_late, time.perf_counter())
        elif head.startswith(b"post /v1/chat/completions/render "):
            self._send(rendered(prompt_of(json.loads(body))))
        elif head.startswith(b"get /v1/models "):
            self._send(json.dumps(_MODELS).encode())
        elif head.startswith((b"get /health ", b"get /v2/health/")):
            self._send(b"")
        else:
            self._send(b'{"detail":"Not Found"}', b"404 Not Found")

    def _answer_late(self, since: float) -> None:
        spent = time.perf_counter() - since
        self._send(whole(self._chat, "word " * 40, {"served_us": round(spent * 1e6)}))

    def _send(self, body: bytes, status: bytes = b"200 OK") -> None:
        if not self._transport.is_closing():
            head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
            self._transport.write(head + body)

    def tokens(self, request: SimulatedRequest, count: int) -> None:
        """Send tokens."""
        if self._streams:
            first = request.left + count == request.answer
            self._transport.write(_STREAM_HEAD + _EVENTS[self._chat] if first else _EVENTS[self._chat])

    def end(self, request: SimulatedRequest) -> None:
        """Send the end."""
        self._request = None
        if self._streams:
            self._transport.write(_chunk(event(self._chat, "", request)) + _LAST)
        else:
            self._send(whole(self._chat, "word " * request.answer, {"usage": usage(request)}))


async def serve(port: int, connection: Callable[[], asyncio.Protocol]) -> None:
    """Listen until the process is killed."""
    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", port, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Run a member."""
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--slowness", type=float, default=1.0)
    parser.add_argument("--cached", type=int, default=100_000, metavar="TOKENS")
    parser.add_argument("--fixed", type=float, metavar="SECONDS")
    given = parser.parse_args()
    engine = PacedEngine(SimulatedMember("member", given.cached, given.slowness))
    uvloop.run(serve(given.port, lambda: EngineConnection(engine, given.fixed)))


if __name__ == "__main__":
    main()
