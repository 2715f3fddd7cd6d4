"""A client that reads streams of tokens: as light as Python allows, for it runs beside what it measures.

So many connections each have one request under way, and the next one when it is answered.
"""

from __future__ import annotations

import json
import selectors
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

Request = tuple[str, int]
"""A prompt, and how many tokens are wanted."""


class Figures(NamedTuple):
    """Of one run. Times in milliseconds, medians."""

    tokens: float
    """A second, from the first request to the last answer."""
    first: float
    """From a request to its first token."""
    between: float
    """From one token to the next."""


def medians(figures: Sequence[Figures]) -> Figures:
    """Return the medians of several runs."""
    return Figures(*map(statistics.median, zip(*figures, strict=True)))


class Api(NamedTuple):
    """A way to ask."""

    body: Callable[[str, str, int], dict[str, object]]
    """Of a request: model, prompt, tokens."""
    path: Callable[[str], str]


def _generate(model: str, prompt: str, tokens: int) -> dict[str, object]:
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"text_input": prompt, "stream": True, "sampling_parameters": json.dumps(sampling)}


def _completion(model: str, prompt: str, tokens: int) -> dict[str, object]:
    asked: dict[str, object] = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True}
    return asked | {"temperature": 0, "ignore_eos": True}


APIS = {
    "generate_stream": Api(_generate, "/v2/models/{}/generate_stream".format),
    "/v1/completions": Api(_completion, lambda _model: "/v1/completions"),
}


class _Stream:
    """A connection, and the request that it has under way."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wanted = 0
        self.asked = self.last = 0.0
        self.events = 0
        self._end = b""
        self._answered = False
        """The head of the answer is here."""

    def ask(self, message: bytes, tokens: int) -> None:
        self.wanted, self.events, self._end, self._answered = tokens, 0, b"", False
        self.asked = time.perf_counter()
        self.socket.sendall(message)

    def read(self) -> tuple[int, bool]:
        """Return how many events there are more, and whether the answer is complete."""
        received = self.socket.recv(1 << 16)
        if not received:
            raise RuntimeError("the server has closed a connection")
        if not self._answered and not received.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(received[:500].decode(errors="replace"))
        self._answered = True
        self._end = (self._end + received)[-5:]
        return received.count(b"data: {"), self._end == b"0\r\n\r\n"


def run(port: int, api: str, model: str, requests: Sequence[Request], streams: int) -> Figures:
    """Send all requests, ``streams`` at a time, and read the answers. Each is as long as it asks for."""
    way = APIS[api]
    messages = deque((message(way, model, prompt, tokens), tokens) for prompt, tokens in requests)
    total = sum(tokens for _, tokens in requests)
    firsts: list[float] = []
    gaps: list[float] = []
    with selectors.DefaultSelector() as selector:
        open_streams = [_Stream(port) for _ in range(min(streams, len(messages)))]
        began = time.perf_counter()
        for stream in open_streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
            stream.ask(*messages.popleft())
        running = len(open_streams)
        while running:
            for key, _ in selector.select(60):
                stream = key.data
                events, complete = stream.read()
                now = time.perf_counter()
                if events:
                    (gaps if stream.events else firsts).append(now - (stream.last if stream.events else stream.asked))
                    stream.events += events
                    stream.last = now
                if complete and messages:
                    stream.ask(*messages.popleft())
                elif complete:
                    selector.unregister(stream.socket)
                    stream.socket.close()
                    running -= 1
        took = time.perf_counter() - began
    return Figures(total / took, statistics.median(firsts) * 1000, statistics.median(gaps) * 1000)


def message(way: Api, model: str, prompt: str, tokens: int, headers: str = "", **more: object) -> bytes:
    """Return a request as it is sent, with further headers, each with its end of line, and fields of the body."""
    body = json.dumps(way.body(model, prompt, tokens) | more).encode()
    head = f"POST {way.path(model)} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
