"""Rows of the ledger: who sent a request, what served it, how it ended, and what it used."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nerite.core.item_attempt import item_of

SECOND: Final = 1_000_000_000


class WallClock:
    """Tells the Unix time of a reading of the monotonic clock. No I/O, no clock: its owner sets it."""

    __slots__ = ("offset_ns",)

    def __init__(self, offset_ns: int) -> None:
        self.offset_ns = offset_ns
        """Unix time at zero of the monotonic clock. It changes when somebody sets the clock of the machine."""


class Ending(enum.StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    CACHED = "cached"
    """Answered from the response cache, or with the answer to an equal request."""
    JOINED = "joined"
    """It shares the answer of an earlier request with the same idempotency key, which has a row of its own."""
    FAILED = "failed"
    """The model, its worker or the server failed."""
    CANCELLED = "cancelled"
    """The client no longer waited, or the deadline has passed."""
    REFUSED = "refused"
    """It was not executed: over a quota, a full queue, or a mistake in the request."""
    PREEMPTED = "preempted"
    """It was of the class idle, and was stopped for others. It is not charged, so that a retry is paid once.

    Also an item of a batch that was stopped, for whatever reason: it runs again, or its answer is discarded.
    """
    REPEATED = "repeated"
    """It was answered, but was an attempt at an item of a batch that was charged for another attempt."""
    RUNNING = "running"
    """It was not over when the row was written; after a crash of the server it stays so."""


ANSWERS: Final = frozenset((Ending.ANSWERED, Ending.CACHED, Ending.JOINED))
"""Endings of requests that got an answer."""
_UNCHARGED: Final[dict[str, str]] = {**dict.fromkeys(ANSWERS, Ending.REPEATED), Ending.CANCELLED: Ending.PREEMPTED}
"""Endings of items that are not charged, by the endings that they would have."""


class Origin(enum.StrEnum):
    """Who sent a request."""

    CLIENT = "client"
    CALL = "call"
    """A step of an ensemble, or a call from a model. The client's request has a row of its own."""
    SHADOW = "shadow"
    """A copy of a client's request whose answer nobody gets."""
    SERVER = "server"
    """The server itself: work that no request asked for."""


class Source(enum.StrEnum):
    """Who wrote a row."""

    SERVER = "server"
    ROUTER = "router"
    """A router, for a request that no server has a row of."""
    COPY = "copy"
    """A router, for a request that its server has a row of, too: sums and bills leave this one out."""


class RowKey(NamedTuple):
    """What sums of rows are formed by."""

    tenant: str = ""
    """Empty without a policy."""
    model: str = ""
    version: str = ""
    route: str = ""
    """Name that the request was sent to, if that is a route."""
    arm: str = ""
    level: str = ""
    """Class of the request; empty without a policy."""
    origin: str = Origin.CLIENT
    ending: str = Ending.ANSWERED
    source: str = Source.SERVER
    pool: str = ""
    """Pool and member that a router chose; empty in rows of servers."""
    member: str = ""


class Amounts(NamedTuple):
    """What a request used. Times are in nanoseconds."""

    requests: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    answer_tokens: int = 0
    queue_ns: int = 0
    """From the arrival until an instance or engine started the request."""
    compute_ns: int = 0
    """Share of the executions of instances, by rows."""
    prefill_ns: int = 0
    """Share of the engine's steps until the first token, by tokens."""
    decode_ns: int = 0
    """Share of the engine's later steps, by tokens."""
    kv_block_ns: int = 0
    """KV cache blocks that were held, times how long."""
    first_byte_ns: int = 0
    """From the arrival at a router until the first byte of the answer."""
    attempts: int = 0
    """Members that a router sent the request to, one after the other."""

    @property
    def busy_ns(self) -> int:
        """The time of instances and engines that the request used."""
        return self.compute_ns + self.prefill_ns + self.decode_ns


class LedgerRow(NamedTuple):
    """One request, or the sum of several."""

    number: int
    """Unique within the session of the server. A row that is written again replaces the earlier one."""
    started: float
    """When the request arrived (Unix time in seconds); of a sum, the first."""
    ended: float
    """When it was over; of a sum, the last."""
    key: RowKey
    amounts: Amounts
    request_id: str = ""
    """That of a router, in its own row and in those of servers; empty without one, and in sums.

    That of an attempt at an item of a batch is also in the rows of what the item causes.
    """

    @property
    def item(self) -> str:
        """What of an item of a batch the row is for, if it may be charged; empty for any other row."""
        if not self.request_id or self.key.source == Source.COPY:
            return ""
        item = item_of(self.request_id)
        return item and f"{item} {self.key.route or self.key.model}"


def charged_once(rows: Sequence[LedgerRow], holders: Mapping[str, str]) -> list[LedgerRow]:
    """Return rows of one session, with other endings where they are not charged.

    ``holders`` has for each item of a batch the request id of the attempt that is charged; empty: one of another
    session.
    """
    found = []
    for row in rows:
        item = row.item if row.request_id else ""
        if item and (row.key.ending == Ending.CANCELLED or holders.get(item, row.request_id) != row.request_id):
            ending = _UNCHARGED.get(row.key.ending, row.key.ending)
            row = row._replace(key=row.key._replace(ending=ending))
        found.append(row)
    return found


def summed(rows: Iterable[LedgerRow], most_items: int = 0) -> list[LedgerRow]:
    """Return one row for each key and UTC day: no amount is lost, only the single requests. Items of batches stay.

    Each sum has the number of the last row that it contains. Answered items beyond ``most_items`` are summed up as
    repeated, because sums do not show whether they are.
    """
    groups: dict[tuple[int, RowKey], list[LedgerRow]] = {}
    items: list[LedgerRow] = []
    for row in rows:
        key = row.key
        if row.request_id and row.item:
            if len(items) < most_items:
                items.append(row)
                continue
            key = key._replace(ending=_UNCHARGED.get(key.ending, key.ending))
        groups.setdefault((int(row.ended // 86400), key), []).append(row)
    return items + [
        LedgerRow(
            group[-1].number,
            min([row.started for row in group]),
            max([row.ended for row in group]),
            key,
            Amounts(*map(sum, zip(*[row.amounts for row in group], strict=True))),
        )
        for (_, key), group in groups.items()
    ]
