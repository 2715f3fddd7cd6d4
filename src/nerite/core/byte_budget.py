"""Memos of what clients send: how many bytes of it are remembered, and what is forgotten first.

What was worked out once for a head, a header or a message is kept for the next one that is equal. A *memo* is a
dictionary of the object that uses it, so a hit costs what ``dict.get`` costs, and it ends with that object. Entries go
in through the *budget* of their kind: it bounds the bytes of all memos of the kind, however many there are, and evicts
in the order of insertion. An entry that is larger than the budget allows for one is not kept at all.

All budgets of a process are in the table below. Their sum bounds what clients can make a process remember, whatever
they send. Sizes are estimates that are not below the real ones, see ``footprint.py``.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final, Protocol, TypeVar
from weakref import ref

K = TypeVar("K", contravariant=True)
V = TypeVar("V", contravariant=True)
KEY = TypeVar("KEY")
VALUE = TypeVar("VALUE")

ENTRY: Final = 256
"""Bytes that an entry takes beside its key and value: its places in the memo and in the budget's queue."""
LARGEST: Final = 256 * 1024
"""Bytes of the largest entry, unless its budget says otherwise: what 16 KB of JSON may become once it is parsed."""


class Memo(dict[KEY, VALUE]):
    """A dictionary whose entries go in through a budget, which does not keep it alive."""

    __slots__ = ("__weakref__",)
    __weakref__: Any


class Evictable(Protocol[K, V]):
    """A memo, or what is to be told of its entries."""

    __weakref__: Any
    """Weak references to it are possible, as they are not to a plain dictionary."""

    def __setitem__(self, key: K, value: V, /) -> None:
        """Keep an entry."""

    def pop(self, key: K, default: None, /) -> object:
        """Forget an entry, which may be gone already."""


class ByteBudget:
    """The bytes that all memos of one kind may take in this process. May be used from any thread."""

    __slots__ = ("_entries", "_lock", "evictions", "largest", "limit", "name", "used")

    def __init__(self, name: str, limit: int, largest: int = LARGEST) -> None:
        """``largest``: an entry of more bytes is not kept."""
        self.name = name
        """The label of the metrics."""
        self.limit = limit
        self.largest = largest
        self.used = 0
        """Bytes of the entries that were put and not evicted. Those whose memo is gone count until it is their turn."""
        self.evictions = 0
        self._entries: deque[tuple[ref[Evictable[Any, Any]], Any, int]] = deque()
        """Memo, key and size; the oldest first. The memo goes with its owner: what is in it may be a whole model."""
        # Reentrant: what is evicted is destroyed inside, and may put something itself.
        self._lock = threading.RLock()

    def put(self, memo: Evictable[K, V], key: K, value: V, size: int) -> None:
        """Keep an entry of about ``size`` bytes in ``memo``, unless it is too large; evict the oldest to make room.

        The owner of a memo may remove or replace entries as it likes: their bytes count until it is their turn.
        """
        size += ENTRY
        if size > self.largest:
            return
        with self._lock:
            memo[key] = value
            self._entries.append((ref(memo), key, size))
            self.used += size
            while self.used > self.limit:
                of_oldest, key_of_oldest, size = self._entries.popleft()
                self.used -= size
                self.evictions += 1
                oldest = of_oldest()
                if oldest is not None:
                    oldest.pop(key_of_oldest, None)


_MB: Final = 1024 * 1024
HTTP_HEADS: Final = ByteBudget("http_heads", 8 * _MB)
"""Parsed heads of HTTP requests, and what they lead to."""
HTTP_PLANS: Final = ByteBudget("http_plans", 12 * _MB)
"""Parsed JSON parts of infer requests over HTTP, and the request headers in them."""
HTTP_REPEATS: Final = ByteBudget("http_repeats", 12 * _MB)
"""Requests of a connection that are recognized by their first bytes."""
HTTP_REPLIES: Final = ByteBudget("http_replies", 6 * _MB)
"""Encoded heads of replies to infer requests over HTTP."""
GRPC_METADATA: Final = ByteBudget("grpc_metadata", 12 * _MB)
"""Decoded header blocks of gRPC connections, and what they lead to."""
GRPC_PLANS: Final = ByteBudget("grpc_plans", 12 * _MB)
"""Parsed infer requests over gRPC, and the request headers in them."""
REFUSALS: Final = ByteBudget("refusals", 1 * _MB, largest=8 * 1024)
"""Encoded refusals, and what was meant by the names in them."""
ACCESS_LOG: Final = ByteBudget("access_log", 1 * _MB, largest=8 * 1024)
"""What the access log says of a path or of a status."""
CACHE_KEYS: Final = ByteBudget("cache_keys", 4 * _MB)
"""Hashes of request headers, for the keys of the response cache."""
RESPONSE_HEADERS: Final = ByteBudget("response_headers", 8 * _MB)
"""Headers of responses, by the names and shapes of their outputs."""
CALLS: Final = ByteBudget("calls", 4 * _MB)
"""How inputs and outputs of a request are passed to a framework."""
MODEL_CALLS: Final = ByteBudget("model_calls", 4 * _MB)
"""Headers of requests that models make to other models."""
GRAMMARS: Final = ByteBudget("grammars", 2 * _MB)
"""Grammars that were found valid or not, by their hash."""
TRACES: Final = ByteBudget("traces", 2 * _MB)
"""Encoded parts of spans and of lines in trace files that repeat."""
SEQUENCES: Final = ByteBudget("sequences", 16 * _MB)
"""Headers of requests and responses of sequences, with controls and states."""
ENSEMBLES: Final = ByteBudget("ensembles", 8 * _MB)
"""What the steps of ensembles are asked, and how their answers are put together."""
WORKER_HEADERS: Final = ByteBudget("worker_headers", 12 * _MB)
"""Headers that the server has introduced to its workers. A worker keeps those that it was told."""
WORKER_REPLIES: Final = ByteBudget("worker_replies", 2 * _MB)
"""Headers that a worker has introduced to the server, which keeps those of each worker. Used in workers only."""

BUDGETS: Final = (
    HTTP_HEADS, HTTP_PLANS, HTTP_REPEATS, HTTP_REPLIES, GRPC_METADATA, GRPC_PLANS, REFUSALS, ACCESS_LOG, CACHE_KEYS,
    RESPONSE_HEADERS, CALLS, MODEL_CALLS, GRAMMARS, TRACES, SEQUENCES, ENSEMBLES, WORKER_HEADERS, WORKER_REPLIES,
)  # fmt: skip
"""All there are. Together they may take at most ``TOTAL``."""
TOTAL: Final = 128 * _MB
