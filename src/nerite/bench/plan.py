"""What generators are told: where to send what, and how much of it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nerite.bench.scripts import Scripts
from nerite.client.address import Address

Protocol = Literal["http", "grpc", "openai"]
Arrivals = Literal["constant", "poisson"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is the same for all levels of load."""

    protocol: Protocol
    address: Address
    scripts: Scripts
    """What is sent."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of calls over gRPC; in requests over HTTP they are already."""
    streaming: bool = False
    """Answers come in parts."""
    decoupled: bool = False
    """The model says which response of several is the last."""
    timeout: float = 60.0
    """Seconds after which a request is given up."""

    def context(self) -> ssl.SSLContext | None:
        """Return how connections are encrypted."""
        if not self.address.tls:
            return None
        context = ssl.create_default_context()
        context.set_alpn_protocols(["h2" if self.protocol == "grpc" else "http/1.1"])
        return context


@dataclass(frozen=True, slots=True)
class Level:
    """How much is asked: so many requests under way at any time, or so many a second."""

    concurrency: int = 0
    rate: float = 0.0
    arrivals: Arrivals = "constant"

    @property
    def open(self) -> bool:
        """Whether requests are sent without regard to answers."""
        return self.rate > 0

    @property
    def kind(self) -> str:
        """What its number means, in a word."""
        return "rate" if self.open else "concurrency"

    @property
    def value(self) -> float:
        """The number that it is known by."""
        return self.rate if self.open else self.concurrency

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.open else f"{self.concurrency}"
