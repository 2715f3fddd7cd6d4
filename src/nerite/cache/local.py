"""The cache in this process: so many bytes, and what was not asked for longest goes first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from nerite.cache import footprint
from nerite.cache.complaint import Complaint
from nerite.cache.interface import Found
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.observability.exposition import UNLABELLED, Family
from nerite.observability.statistics import Duration

_now = time.monotonic_ns


class LocalCache:
    """Responses up to ``size`` bytes in all, counted as ``footprint`` does: each header once."""

    shared = False

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self.evictions = 0
        self.hits = Duration()
        self.misses = Duration()
        self.insertions = Duration()
        self._kept: OrderedDict[bytes, InferenceResponse] = OrderedDict()
        """The one that was not asked for longest comes first."""
        self._headers: dict[ResponseHeader, int] = {}
        """How many of the responses have each header."""
        self._too_large = Complaint()

    def __len__(self) -> int:
        return len(self._kept)

    def lookup(self, key: bytes, found: Found) -> None:
        """Look for a response; ``found`` is called before this returns."""
        began = _now()
        response = self._kept.get(key)
        if response is None:
            self.misses.add(_now() - began)
        else:
            self._kept.move_to_end(key)
            self.hits.add(_now() - began)
        found(response)

    def insert(self, key: bytes, response: InferenceResponse) -> None:
        """Keep a response, if it is not larger than all there is; others leave until there is room for it."""
        header = response.header
        assert header is not None
        began = _now()
        if key in self._kept:
            self._forget(key)
        takes = footprint.of_response(response)
        if takes + footprint.of_header(header) > self.size:
            self._too_large.say(
                f"Failed to insert key [{key.hex()}] into response cache: Requested byte_size: "
                f"{takes + footprint.of_header(header)} is greater than total cache size: {self.size}"
            )
            return
        self._enter(header)
        while self.used + takes > self.size:
            self._forget(next(iter(self._kept)))
            self.evictions += 1
        self.used += takes
        # What the response was made of are views on memory that is to be used again, or on what a model may change.
        self._kept[key] = InferenceResponse(header, tuple(map(bytes, response.data)))
        self.insertions.add(_now() - began)

    def _enter(self, header: ResponseHeader) -> None:
        """Count a header that one more response has."""
        users = self._headers.get(header, 0)
        self._headers[header] = users + 1
        if not users:
            self.used += footprint.of_header(header)

    def _forget(self, key: bytes) -> None:
        response = self._kept.pop(key)
        self.used -= footprint.of_response(response)
        header = response.header
        assert header is not None
        self._headers[header] -= 1
        if not self._headers[header]:
            del self._headers[header]
            self.used -= footprint.of_header(header)

    def families(self) -> list[Family]:
        """Return the cache's own metrics."""
        return [Family(name, text, "gauge", [(UNLABELLED, read(self))]) for name, text, read in _GAUGES]

    def close(self) -> None:
        """Give back nothing: all there is is in this process."""


_GAUGES: Final[tuple[tuple[str, str, Callable[[LocalCache], float]], ...]] = (
    ("nv_cache_util", "Cache utilization [0.0 - 1.0]", lambda cache: cache.used / cache.size),
    ("nv_cache_num_entries", "Number of responses stored in response cache", len),
    ("nv_cache_num_hits", "Number of cache hits in response cache", lambda cache: cache.hits.count),
    ("nv_cache_num_misses", "Number of cache misses in response cache", lambda cache: cache.misses.count),
    (
        "nv_cache_num_lookups",
        "Number of cache lookups in response cache",
        lambda cache: cache.hits.count + cache.misses.count,
    ),
    ("nv_cache_num_evictions", "Number of cache evictions in response cache", lambda cache: cache.evictions),
    (
        "nv_cache_lookup_duration",
        "Total cache lookup duration (hit and miss), in microseconds",
        lambda cache: (cache.hits.ns + cache.misses.ns) // 1000,
    ),
    (
        "nv_cache_insertion_duration",
        "Total cache insertion duration, in microseconds",
        lambda cache: cache.insertions.ns // 1000,
    ),
)
