"""Response cache in Redis: entry format, settings, and the cache itself.

Redis may be slow, full, unreachable, or written to by other programs. In all these cases the model computes the answer,
and the log says why.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from nerite.cache.interface import Found, refuse_unknown
from nerite.core import headers
from nerite.core.byte_budget import RESPONSE_HEADERS, Memo
from nerite.core.errors import Internal, InvalidArgument
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.observability.log import RateLimitedWarning
from nerite.redis.client import RedisClient
from nerite.redis.connection import RedisConnection, Reply
from nerite.redis.settings import RedisSettings

MAGIC: Final = b"nerite\0\1"
_HEAD: Final = struct.Struct("<8s32sII")
_LENGTH: Final = struct.Struct("<I")
_MAX_HEADER: Final = 4 * 1024 * 1024
"""Size of the JSON of a header in bytes, which is parsed on the loop."""


class BadEntry(Exception):
    """The value under a key is not a valid entry; the message says why."""


class EntryCodec:
    """Serialises responses for Redis. Equal headers are interned, because transports memoize their encoding on them.

    Values may have been written by any program and truncated anywhere, so ``read`` validates all of them. Format::

        MAGIC, key, checksum of all that follows, size of the header
        header as JSON (see ``core/headers.py``) with the sizes of the tensors
        tensors

    The key is included so that an entry cannot be mistaken for another one; the magic changes with the format.
    """

    __slots__ = ("_headers",)

    def __init__(self) -> None:
        self._headers: Memo[bytes, tuple[ResponseHeader, list[int]]] = Memo()

    def write(self, key: bytes, response: InferenceResponse) -> bytes:
        """Return the entry of a successful response. Raises ``BadEntry`` if it cannot be one."""
        assert response.header is not None
        document = {**headers.header_to_json(response.header), "sizes": [len(part) for part in response.data]}
        header = json.dumps(document).encode()
        if len(header) > _MAX_HEADER:
            raise BadEntry("its header is too large")
        body = b"".join((header, *response.buffers))
        return _HEAD.pack(MAGIC, key, zlib.crc32(body), len(header)) + body

    def read(self, key: bytes, entry: bytes) -> InferenceResponse:
        """Return the response in an entry. Raises ``BadEntry``."""
        if len(entry) < _HEAD.size:
            raise BadEntry("it is too short")
        magic, of_key, checksum, size = _HEAD.unpack_from(entry)
        if magic != MAGIC:
            raise BadEntry("it was not written by this version")
        if of_key != key:
            raise BadEntry("it belongs to another key")
        if size > _MAX_HEADER:
            raise BadEntry("its header is too large")
        body = memoryview(entry)[_HEAD.size :]
        if zlib.crc32(body) != checksum:
            raise BadEntry("it is damaged")
        header, sizes = self._header(bytes(body[:size]))
        if size + sum(sizes) != len(body):
            raise BadEntry("its tensors do not have the sizes in its header")
        data = []
        at = size
        for spec, length in zip(header.outputs, sizes, strict=True):
            part = body[at : at + length]
            if spec.byte_size < 0 and not _strings(part, spec.elements):
                raise BadEntry(f"the strings of '{spec.name}' are not well-formed")
            data.append(part)
            at += length
        return InferenceResponse(header, data)

    def _header(self, raw: bytes) -> tuple[ResponseHeader, list[int]]:
        known = self._headers.get(raw)
        if known is None:
            try:
                known = _checked(json.loads(raw))
            except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
                raise BadEntry("its header is invalid") from error
            size = 2 * headers.response_header_bytes(known[0]) + len(raw) + 40 * len(known[1])
            RESPONSE_HEADERS.put(self._headers, raw, known, size)
        return known


def _checked(document: Any) -> tuple[ResponseHeader, list[int]]:
    """Return the header and the sizes of the tensors. Raises ``ValueError`` or the like for invalid content."""
    header = headers.response_header_from_json(document)
    sizes = document["sizes"]
    if not (isinstance(header.model_name, str) and isinstance(header.model_version, str)):
        raise ValueError("names must be strings")
    if not all(isinstance(value, bool | int | float | str) for value in header.parameters.values()):
        raise ValueError("parameters must have simple values")
    for spec, size in zip(header.outputs, sizes, strict=True):
        if not _natural(size, *spec.shape) or not isinstance(spec.name, str) or spec.byte_size not in (-1, size):
            raise ValueError("not a tensor")
    return header, sizes


def _natural(*numbers: object) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _strings(data: memoryview, count: int) -> bool:
    """Return whether ``data`` is the wire format of exactly ``count`` strings."""
    at, size = 0, len(data)
    for _ in range(count):
        if size - at < _LENGTH.size:
            return False
        at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
    return at == size


# Settings of ``--cache-config=redis,…``, with the names that they have in Triton's cache.

_FROM_ENVIRONMENT: Final = {"user": "TRITONCACHE_REDIS_USERNAME", "password": "TRITONCACHE_REDIS_PASSWORD"}
_FILES: Final = ("cert", "key", "cacert", "cacert_dir")
_NUMBERS: Final = frozenset(("port", "db", "connect_timeout", "socket_timeout", "pool_size", "wait_timeout"))


def read_redis_settings(given: Mapping[str, str], environment: Mapping[str, str]) -> RedisSettings:
    """Return the settings. Raises ``InvalidArgument`` if one is missing or invalid."""
    if "host" not in given or "port" not in given:
        raise InvalidArgument(
            "Failed to initialize RedisCache, didn't specify address. Must at a minimum specify 'host' and 'port' in "
            "the configuration: --cache-config=redis,host=localhost --cache-config=redis,port=6379"
        )
    refuse_unknown("redis", given, [field.name for field in fields(RedisSettings)])
    values: dict[str, str] = {
        name: environment[variable] for name, variable in _FROM_ENVIRONMENT.items() if environment.get(variable)
    }
    values |= given
    for name in _FILES:
        if (path := values.get(name)) and not os.path.exists(path):
            raise InvalidArgument(f"the setting '{name}' of the cache 'redis' is '{path}', which does not exist")
    # ``_value`` has converted each value to the type of its field.
    return RedisSettings(**{name: _value(name, text) for name, text in values.items()})  # type: ignore[arg-type]


def _value(name: str, text: str) -> str | int | bool:
    if name == "tls_enabled":
        if text not in ("true", "false"):
            raise InvalidArgument(
                f"the setting 'tls_enabled' of the cache 'redis' must be 'true' or 'false', not '{text}'"
            )
        return text == "true"
    if name in _NUMBERS:
        if not (text.isascii() and text.isdecimal()):
            raise InvalidArgument(f"the setting '{name}' of the cache 'redis' must be a number, not '{text}'")
        return int(text)
    return text


LARGEST: Final = 512 * 1024 * 1024
"""Maximum size of a value in Redis, in bytes."""

_log = logging.getLogger("nerite.cache")


async def open_redis(given: Mapping[str, str], environment: Mapping[str, str]) -> RedisCache:
    """Return a connected cache. Raises ``NeriteError``."""
    settings = read_redis_settings(given, environment)
    client = RedisClient(
        settings, asyncio.get_running_loop(), _log, "models compute all requests", max_reply=LARGEST + 1024
    )
    try:
        await client.connect()
    except OSError as error:
        raise Internal(f"Failed to initialize RedisCache: {client.connect_error(error)}") from error
    return RedisCache(client)


class RedisCache:
    """Response cache in Redis, under keys prefixed with ``nerite:``. Capacity and eviction are configured in Redis."""

    shared = True

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._codec = EntryCodec()
        self._refused = RateLimitedWarning(_log)
        self._invalid = RateLimitedWarning(_log)
        self.failures = 0
        """Number of lookups and insertions that failed."""

    def lookup(self, key: bytes, found: Found) -> None:
        """Look up a response; ``found`` is called when Redis has replied, or with None on timeout or failure."""
        connection = self._usable()
        if connection is None:
            found(None)
        else:
            connection.ask((b"GET", _name(key)), lambda reply: found(self._read(key, reply)))

    def insert(self, key: bytes, response: InferenceResponse) -> None:
        """Store a response if Redis is available and accepts it."""
        if sum(map(len, response.data)) > LARGEST - 1024 * 1024:
            self._failed(self._refused, f"Failed to insert key [{key.hex()}] into response cache: it is too large")
            return
        connection = self._usable()
        if connection is None:
            return
        try:
            entry = self._codec.write(key, response)
        except BadEntry as error:
            self._failed(self._refused, f"Failed to insert key [{key.hex()}] into response cache: {error}")
        else:
            connection.ask((b"SET", _name(key), entry), self._check_reply)

    def write_metrics(self, page: Page) -> None:
        """Write the number of failed lookups and insertions."""
        page.write(METRICS, [METRICS.row(self)])

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _usable(self) -> RedisConnection | None:
        connection = self._client.connection
        if connection is None or connection.full:
            self.failures += 1
            return None
        return connection

    def _read(self, key: bytes, reply: Reply) -> InferenceResponse | None:
        if reply is None:
            return None
        if isinstance(reply, bytes):
            try:
                return self._codec.read(key, reply)
            except BadEntry as error:
                self._failed(self._invalid, f"ignored the value of '{_name(key).decode()}' in Redis: {error}")
        else:
            self._check_reply(reply)
        return None

    def _check_reply(self, reply: Reply) -> None:
        """Count a command that failed, and log errors of Redis. A lost connection is logged once by the client."""
        if isinstance(reply, OSError):
            self.failures += 1
        elif isinstance(reply, Exception):
            self._failed(self._refused, f"Redis ({self._client.settings.place}) returned an error: {reply}")

    def _failed(self, warning: RateLimitedWarning, text: str) -> None:
        self.failures += 1
        warning.say(text)


METRICS: Final = MetricTable[RedisCache]((
    Metric("nerite_cache_failures", "counter",
           "Lookups and insertions that failed because Redis did not reply or sent an invalid reply",
           lambda cache: cache.failures),
))  # fmt: skip


def _name(key: bytes) -> bytes:
    return b"nerite:" + key.hex().encode()
