"""Who may ask what over HTTP: the key that a restricted category needs."""

from __future__ import annotations

from collections.abc import Mapping

from nerite.core.errors import Restricted
from nerite.transports.http import reply
from nerite.transports.http.head import RequestHead, bytes_of
from nerite.transports.http.reply import Reply
from nerite.transports.keys import Lock


def refusal(locks: Mapping[str, Lock], category: str, head: RequestHead) -> Reply | None:
    """Return the answer to a request that lacks the key of its category, None if it may pass."""
    lock = locks.get(category)
    if lock is None:
        return None
    given = head.headers.get(lock.header.lower())
    if lock.opens(None if given is None else bytes_of(given)):
        return None
    return reply.error_reply(Restricted(f"This API is restricted, expecting header '{lock.header}'"), reply.PLAIN)
