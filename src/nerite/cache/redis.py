"""The cache in Redis. It may be slow, full, away, or anybody's: then the model computes, and the log says why."""

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
from nerite.observability.exposition import UNLABELLED, MetricFamily
from nerite.scheduling.stall_detectors import ExponentialBackoff

# A connection to Redis: commands leave together at the end of a turn of the loop, replies come in their order.

Reply = bytes | int | Exception | None
"""None: there is nothing under the key. An exception: Redis refused, or the connection was lost first."""
Answered = Callable[[Reply], None]

_ROOM: Final = 16 * 1024 * 1024
"""Bytes that may wait to be sent. What Redis does not take for so long is better not sent."""
_INCOMPLETE: Final = object()


class RedisConnection(asyncio.Protocol):
    """Asks, and passes replies on. Each command is answered once, whatever happens."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, patience: float, lost: Callable[[RedisConnection, Exception], None]
    ) -> None:
        """``patience``: seconds that a reply may take before the connection is given up; 0 is for ever.

        ``lost`` is called once, when it has ended: commands have been answered by then.
        """
        self._loop = loop
        self._patience = patience
        self._lost = lost
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._asked: deque[tuple[float, Answered]] = deque()
        """Who waits for a reply, and since when."""
        self._leaving: list[bytes] = []
        self._transport: asyncio.Transport
        self._reason: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.full = False
        """Redis does not take what is there to send."""

    def ask(self, command: Sequence[bytes], answered: Answered) -> None:
        """Send a command."""
        self._asked.append((self._loop.time(), answered))
        if not self._leaving:
            self._loop.call_soon(self._flush)
        self._leaving.append(b"*%d\r\n" % len(command))
        for word in command:
            self._leaving += (b"$%d\r\n" % len(word), word, b"\r\n")
        if self._timer is None and self._patience:
            self._timer = self._loop.call_later(self._patience, self._look)

    def close(self, reason: Exception) -> None:
        """End it, for a reason."""
        self._reason = self._reason or reason
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take note of the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_ROOM)

    def data_received(self, data: bytes) -> None:
        """Pass on the replies that are complete."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                if not self._asked:
                    raise hiredis.ProtocolError("a reply that nobody asked for")
                self._asked.popleft()[1](_plain(reply))
        except hiredis.ProtocolError as error:
            self.close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Answer all who wait."""
        reason = self._reason or exc or ConnectionResetError("Redis has closed the connection")
        if self._timer is not None:
            self._timer.cancel()
        while self._asked:
            self._asked.popleft()[1](reason)
        self._lost(self, reason)

    def pause_writing(self) -> None:
        """Redis does not keep up."""
        self.full = True

    def resume_writing(self) -> None:
        """It does again."""
        self.full = False

    def _flush(self) -> None:
        leaving, self._leaving = self._leaving, []
        if not self._transport.is_closing():
            self._transport.writelines(leaving)

    def _look(self) -> None:
        """Give up if the oldest command has waited too long; look again when the one that is the oldest then has."""
        self._timer = None
        if self._asked:
            left = self._asked[0][0] + self._patience - self._loop.time()
            if left <= 0:
                self.close(TimeoutError(f"no answer in {self._patience * 1000:.0f} ms"))
            else:
                self._timer = self._loop.call_later(left, self._look)


def _plain(reply: Any) -> Reply:
    if reply is None or isinstance(reply, bytes | int | Exception):
        return reply
    return TypeError("Redis replied with something else than was asked for")


# A response as Redis keeps it. What is read there may have been written by anybody, and cut off anywhere.
#
#     MAGIC, the key, a checksum of all that follows, the size of the header
#     the header as JSON, as ``core/headers.py`` has it, and the size of each tensor
#     the tensors
#
# The key stands in it so that an entry is not taken for another one; the magic changes with the form.

MAGIC: Final = b"nerite\0\1"
_HEAD: Final = struct.Struct("<8s32sII")
_LENGTH: Final = struct.Struct("<I")


class BadEntry(Exception):
    """What is no entry, or not one that can be believed; and why."""


class EntryCodec:
    """Writes and reads entries. Equal headers are one object, on which transports leave what they made of it."""

    __slots__ = ("_headers",)

    def __init__(self) -> None:
        self._headers: Memo[bytes, tuple[ResponseHeader, list[int]]] = Memo()

    def write(self, key: bytes, response: InferenceResponse) -> bytes:
        """Return the entry of a response that succeeded."""
        assert response.header is not None
        said = {**headers.header_to_json(response.header), "sizes": [len(part) for part in response.data]}
        header = json.dumps(said).encode()
        body = b"".join((header, *response.data))
        return _HEAD.pack(MAGIC, key, zlib.crc32(body), len(header)) + body

    def read(self, key: bytes, entry: bytes) -> InferenceResponse:
        """Return the response that an entry is of. Raises ``BadEntry``."""
        if len(entry) < _HEAD.size:
            raise BadEntry("it is too short")
        magic, of_key, checksum, size = _HEAD.unpack_from(entry)
        if magic != MAGIC:
            raise BadEntry("it is not one of this version's")
        if of_key != key:
            raise BadEntry("it is that of another key")
        body = memoryview(entry)[_HEAD.size :]
        if zlib.crc32(body) != checksum:
            raise BadEntry("it is damaged")
        header, sizes = self._header(bytes(body[:size]))
        if size + sum(sizes) != len(body):
            raise BadEntry("its tensors are not of the sizes that it says")
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
                raise BadEntry("its header is none") from error
            size = 2 * headers.response_header_bytes(known[0]) + len(raw) + 40 * len(known[1])
            RESPONSE_HEADERS.put(self._headers, raw, known, size)
        return known


def _checked(said: Any) -> tuple[ResponseHeader, list[int]]:
    """Return the header, and the sizes of the tensors. Raises ``ValueError`` and its like if anything is strange."""
    header = headers.response_header_from_json(said)
    sizes = said["sizes"]
    if not (isinstance(header.model_name, str) and isinstance(header.model_version, str)):
        raise ValueError("names are text")
    if not all(isinstance(value, bool | int | float | str) for value in header.parameters.values()):
        raise ValueError("parameters have simple values")
    for spec, size in zip(header.outputs, sizes, strict=True):
        if not _natural(size, *spec.shape) or not isinstance(spec.name, str) or spec.byte_size not in (-1, size):
            raise ValueError("not a tensor")
    return header, sizes


def _natural(*numbers: object) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _strings(data: memoryview, count: int) -> bool:
    """Say whether this is the wire form of so many strings."""
    at, size = 0, len(data)
    for _ in range(count):
        if size - at < _LENGTH.size:
            return False
        at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
    return at == size


# The settings of ``--cache-config=redis,…``, under the names that they have in Triton's cache.

_FROM_ENVIRONMENT: Final = {"user": "TRITONCACHE_REDIS_USERNAME", "password": "TRITONCACHE_REDIS_PASSWORD"}
_FILES: Final = ("cert", "key", "cacert", "cacert_dir")
_NUMBERS: Final = frozenset(("port", "db", "connect_timeout", "socket_timeout", "pool_size", "wait_timeout"))


@dataclass(frozen=True)
class RedisSettings:
    """Where Redis is, and how it is spoken to. Times are in milliseconds; 0 waits for ever."""

    host: str
    port: int
    user: str = "default"
    password: str = ""
    db: int = 0
    connect_timeout: int = 5000
    socket_timeout: int = 100
    """How long an answer may take. Triton waits for ever, and its clients with it."""
    pool_size: int = 1
    wait_timeout: int = 1000
    """Like ``pool_size`` without a meaning here: one connection carries everything, and nobody waits for it."""
    tls_enabled: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cacert_dir: str = ""
    sni: str = ""
    """The name that Redis' certificate must be for, where it is not ``host``."""

    @property
    def place(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        """Return what a connection over TLS needs; None for one without. Raises ``OSError`` for files."""
        if not self.tls_enabled:
            return None
        context = ssl.create_default_context(cafile=self.cacert or None, capath=self.cacert_dir or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key or None)
        return context


def read_redis_settings(given: Mapping[str, str], environment: Mapping[str, str]) -> RedisSettings:
    """Return the settings. Raises ``InvalidArgument`` for what is missing or wrong."""
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
    # Each value has the type of its field by now, as ``_value`` has seen to.
    return RedisSettings(**{name: _value(name, text) for name, text in values.items()})  # type: ignore[arg-type]


def _value(name: str, text: str) -> str | int | bool:
    if name == "tls_enabled":
        if text not in ("true", "false"):
            raise InvalidArgument(f"the setting 'tls_enabled' of the cache 'redis' is 'true' or 'false', not '{text}'")
        return text == "true"
    if name in _NUMBERS:
        if not (text.isascii() and text.isdecimal()):
            raise InvalidArgument(f"the setting '{name}' of the cache 'redis' is a number, not '{text}'")
        return int(text)
    return text


LARGEST: Final = 512 * 1024 * 1024
"""Bytes that Redis keeps under one key."""

_log = logging.getLogger("nerite.cache")


async def open_redis(given: Mapping[str, str], environment: Mapping[str, str]) -> RedisCache:
    """Return a cache that is connected. Raises ``NeriteError``."""
    settings = read_redis_settings(given, environment)
    cache = RedisCache(settings, asyncio.get_running_loop())
    try:
        await cache.connect()
    except OSError as error:
        raise Internal(f"Failed to initialize RedisCache: {_said(error, settings)}") from error
    return cache


class RedisCache:
    """Responses under keys that begin with ``nerite:``. How many there may be, and which go first, is Redis' affair."""

    shared = True

    def __init__(self, settings: RedisSettings, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._loop = loop
        self._patience = settings.socket_timeout / 1000
        self._connection: RedisConnection | None = None
        self._backoff = ExponentialBackoff()
        self._form = EntryCodec()
        self._away = RateLimitedWarning()
        self._refused = RateLimitedWarning()
        self._strange = RateLimitedWarning()
        self._failures = 0
        self._attempt: asyncio.Task[None] | None = None
        self._closed = False

    async def connect(self) -> None:
        """Connect, and say who we are. Raises ``OSError``."""
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
                    await self._told(connection, b"AUTH", settings.user.encode(), settings.password.encode())
                if settings.db:
                    await self._told(connection, b"SELECT", b"%d" % settings.db)
                await self._told(connection, b"PING")
            except BaseException:  # whatever it was: a connection of no use must not stay
                connection.close(ConnectionError())
                raise
        self._connection = connection

    async def _told(self, connection: RedisConnection, *command: bytes) -> None:
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
        """Look for a response; ``found`` is called when Redis has answered, or should have."""
        connection = self._usable()
        if connection is None:
            found(None)
        else:
            connection.ask((b"GET", _name(key)), lambda reply: found(self._read(key, reply)))

    def insert(self, key: bytes, response: InferenceResponse) -> None:
        """Keep a response, if Redis takes it."""
        if sum(map(len, response.data)) > LARGEST - 1024 * 1024:
            self._failed(self._refused, f"Failed to insert key [{key.hex()}] into response cache: it is too large")
            return
        connection = self._usable()
        if connection is not None:
            connection.ask((b"SET", _name(key), self._form.write(key, response)), self._kept)

    def families(self) -> list[MetricFamily]:
        """Return how often Redis was of no use."""
        text = "Lookups and insertions that Redis did not answer, or not as it should"
        return [MetricFamily("nerite_cache_failures", text, "counter", [(UNLABELLED, self._failures)])]

    def close(self) -> None:
        """Leave Redis."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.cancel()
        if self._connection is not None:
            self._connection.close(ConnectionError())

    def _usable(self) -> RedisConnection | None:
        connection = self._connection
        if connection is None or connection.full:
            self._failures += 1
            return None
        return connection

    def _read(self, key: bytes, reply: Reply) -> InferenceResponse | None:
        if reply is None:
            return None
        if isinstance(reply, bytes):
            try:
                return self._form.read(key, reply)
            except BadEntry as error:
                self._failed(self._strange, f"what Redis has under '{_name(key).decode()}' is not used: {error}")
        else:
            self._kept(reply)
        return None

    def _kept(self, reply: Reply) -> None:
        """Look whether Redis has done what it was asked to. That a connection was lost is said once for all."""
        if isinstance(reply, OSError):
            self._failures += 1
        elif isinstance(reply, Exception):
            self._failed(self._refused, f"Redis ({self._settings.place}) refuses: {reply}")

    def _failed(self, complaint: RateLimitedWarning, text: str) -> None:
        self._failures += 1
        complaint.say(text)

    def _lost(self, connection: RedisConnection, reason: Exception) -> None:
        if connection is self._connection and not self._closed:
            self._connection = None
            self._away.say(f"lost Redis ({self._settings.place}), so that models compute everything: {reason}")
            self._try_again()

    def _try_again(self) -> None:
        wait = self._backoff.failed(self._loop.time())
        self._attempt = self._loop.create_task(self._reconnect(wait))

    async def _reconnect(self, wait: float) -> None:
        await asyncio.sleep(wait)
        try:
            await self.connect()
        except OSError as error:
            self._away.say(_said(error, self._settings))
            self._try_again()
        else:
            _log.info("connected to Redis (%s) again", self._settings.place)


def _name(key: bytes) -> bytes:
    return b"nerite:" + key.hex().encode()


def _said(error: OSError, settings: RedisSettings) -> str:
    """Return why there is no connection, in the words of Triton's client."""
    if isinstance(error, ConnectionError) and error.errno is not None:
        why = os.strerror(error.errno)
    elif isinstance(error, TimeoutError) and not str(error):
        why = f"no connection in {settings.connect_timeout} ms"
    else:
        why = str(error)
    return f"Failed to connect to Redis ({settings.place}): {why}"
