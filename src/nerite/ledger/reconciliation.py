"""Compares what routers and servers have recorded of the same requests, joined by their ids. Pure but for queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from nerite.ledger.row import Ending, Source
from nerite.storage.database import Transaction

_COUNTED: Final = (str(Ending.ANSWERED), str(Ending.CACHED), str(Ending.JOINED))
"""Endings of rows of a server whose tokens are in the answer that the router has passed on."""
_UNCOMPARED: Final = (str(Ending.REFUSED), str(Ending.FAILED))
"""Endings of rows of a router for which no server need have a row."""


class Recorded(NamedTuple):
    """What one side has recorded of a request."""

    request_id: str
    tenant: str
    model: str
    route: str
    ending: str
    prompt_tokens: int
    answer_tokens: int


class RowDifference(NamedTuple):
    """What a router and a server have recorded differently of one request."""

    request_id: str
    what: str
    router: str
    server: str


class Reconciliation(NamedTuple):
    """The result for some days."""

    compared: int
    """Requests of which both have a row."""
    differences: Sequence[RowDifference]


def recorded(transaction: Transaction, source: Source, first_day: int, last_day: int) -> list[Recorded]:
    """Return the rows with a request id that ended on these days (UTC), both included."""
    columns = "request_id, tenant, model, route, ending, prompt_tokens, answer_tokens"
    rows = transaction.rows(
        f"SELECT {columns} FROM ledger_rows WHERE day >= ? AND day <= ? AND source = ? AND request_id <> ''",
        [first_day, last_day, str(source)],
    )
    return [Recorded(*row) for row in rows]


def reconcile(ledgers: Sequence[Transaction], day: int) -> Reconciliation:
    """Compare the requests that ended on a day, over several databases. What ends at midnight may be of two days."""

    def of(source: Source, before: int, after: int) -> list[Recorded]:
        return [row for each in ledgers for row in recorded(each, source, day - before, day + after)]

    servers: dict[str, list[Recorded]] = {}
    for row in of(Source.SERVER, 1, 1):
        servers.setdefault(row.request_id, []).append(row)
    copies = of(Source.COPY, 0, 0)
    found = [difference for copy in copies for difference in _differences(copy, servers.get(copy.request_id, []))]
    known = {copy.request_id for copy in of(Source.COPY, 1, 1)}
    lost = {row.request_id: row for row in of(Source.SERVER, 0, 0) if row.request_id not in known}
    found += [RowDifference(name, "no row of a router", "", row.ending) for name, row in lost.items()]
    return Reconciliation(sum(copy.request_id in servers for copy in copies), found)


def _differences(copy: Recorded, rows: Sequence[Recorded]) -> Iterator[RowDifference]:
    name = copy.request_id
    if copy.ending in _UNCOMPARED:
        return
    if not rows:
        yield RowDifference(name, "no row of a server", copy.ending, "")
        return
    tenants = {row.tenant for row in rows}
    if tenants != {copy.tenant}:
        yield RowDifference(name, "tenant", copy.tenant, ", ".join(sorted(tenants)))
    models = {name for row in rows for name in (row.model, row.route)}
    if copy.model not in models:
        yield RowDifference(name, "model", copy.model, ", ".join(sorted({row.model for row in rows})))
    if copy.ending != Ending.ANSWERED:
        return
    answered = [row for row in rows if row.ending in _COUNTED]
    if not answered:
        yield RowDifference(name, "ending", copy.ending, rows[-1].ending)
    elif copy.prompt_tokens:  # the server had told it; parts of a stream are no exact count
        yield from _of_tokens(copy, answered)


def _of_tokens(copy: Recorded, rows: Sequence[Recorded]) -> Iterator[RowDifference]:
    for field in ("prompt_tokens", "answer_tokens"):
        one: Any = getattr(copy, field)
        other = sum(getattr(row, field) for row in rows)
        if one != other:
            yield RowDifference(copy.request_id, field.replace("_", " "), str(one), str(other))
