"""In-memory LRU response cache bounded in bytes, and ``open_cache``, which opens the configured cache."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from time import monotonic_ns
from typing import Final

from nerite.cache import interface
from nerite.cache.interface import Found, ResponseCache, bad_choice, refuse_unknown
from nerite.config.options import CacheOptions
from nerite.core import headers
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.observability.log import RateLimitedWarning
from nerite.observability.statistics import Duration

_log = logging.getLogger("nerite.cache")


class LocalCache:
    """LRU cache of responses bounded by ``size`` bytes of memory. Each distinct header is counted once."""

    shared = False

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self.evictions = 0
        self.hits = Duration()
        self.misses = Duration()
        self.insertions = Duration()
        self._entries: OrderedDict[bytes, InferenceResponse] = OrderedDict()
        """In LRU order, the least recently used first."""
        self._headers: dict[ResponseHeader, int] = {}
        """Reference counts of the headers."""
        self._too_large = RateLimitedWarning(_log)

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: bytes, found: Found) -> None:
        """Look up a response; ``found`` is called before this returns."""
        began = monotonic_ns()
        response = self._entries.get(key)
        if response is None:
            self.misses.add(monotonic_ns() - began)
        else:
            self._entries.move_to_end(key)
            self.hits.add(monotonic_ns() - began)
        found(response)

    def insert(self, key: bytes, response: InferenceResponse) -> None:
        """Store a response that fits into the cache, evicting the least recently used ones to make room."""
        header = response.header
        assert header is not None
        began = monotonic_ns()
        if key in self._entries:
            self._evict(key)
        takes = interface.response_bytes(response)
        if takes + headers.response_header_bytes(header) > self.size:
            self._too_large.say(
                f"Failed to insert key [{key.hex()}] into response cache: Requested byte_size: "
                f"{takes + headers.response_header_bytes(header)} is greater than total cache size: {self.size}"
            )
            return
        self._reference_header(header)
        while self.used + takes > self.size:
            self._evict(next(iter(self._entries)))
            self.evictions += 1
        self.used += takes
        # Copy: the response's tensors are views of memory that is going to be reused or that a model may change.
        self._entries[key] = InferenceResponse(header, tuple(map(bytes, response.buffers)))
        self.insertions.add(monotonic_ns() - began)

    def _reference_header(self, header: ResponseHeader) -> None:
        """Increment the reference count of a header."""
        users = self._headers.get(header, 0)
        self._headers[header] = users + 1
        if not users:
            self.used += headers.response_header_bytes(header)

    def _evict(self, key: bytes) -> None:
        response = self._entries.pop(key)
        self.used -= interface.response_bytes(response)
        header = response.header
        assert header is not None
        self._headers[header] -= 1
        if not self._headers[header]:
            del self._headers[header]
            self.used -= headers.response_header_bytes(header)

    def write_metrics(self, page: Page) -> None:
        """Write the cache's own metrics."""
        page.write(METRICS, [METRICS.row(self)])

    def close(self) -> None:
        """Do nothing: the cache holds no resources outside this process."""


METRICS: Final = MetricTable[LocalCache]((
    Metric("nv_cache_util", "gauge", "Cache utilization [0.0 - 1.0]", lambda cache: cache.used / cache.size),
    Metric("nv_cache_num_entries", "gauge", "Number of responses stored in response cache", len),
    Metric("nv_cache_num_hits", "gauge", "Number of cache hits in response cache", lambda cache: cache.hits.count),
    Metric("nv_cache_num_misses", "gauge",
           "Number of cache misses in response cache", lambda cache: cache.misses.count),
    Metric("nv_cache_num_lookups", "gauge",
           "Number of cache lookups in response cache", lambda cache: cache.hits.count + cache.misses.count),
    Metric("nv_cache_num_evictions", "gauge",
           "Number of cache evictions in response cache", lambda cache: cache.evictions),
    Metric("nv_cache_lookup_duration", "gauge",
           "Total cache lookup duration (hit and miss), in microseconds",
           lambda cache: (cache.hits.ns + cache.misses.ns) // 1000),
    Metric("nv_cache_insertion_duration", "gauge",
           "Total cache insertion duration, in microseconds", lambda cache: cache.insertions.ns // 1000),
))  # fmt: skip

_EXAMPLE = "--cache-config=local,size=1048576"


async def open_cache(options: CacheOptions, environment: Mapping[str, str]) -> ResponseCache | None:
    """Open the cache configured by ``--cache-config``; return None if there is none.

    Raises ``NeriteError``, with Triton's texts where it has one.
    """
    match options.name:
        case "":
            return None
        case "local":
            return _local(options.settings)
        case "redis":
            try:
                from nerite.cache.redis import open_redis
            except ModuleNotFoundError as error:
                if error.name != "hiredis":
                    raise
                raise Unsupported(
                    "the cache 'redis' needs the package 'hiredis'. Install it with: pip install 'nerite[redis]'"
                ) from None
            return await open_redis(options.settings, environment)
    raise InvalidArgument(
        f"unable to find 'libtritoncache_{options.name}.so' for cache. Searched: {options.directory}. "
        f"The caches of this server are {bad_choice(options.name, ('local', 'redis'))}"
    )


def _local(settings: Mapping[str, str]) -> LocalCache:
    failed = "Failed to initialize LocalCache:"
    text = settings.get("size")
    if text is None:
        raise InvalidArgument(f"{failed} config didn't contain a valid 'size' field. Specify it in bytes: {_EXAMPLE}")
    refuse_unknown("local", settings, ("size",))
    try:
        size = int(text)
    except ValueError:
        raise Internal(f"{failed} stoull. '{text}' is not a number of bytes: {_EXAMPLE}") from None
    if size <= 0:
        raise Internal(f"{failed} failed to allocate buffer. {size} bytes is too small: {_EXAMPLE}")
    return LocalCache(size)
