"""Posts decisions to webhooks, on a thread of its own: a receiver that is slow or down delays nothing."""

from __future__ import annotations

import contextlib
import http.client
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import orjson

from nerite import __version__
from nerite.observability.log import log

DELAYS: Final = (1.0, 4.0, 15.0)
"""Seconds between the attempts to deliver a document."""
_MAX_WAITING: Final = 64
"""Decisions that wait for a receiver; more are dropped."""
_TIMEOUT: Final = 10.0
_RETRYABLE: Final = frozenset((408, 425, 429, 500, 502, 503, 504))


class Delivery(NamedTuple):
    """A document on its way to a URL."""

    url: str
    body: bytes


class DeliveryFailed(Exception):
    """A receiver did not accept a document. ``retryable``: it may accept the document later."""

    def __init__(self, reason: str, *, retryable: bool) -> None:
        super().__init__(reason)
        self.retryable = retryable


def post(delivery: Delivery) -> None:
    """Send a document. Raises ``DeliveryFailed``. A redirection is not followed. Blocks."""
    url = urlsplit(delivery.url)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.netloc.rpartition("@")[2], timeout=_TIMEOUT)
    headers = {"Content-Type": "application/json", "User-Agent": f"nerite/{__version__}"}
    try:
        connection.request("POST", (url.path or "/") + (f"?{url.query}" if url.query else ""), delivery.body, headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise DeliveryFailed(str(error) or type(error).__name__, retryable=True) from None
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise DeliveryFailed(f"it answers {status}", retryable=status in _RETRYABLE)


def deliver(
    delivery: Delivery, wait: Callable[[float], bool], send: Callable[[Delivery], None] = post
) -> DeliveryFailed | None:
    """Send a document, again after each of ``DELAYS`` if that may help; return why it was not accepted.

    ``wait`` waits for a number of seconds, and returns whether to give up.
    """
    for delay in (*DELAYS, None):
        try:
            send(delivery)
            return None
        except DeliveryFailed as error:
            if delay is None or not error.retryable or wait(delay):
                return error
    raise AssertionError("the last attempt returns")


class Webhooks:
    """Queue of documents, and the thread that sends them. The thread starts with the first document."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Delivery | None] = queue.Queue(_MAX_WAITING)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, url: str, document: Mapping[str, Any]) -> None:
        """Queue a document, or drop it with a log line if too many are waiting. Does not block."""
        try:
            self._waiting.put_nowait(Delivery(url, orjson.dumps(document)))
        except queue.Full:
            log.warning(f"a decision was not posted to {shown_url(url)}: {_MAX_WAITING} others wait for a receiver")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop: what waits for another attempt is dropped."""
        self._stopping.set()
        with contextlib.suppress(queue.Full):  # then the thread sees it after the next one
            self._waiting.put_nowait(None)

    def join(self) -> None:
        """Wait for the thread, after ``close``."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            delivery = self._waiting.get()
            if delivery is None:
                return
            failure = deliver(delivery, self._stopping.wait)
            if failure is not None:
                log.warning(f"a decision was not posted to {shown_url(delivery.url)}: {failure}")


def shown_url(url: str) -> str:
    """Return a URL without what may be secret in it; nothing for none."""
    if not url:
        return ""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
