"""Memoization with bounded memory: byte budgets for all caches that are filled by client input.

Results computed for a head, a header or a message are kept for the next equal one. A *memo* is a dictionary owned by
the object that uses it, so a hit costs one ``dict.get`` and the memo is released with its owner. Entries are inserted
through the *budget* of their kind, which bounds the bytes of all memos of that kind together and evicts in order of
insertion (FIFO). An entry above the budget's limit for a single entry is not kept.

All budgets of a process are listed below. Their sum bounds what clients can make a process remember, whatever they
send. Sizes are estimates that are never below the real ones, see ``headers.py``.
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
"""Overhead of an entry in bytes, besides its key and value: its slots in the memo and in the budget's queue."""
LARGEST: Final = 256 * 1024
"""Default limit for a single entry in bytes: 16 KB of JSON may become this much once parsed."""


class Memo(dict[KEY, VALUE]):
    """A dictionary whose entries are inserted through a budget. The budget holds only a weak reference to it."""

    __slots__ = ("__weakref__",)
    __weakref__: Any


class Evictable(Protocol[K, V]):
    """Container that a budget inserts into and evicts from: a memo, or an object that tracks a memo's entries."""

    __weakref__: Any
    """Required, because the budget keeps weak references; a plain dictionary does not support them."""

    def __setitem__(self, key: K, value: V, /) -> None:
        """Store an entry."""

    def pop(self, key: K, default: None, /) -> object:
        """Remove an entry if it is still present."""


class ByteBudget:
    """Limit on the bytes that all memos of one kind take in this process. Thread-safe."""

    __slots__ = ("_entries", "_lock", "elsewhere", "evictions", "largest", "limit", "name", "processes", "used")

    def __init__(self, name: str, limit: int, largest: int = LARGEST) -> None:
        """Entries of more than ``largest`` bytes are not kept."""
        self.name = name
        """Label of the metrics."""
        self.limit = limit
        self.largest = largest
        self.used = 0
        """Bytes of entries inserted and not yet evicted, including entries whose memo no longer exists."""
        self.evictions = 0
        self.elsewhere = 0
        """Bytes of this kind in other processes of the server."""
        self.processes = 1
        """Number of processes of the server with such a budget."""
        self._entries: deque[tuple[ref[Evictable[Any, Any]], Any, int]] = deque()
        """Memo, key and size, oldest first. Weak references, because a memo may keep a whole model alive."""
        # Reentrant, because destroying an evicted object may call ``put`` again.
        self._lock = threading.RLock()

    def put(self, memo: Evictable[K, V], key: K, value: V, size: int) -> None:
        """Store an entry of about ``size`` bytes in ``memo`` unless it is too large; evict the oldest to make room.

        The owner of a memo may remove or replace entries at any time: their bytes count until they are evicted here.
        """
        size += ENTRY
        if size > self.largest:
            return
        with self._lock:
            memo[key] = value
            self._entries.append((ref(memo), key, size))
            self.used += size
            while self.used > self.limit:
                reference, oldest_key, size = self._entries.popleft()
                self.used -= size
                self.evictions += 1
                oldest = reference()
                if oldest is not None:
                    oldest.pop(oldest_key, None)


_MB: Final = 1024 * 1024
HTTP_HEADS: Final = ByteBudget("http_heads", 8 * _MB)
"""Parsed heads of HTTP requests, and their resolved routes."""
HTTP_PLANS: Final = ByteBudget("http_plans", 12 * _MB)
"""Parsed JSON parts of HTTP inference requests, and their request headers."""
HTTP_REPEATS: Final = ByteBudget("http_repeats", 12 * _MB)
"""Repeated requests of a connection, recognized by their first bytes."""
HTTP_REPLIES: Final = ByteBudget("http_replies", 6 * _MB)
"""Encoded heads of replies to HTTP inference requests."""
GRPC_METADATA: Final = ByteBudget("grpc_metadata", 12 * _MB)
"""Decoded header blocks of gRPC connections, and their resolved methods and metadata."""
GRPC_PLANS: Final = ByteBudget("grpc_plans", 12 * _MB)
"""Parsed gRPC inference requests, and their request headers."""
REFUSALS: Final = ByteBudget("refusals", 1 * _MB, largest=8 * 1024)
"""Encoded error replies, and the "did you mean" suggestions in them."""
ACCESS_LOG: Final = ByteBudget("access_log", 1 * _MB, largest=8 * 1024)
"""Rendered access log fields of a path or a status."""
CACHE_KEYS: Final = ByteBudget("cache_keys", 4 * _MB)
"""Hashes of request headers, for response cache keys."""
RESPONSE_HEADERS: Final = ByteBudget("response_headers", 8 * _MB)
"""Response headers, by names and shapes of their outputs."""
CALLS: Final = ByteBudget("calls", 4 * _MB)
"""Prepared framework calls: how inputs and outputs of a request map to a framework."""
MODEL_CALLS: Final = ByteBudget("model_calls", 4 * _MB)
"""Request headers of BLS calls."""
GRAMMARS: Final = ByteBudget("grammars", 2 * _MB)
"""Validation results of grammars, by hash."""
TRACES: Final = ByteBudget("traces", 2 * _MB)
"""Encoded parts of spans and trace file lines that repeat."""
SEQUENCES: Final = ByteBudget("sequences", 16 * _MB)
"""Request and response headers of sequences, extended by controls and states."""
ENSEMBLES: Final = ByteBudget("ensembles", 8 * _MB)
"""Request headers of ensemble steps, and the headers of the ensembles' responses."""
ROUTES: Final = ByteBudget("routes", 6 * _MB)
"""Headers of requests to routes, as each arm gets them."""
WORKER_HEADERS: Final = ByteBudget("worker_headers", 12 * _MB)
"""Headers that the server has interned with its workers. A worker keeps the headers it has received."""
WORKER_REPLIES: Final = ByteBudget("worker_replies", 2 * _MB)
"""Headers that a worker has interned with the server, which keeps them per worker. Used in workers only."""

BUDGETS: Final = (
    HTTP_HEADS, HTTP_PLANS, HTTP_REPEATS, HTTP_REPLIES, GRPC_METADATA, GRPC_PLANS, REFUSALS, ACCESS_LOG, CACHE_KEYS,
    RESPONSE_HEADERS, CALLS, MODEL_CALLS, GRAMMARS, TRACES, SEQUENCES, ENSEMBLES, ROUTES, WORKER_HEADERS,
    WORKER_REPLIES,
)  # fmt: skip
"""All budgets. Their sum is at most ``TOTAL``."""
TOTAL: Final = 132 * _MB
