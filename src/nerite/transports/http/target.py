"""What the head of a request leads to."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nerite.transports.http.dialect import HTTP, Dialect
from nerite.transports.http.handler import HttpExchange
from nerite.transports.http.head import RequestHead
from nerite.transports.http.infer_request import Reader
from nerite.transports.http.reply import Reply

Call = Callable[[HttpExchange, RequestHead, memoryview], None]
"""Answers one request, now or later."""


class Target(NamedTuple):
    """Worked out once for each distinct head; the head keeps it."""

    answer: Reply | None = None
    """Known without asking anybody: not found, not allowed."""
    refusal: Reply | None = None
    reader: Reader | None = None
    """For inference."""
    json_size: int = 0
    """Bytes of the JSON part of an infer request; -1: all of it; 0: none, the body is the tensor."""
    encoding: str = ""
    """How the body is compressed, and empty if it is not."""
    accepts: str = ""
    """How the reply is to be compressed."""
    call: Call | None = None
    """For everything but an infer request of Triton's kinds."""
    dialect: Dialect = HTTP
    """For inference."""
    half: bool = False
    """FP16 and BF16 are given in JSON."""
