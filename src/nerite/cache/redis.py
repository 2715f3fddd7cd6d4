"""Response cache in Redis: connection, entry format, settings, and the cache itself.

Redis may be slow, full, unreachable, or written to by other programs. In all these cases the model computes the answer,
and the log says why.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import struct
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, cast

import hiredis

from nerite.cache.interface import Found, RateLimitedWarning, refuse_unknown
from nerite.core import headers
from nerite.core.byte_budget import RESPONSE_HEADERS, Memo
from nerite.core.errors import Internal, InvalidArgument
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.scheduling.stall_detectors import ExponentialBackoff

Reply = bytes | int | Exception | None
"""None: no such key. An exception: Redis returned an error, or the connection was lost first."""
Answered = Callable[[Reply], None]

_SEND_BUFFER: Final = 16 * 1024 * 1024
"""Size of the send buffer in bytes above which no commands are sent until Redis catches up."""
_INCOMPLETE: Final = object()


class RedisConnection(asyncio.Protocol):
    """Connection to Redis that pipelines the commands of one loop turn. Each command gets exactly one reply.

    Replies arrive in the order of the commands. If the connection is lost, the outstanding commands get an exception.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, patience: float, lost: Callable[[RedisConnection, Exception], None]
    ) -> None:
        """``patience``: timeout of a reply in seconds, after which the connection is closed; 0 for none.

        ``lost`` is called once when the connection has ended, after all outstanding commands got their exception.
        """
        self._loop = loop
        self._patience = patience
        self._lost = lost
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._asked: deque[tuple[float, Answered]] = deque()
        """Callbacks of the outstanding commands, with the times at which they were sent."""
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport
        self._reason: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.full = False
        """The send buffer is full because Redis does not keep up."""

    def ask(self, command: Sequence[bytes], answered: Answered) -> None:
        """Send a command."""
        self._asked.append((self._loop.time(), answered))
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(b"*%d\r\n" % len(command))
        for word in command:
            self._unsent += (b"$%d\r\n" % len(word), word, b"\r\n")
        if self._timer is None and self._patience:
            self._timer = self._loop.call_later(self._patience, self._check_timeout)

    def close(self, reason: Exception) -> None:
        """Abort the connection; ``reason`` is passed to the outstanding commands."""
        self._reason = self._reason or reason
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport and set the limit of its send buffer."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_SEND_BUFFER)

    def data_received(self, data: bytes) -> None:
        """Deliver the complete replies."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                if not self._asked:
                    raise hiredis.ProtocolError("an unexpected reply")
                self._asked.popleft()[1](_plain(reply))
        except hiredis.ProtocolError as error:
            self.close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all outstanding commands."""
        reason = self._reason or exc or ConnectionResetError("Redis has closed the connection")
        if self._timer is not None:
            self._timer.cancel()
        while self._asked:
            self._asked.popleft()[1](reason)
        self._lost(self, reason)

    def pause_writing(self) -> None:
        """Stop sending: the send buffer is full."""
        self.full = True

    def resume_writing(self) -> None:
        """Resume sending."""
        self.full = False

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not self._transport.is_closing():
            self._transport.writelines(unsent)

    def _check_timeout(self) -> None:
        """Close the connection if the oldest command has timed out; else check again when it would."""
        self._timer = None
        if self._asked:
            left = self._asked[0][0] + self._patience - self._loop.time()
            if left <= 0:
                self.close(TimeoutError(f"no answer in {self._patience * 1000:.0f} ms"))
            else:
                self._timer = self._loop.call_later(left, self._check_timeout)


def _plain(reply: Any) -> Reply:
    if reply is None or isinstance(reply, bytes | int | Exception):
        return reply
    return TypeError("Redis sent a reply of an unexpected type")


MAGIC: Final = b"nerite\0\1"
_HEAD: Final = struct.Struct("<8s32sII")
_LENGTH: Final = struct.Struct("<I")


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
        """Return the entry of a successful response."""
        assert response.header is not None
        document = {**headers.header_to_json(response.header), "sizes": [len(part) for part in response.data]}
        header = json.dumps(document).encode()
        body = b"".join((header, *response.data))
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


@dataclass(frozen=True)
class RedisSettings:
    """Address and connection settings of Redis. Times are in milliseconds; 0 for no timeout."""

    host: str
    port: int
    user: str = "default"
    password: str = ""
    db: int = 0
    connect_timeout: int = 5000
    socket_timeout: int = 100
    """Timeout of a reply. Triton has none, so that its clients wait indefinitely."""
    pool_size: int = 1
    wait_timeout: int = 1000
    """Ignored, like ``pool_size``: one connection carries all commands, so none waits for a free connection."""
    tls_enabled: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cacert_dir: str = ""
    sni: str = ""
    """Expected host name in the certificate of Redis, if it is not ``host``."""

    @property
    def place(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of the connection; None without TLS. Raises ``OSError`` if a file is not usable."""
        if not self.tls_enabled:
            return None
        context = ssl.create_default_context(cafile=self.cacert or None, capath=self.cacert_dir or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key or None)
        return context


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
    cache = RedisCache(settings, asyncio.get_running_loop())
    try:
        await cache.connect()
    except OSError as error:
        raise Internal(f"Failed to initialize RedisCache: {_connect_error(error, settings)}") from error
    return cache


class RedisCache:
    """Response cache in Redis, under keys prefixed with ``nerite:``. Capacity and eviction are configured in Redis."""

    shared = True

    def __init__(self, settings: RedisSettings, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._loop = loop
        self._patience = settings.socket_timeout / 1000
        self._connection: RedisConnection | None = None
        self._backoff = ExponentialBackoff()
        self._codec = EntryCodec()
        self._unreachable = RateLimitedWarning()
        self._refused = RateLimitedWarning()
        self._invalid = RateLimitedWarning()
        self.failures = 0
        """Number of lookups and insertions that failed."""
        self._attempt: asyncio.Task[None] | None = None
        self._closed = False

    async def connect(self) -> None:
        """Connect and authenticate. Raises ``OSError``."""
        settings = self._settings
        tls = settings.tls()
        async with asyncio.timeout(settings.connect_timeout / 1000 or None):
            _, connection = await self._loop.create_connection(
                lambda: RedisConnection(self._loop, self._patience, self._lost),
                settings.host,
                settings.port,
                ssl=tls,
                server_hostname=(settings.sni or settings.host) if tls is not None else None,
            )
            try:
                if settings.password:
                    await self._execute(connection, b"AUTH", settings.user.encode(), settings.password.encode())
                if settings.db:
                    await self._execute(connection, b"SELECT", b"%d" % settings.db)
                await self._execute(connection, b"PING")
            except BaseException:  # cancellation included: an unusable connection must not leak
                connection.close(ConnectionError())
                raise
        self._connection = connection

    async def _execute(self, connection: RedisConnection, *command: bytes) -> None:
        answered: asyncio.Future[Reply] = self._loop.create_future()

        def take(reply: Reply) -> None:
            if not answered.done():
                answered.set_result(reply)

        connection.ask(command, take)
        reply = await answered
        if isinstance(reply, OSError):
            raise reply
        if isinstance(reply, Exception):
            raise OSError(str(reply)) from reply

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
        if connection is not None:
            connection.ask((b"SET", _name(key), self._codec.write(key, response)), self._check_reply)

    def write_metrics(self, page: Page) -> None:
        """Write the number of failed lookups and insertions."""
        page.write(METRICS, [METRICS.row(self)])

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.cancel()
        if self._connection is not None:
            self._connection.close(ConnectionError())

    def _usable(self) -> RedisConnection | None:
        connection = self._connection
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
        """Count a command that failed, and log errors of Redis. A lost connection is logged once by ``_lost``."""
        if isinstance(reply, OSError):
            self.failures += 1
        elif isinstance(reply, Exception):
            self._failed(self._refused, f"Redis ({self._settings.place}) returned an error: {reply}")

    def _failed(self, warning: RateLimitedWarning, text: str) -> None:
        self.failures += 1
        warning.say(text)

    def _lost(self, connection: RedisConnection, reason: Exception) -> None:
        if connection is self._connection and not self._closed:
            self._connection = None
            self._unreachable.say(
                f"lost the connection to Redis ({self._settings.place}); models compute all requests: {reason}"
            )
            self._schedule_reconnect()

    def _schedule_reconnect(self) -> None:
        wait = self._backoff.failed(self._loop.time())
        self._attempt = self._loop.create_task(self._reconnect(wait))

    async def _reconnect(self, wait: float) -> None:
        await asyncio.sleep(wait)
        try:
            await self.connect()
        except OSError as error:
            self._unreachable.say(_connect_error(error, self._settings))
            self._schedule_reconnect()
        else:
            _log.info("reconnected to Redis (%s)", self._settings.place)


METRICS: Final = MetricTable[RedisCache]((
    Metric("nerite_cache_failures", "counter",
           "Lookups and insertions that failed because Redis did not reply or sent an invalid reply",
           lambda cache: cache.failures),
))  # fmt: skip


def _name(key: bytes) -> bytes:
    return b"nerite:" + key.hex().encode()


def _connect_error(error: OSError, settings: RedisSettings) -> str:
    """Return the text of a connection error, as Triton's client words it."""
    if isinstance(error, ConnectionError) and error.errno is not None:
        why = os.strerror(error.errno)
    elif isinstance(error, TimeoutError) and not str(error):
        why = f"no connection in {settings.connect_timeout} ms"
    else:
        why = str(error)
    return f"Failed to connect to Redis ({settings.place}): {why}"
