"""Members of pools, requests as the balancer sees them, and what becomes of them at a member."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple


class ServerKind(StrEnum):
    """What a member speaks, and how its health and load are read."""

    NERITE = "nerite"
    TRITON = "triton"
    KSERVE = "kserve"
    """Any other server of the KServe v2 protocol."""
    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"
    """Any other server of the OpenAI API."""


class Member(NamedTuple):
    """A server of a pool, as discovery describes it."""

    name: str
    """Distinguishes it in the whole cluster: ``HOST:PORT`` of its HTTP port unless the file says otherwise."""
    http: str
    """``HOST:PORT``."""
    grpc: str = ""
    """``HOST:PORT``; empty: it has none."""
    kind: ServerKind = ServerKind.NERITE
    capacity: float = 1.0
    """How much work it does in relation to others."""
    memory: int = 0
    """Bytes for models; 0: not known."""
    metrics: str = ""
    """``HOST:PORT`` of its metrics; empty: not known."""
    tls: str = ""
    """Name of the pool whose settings of TLS its connections use; empty: they are plain."""
    drain: bool = False
    """It is taken out of service: new requests go there only while there is no other, but those of its sequences do."""


class RoutedRequest(NamedTuple):
    """What the choice of a member depends on."""

    model: str
    """Empty: any member will do."""
    version: str = ""
    prompt_tokens: float = 0.0
    """Estimated from bytes; 0 for tensors."""
    answer_tokens: float = 0.0
    """Expected; 0: as many as the model's answers had so far. A tensor request has one token of work."""
    answer_limit: float = math.inf
    """The most that the request allows, such as ``max_tokens``."""
    prefix: tuple[int, ...] = ()
    """Hashes of the beginnings of the prompt, from the shortest to the longest: ``prefix_hashes``."""
    prefix_tokens: tuple[float, ...] = ()
    """How many tokens each of these beginnings has: ``prefix_tokens``."""
    session: str = ""
    lora: str = ""
    sequence: str = ""
    """Names a sequence of a stateful model, which stays on its member."""
    sequence_start: bool = False
    """It begins a sequence, wherever a sequence of this name was before."""
    sequence_end: bool = False
    tenant: str = ""
    """Whose sequence it is: the names of one tenant are not those of another. Empty without tenants."""
    repeatable: bool = True
    """It may go to another member after one has failed without an answer: nothing happens twice, or it may."""
    streams: bool = False
    """Its answer comes in parts, so that it cannot be sent again once it has begun."""
    stored_at: str = ""
    """Tag of the member that keeps the response which the request names or continues: ``response_ids.py``."""


class LoadReport(NamedTuple):
    """What a member says of itself with an answer, such as in ORCA's header. NaN: not said."""

    waiting: float = math.nan
    """Requests that wait in it."""
    running: float = math.nan
    kv_used: float = math.nan
    """Share of the KV cache in use, from 0 to 1."""


class AttemptEnd(StrEnum):
    """How a request ended at a member."""

    ANSWERED = "answered"
    """Any answer for which the member is not to blame: client errors, too."""
    FAILED = "failed"
    """The member answered that it failed: 5xx, or a status of gRPC of this kind."""
    REFUSED = "refused"
    """The member is overloaded or draining and has not begun: 429, 503, GOAWAY beyond the stream."""
    LOST = "lost"
    """The connection broke or timed out before the end of the answer."""
    CANCELLED = "cancelled"
    """The client has gone, or another attempt has won."""
