"""The cache in this process: so many bytes, and what was not asked for longest goes first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from nerite.cache import interface
from nerite.cache.interface import Found, RateLimitedWarning, ResponseCache, bad_choice, refuse_unknown
from nerite.config.options import CacheOptions
from nerite.core import headers
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.observability.exposition import UNLABELLED, MetricFamily
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
        self._too_large = RateLimitedWarning()

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
        takes = interface.response_bytes(response)
        if takes + headers.response_header_bytes(header) > self.size:
            self._too_large.say(
                f"Failed to insert key [{key.hex()}] into response cache: Requested byte_size: "
                f"{takes + headers.response_header_bytes(header)} is greater than total cache size: {self.size}"
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
            self.used += headers.response_header_bytes(header)

    def _forget(self, key: bytes) -> None:
        response = self._kept.pop(key)
        self.used -= interface.response_bytes(response)
        header = response.header
        assert header is not None
        self._headers[header] -= 1
        if not self._headers[header]:
            del self._headers[header]
            self.used -= headers.response_header_bytes(header)

    def families(self) -> list[MetricFamily]:
        """Return the cache's own metrics."""
        return [MetricFamily(name, text, "gauge", [(UNLABELLED, read(self))]) for name, text, read in _GAUGES]

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

# From ``--cache-config`` to the cache it asks for.

_EXAMPLE = "--cache-config=local,size=1048576"


async def open_cache(options: CacheOptions, environment: Mapping[str, str]) -> ResponseCache | None:
    """Return the cache that the options ask for, ready for use; None if they ask for none.

    Raises ``NeriteError``, in Triton's words where it has any.
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
        raise InvalidArgument(f"{failed} config didn't contain a valid 'size' field. Say how many bytes: {_EXAMPLE}")
    refuse_unknown("local", settings, ("size",))
    try:
        size = int(text)
    except ValueError:
        raise Internal(f"{failed} stoull. '{text}' is not a number of bytes: {_EXAMPLE}") from None
    if size <= 0:
        raise Internal(f"{failed} failed to allocate buffer. {size} bytes are too few: {_EXAMPLE}")
    return LocalCache(size)
