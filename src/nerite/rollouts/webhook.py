"""Posts decisions to webhooks: a receiver that is slow, down or hostile delays neither the rollout nor other receivers.

Receivers have a queue each. A document goes only where ``WebhookClient`` may connect to: a URL that a client of the
server has given must not reach what only the server can.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import SplitResult, urlsplit

import orjson

from nerite import __version__
from nerite.core.errors import InvalidArgument
from nerite.core.failures import system_error
from nerite.core.work_loop import WorkLoop
from nerite.observability.log import log

DELAYS: Final = (1.0, 4.0, 15.0)
"""Seconds between the attempts to deliver a document."""
MAX_WAITING: Final = 64
"""Documents that wait for one receiver, or that were set aside; more are dropped."""
MAX_RECEIVERS: Final = 64
"""Receivers for which documents wait; documents for others are dropped meanwhile."""
ATTEMPT_SECONDS: Final = 10.0
"""Seconds for one attempt, from the resolution of the name to the status of the answer."""
_RESOLVERS: Final = 8
"""Threads that resolve names: the resolver of the system blocks."""
_REST: Final = 0.5
"""Seconds after which a document is tried again that has failed in a way that nothing foresaw."""
_RETRYABLE: Final = frozenset((408, 425, 429, 500, 502, 503, 504))
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([2-5][0-9]{2})(?: .*)?\r?\n")
_INTERIM: Final = re.compile(rb"HTTP/1\.[01] 1[0-9]{2}(?: .*)?\r?\n")
_GLOBAL_IPV6: Final = ipaddress.ip_network("2000::/3")


class Delivery(NamedTuple):
    """A document on its way to a URL, which ``RolloutSpec`` has checked."""

    url: str
    body: bytes
    own: bool = False
    """The URL is out of a file or a command of whoever operates the server, not out of a request."""


class DeliveryFailed(Exception):
    """A receiver did not accept a document. ``retryable``: it may accept the document later."""

    def __init__(self, reason: str, *, retryable: bool) -> None:
        super().__init__(reason)
        self.retryable = retryable


class WebhookClient:
    """Sends documents over HTTP/1.1 to the receivers that are allowed."""

    def __init__(self, hosts: Sequence[str] = (), setting: str = "--webhook-allowed-host") -> None:
        """``hosts`` are the only ones that documents go to; ``*``: any. ``setting`` is where they are named.

        Without any, documents go to all hosts, but those with a URL out of a request to public addresses only.
        """
        self._hosts = hosts
        self._setting = setting
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, "webhook names")
        self._tls: ssl.SSLContext | None = None

    def check(self, url: str) -> None:
        """Raise ``InvalidArgument`` if the settings do not allow the host of a URL."""
        host = _host(urlsplit(url))
        if url and self._hosts and "*" not in self._hosts and host not in self._hosts:
            raise InvalidArgument(f"webhook: host '{host}' is not allowed: add it to {self._setting}")

    async def check_given(self, url: str) -> None:
        """Raise ``InvalidArgument`` if documents must not go to a URL out of a request.

        A name that cannot be resolved now is resolved again with each document.
        """
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS / 2):
                await self._addresses(urlsplit(url), own=False)
        except (OSError, TimeoutError):
            return

    async def post(self, delivery: Delivery) -> None:
        """Send a document once. Raises ``DeliveryFailed``. A redirection is not followed."""
        url = urlsplit(delivery.url)
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                addresses = await self._addresses(url, own=delivery.own)
                status = await self._exchange(url, addresses, delivery.body)
        except InvalidArgument as error:
            raise DeliveryFailed(error.message, retryable=False) from None
        except TimeoutError:
            raise DeliveryFailed(f"it did not answer within {ATTEMPT_SECONDS:g} s", retryable=True) from None
        except OSError as error:
            raise DeliveryFailed(system_error(error), retryable=True) from None
        if status >= 300:
            raise DeliveryFailed(f"it answers {status}", retryable=status in _RETRYABLE)

    def close(self) -> None:
        """End the threads, when they have nothing to do."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    async def _addresses(self, url: SplitResult, *, own: bool) -> list[str]:
        """Return the addresses of a receiver. Raises ``InvalidArgument`` if one is not allowed, or ``OSError``.

        Whoever connects uses one of these, because a name may have other addresses when it is resolved again.
        """
        self.check(url.geturl())
        host = _host(url)
        resolve = partial(socket.getaddrinfo, host, _port(url), type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._resolvers, resolve)
        addresses = [str(place[0]) for *_, place in found]
        inner = next((address for address in addresses if not is_public(address)), None)
        if inner is not None and not own and not self._hosts:
            raise InvalidArgument(
                f"webhook: host '{host}' has the address {inner}, which is not public, and requests may name public "
                f"receivers only: allow it with {self._setting} {host}, or name it in rollout.toml"
            )
        return addresses

    async def _exchange(self, url: SplitResult, addresses: Sequence[str], body: bytes) -> int:
        """Send a document to the first address that accepts a connection; return the status of the answer."""
        secure = url.scheme == "https"
        if secure and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        for place, address in enumerate(addresses, 1):
            try:
                reader, writer = await asyncio.open_connection(
                    address,
                    _port(url),
                    ssl=self._tls if secure else None,
                    server_hostname=_host(url) if secure else None,
                )
                break
            except OSError:
                if place == len(addresses):
                    raise
        try:
            target = (url.path or "/") + (f"?{url.query}" if url.query else "")
            head = (
                f"POST {target} HTTP/1.1\r\nHost: {_authority(url)}\r\nUser-Agent: nerite/{__version__}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            return await _status(reader)
        finally:
            writer.transport.abort()


async def _status(reader: asyncio.StreamReader) -> int:
    """Return the status of an answer, whose rest is of no interest. Raises ``DeliveryFailed``."""
    try:
        line = await reader.readline()
        while _INTERIM.fullmatch(line):
            while (await reader.readline()).strip():
                pass
            line = await reader.readline()
    except ValueError:  # a line without an end
        line = b"?"
    found = _STATUS.fullmatch(line)
    if found is None:
        what = "answers with what is not HTTP/1.1" if line else "closed the connection without an answer"
        raise DeliveryFailed(f"it {what}", retryable=True)
    return int(found[1])


Send: TypeAlias = Callable[[Delivery], Awaitable[None]]


async def deliver(
    delivery: Delivery,
    send: Send,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    attempted: Callable[[], object] = lambda: None,
) -> DeliveryFailed | None:
    """Send a document, again after each of ``DELAYS`` if that may help; return why it was not accepted.

    ``attempted`` is called after each attempt that has failed.
    """
    for delay in (*DELAYS, None):
        try:
            await send(delivery)
            return None
        except DeliveryFailed as error:
            attempted()
            if delay is None or not error.retryable:
                return error
            await sleep(delay)
    raise AssertionError("the last attempt returns")


class Webhooks:
    """The documents that wait, in a queue for each receiver, which gets one at a time. For the loop's thread only."""

    def __init__(self, client: WebhookClient) -> None:
        self.client: Final = client
        self.loop = WorkLoop("webhooks", waiting=lambda: sum(map(len, self._waiting.values())))
        self.loop.woken = self._queue_again
        self.loop.on_discard = self._discard
        self._waiting: dict[str, deque[tuple[str, Delivery]]] = {}
        """By receiver: documents, each with its name as a unit of the loop. The first is on its way."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._set_aside: dict[str, Delivery] = {}
        self._number = 0

    def send(self, url: str, document: Mapping[str, Any], *, own: bool = False) -> None:
        """Queue a document, or drop it with a log line if too many are waiting. Does not wait.

        ``own``: the URL is out of a file of whoever operates the server.
        """
        self._number += 1
        self._queue(f"document {self._number} for {shown_url(url)}", Delivery(url, orjson.dumps(document), own))

    def close(self) -> None:
        """Stop: what waits is dropped."""
        for task in self._tasks:
            task.cancel()
        self.client.close()

    def _queue(self, unit: str, delivery: Delivery) -> None:
        receiver = shown_url(delivery.url)
        waiting = self._waiting.get(receiver)
        if waiting is None and len(self._waiting) >= MAX_RECEIVERS:
            log.warning(f"a decision was not posted to {receiver}: documents wait for {MAX_RECEIVERS} other receivers")
        elif waiting is None:
            self._waiting[receiver] = deque([(unit, delivery)])
            task = asyncio.get_running_loop().create_task(self._serve(receiver))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif len(waiting) >= MAX_WAITING:
            log.warning(f"a decision was not posted to {receiver}: {MAX_WAITING} others wait for it")
        else:
            waiting.append((unit, delivery))

    async def _serve(self, receiver: str) -> None:
        """Deliver what waits for one receiver."""
        waiting = self._waiting[receiver]
        while waiting:
            unit, delivery = waiting[0]
            with self.loop.unit(unit):
                failure = await deliver(delivery, self.client.post, attempted=self.loop.advanced)
                if failure is not None:
                    log.warning(f"a decision was not posted to {receiver}: {failure}")
            if self.loop.is_set_aside(unit):
                self._keep(unit, delivery)
            elif not self.loop.admits(unit):
                await asyncio.sleep(_REST)
                continue
            waiting.popleft()
        del self._waiting[receiver]

    def _keep(self, unit: str, delivery: Delivery) -> None:
        """Keep a document that was set aside, until an operator has it sent again or discards it."""
        self._set_aside[unit] = delivery
        if len(self._set_aside) > MAX_WAITING:
            oldest = next(iter(self._set_aside))
            self._discard(oldest)
            self.loop.forget(oldest)

    def _discard(self, unit: str) -> None:
        self._set_aside.pop(unit, None)

    def _queue_again(self) -> None:
        for unit in [unit for unit in self._set_aside if not self.loop.is_set_aside(unit)]:
            self._queue(unit, self._set_aside.pop(unit))


def shown_url(url: str) -> str:
    """Return a URL without what may be secret in it; nothing for none."""
    if not url:
        return ""
    parts = urlsplit(url)
    return f"{parts.scheme}://{_authority(parts)}"


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet: not to a host, a link, or a private network."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if found.is_multicast or not found.is_global:
        return False
    # Other prefixes of IPv6 contain addresses of IPv4, as NAT64 and 6to4 do, and those may be private.
    return found.version == 4 or (found in _GLOBAL_IPV6 and found.sixtofour is None and found.teredo is None)


def _host(url: SplitResult) -> str:
    return (url.hostname or "").removesuffix(".")


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _authority(url: SplitResult) -> str:
    """Return host and port of a URL as it writes them, without the name and password of a user."""
    return url.netloc.rpartition("@")[2]
