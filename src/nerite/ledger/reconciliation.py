"""Compares what several ledgers have recorded of the same requests, joined by their ids. Pure but for queries.

Routers and servers should have recorded the same. Items of batches that ran twice are to be charged by one ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from nerite.core.item_attempt import item_of
from nerite.ledger.row import ANSWERS, Ending, Origin, Source
from nerite.storage.database import Database, Transaction

_COUNTED: Final = (str(Ending.ANSWERED), str(Ending.CACHED), str(Ending.JOINED), str(Ending.REPEATED))
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
        f"SELECT {columns} FROM ledger_rows WHERE day >= ? AND day <= ? AND source = ? AND origin = ? "
        "AND request_id <> ''",
        [first_day, last_day, str(source), str(Origin.CLIENT)],
    )
    return [Recorded(*row) for row in rows]


def reconcile(ledgers: Sequence[Database], day: int) -> Reconciliation:
    """Compare the requests that ended on a day, over several databases. What ends at midnight may be of two days."""

    def of(source: Source, before: int, after: int) -> list[Recorded]:
        days = partial(recorded, source=source, first_day=day - before, last_day=day + after)
        return [row for each in ledgers for row in each.call(days)]

    servers: dict[str, list[Recorded]] = {}
    for row in of(Source.SERVER, 1, 1):
        servers.setdefault(row.request_id, []).append(row)
    copies = of(Source.COPY, 0, 0)
    found = [difference for copy in copies for difference in _differences(copy, servers.get(copy.request_id, []))]
    known = {copy.request_id for copy in of(Source.COPY, 1, 1)}
    # Items of batches may be those of the server itself.
    lost = {
        row.request_id: row
        for row in of(Source.SERVER, 0, 0)
        if row.request_id not in known and not item_of(row.request_id)
    }
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


class ItemCharge(NamedTuple):
    """The attempt at an item of a batch that a ledger charges."""

    ended: float
    session: int
    request_id: str


def item_charges(transaction: Transaction, since: float) -> dict[str, ItemCharge]:
    """Return what a ledger charges for items of batches that ended at a time (Unix time) or later."""
    statement = "SELECT item, ended, session, request_id FROM ledger_items WHERE ended >= ? AND session <> 0"
    return {item: ItemCharge(*charge) for item, *charge in transaction.rows(statement, [since])}


def repeated_charges(ledgers: Sequence[Mapping[str, ItemCharge]]) -> list[dict[str, ItemCharge]]:
    """Return the charges of each ledger for items that another one charges for an earlier answer."""
    firsts: dict[str, ItemCharge] = {}
    for ledger in ledgers:
        for item, charge in ledger.items():
            firsts[item] = min(charge, firsts.get(item, charge))
    return [{item: charge for item, charge in ledger.items() if charge != firsts[item]} for ledger in ledgers]


def drop_charges(transaction: Transaction, charges: Mapping[str, ItemCharge]) -> None:
    """Mark the rows of attempts at items as repeated, and charge no further attempt."""
    answers = sorted(map(str, ANSWERS))
    for item, charge in charges.items():
        transaction.execute(
            "UPDATE ledger_rows SET ending = ? WHERE request_id = ? AND session = ? AND source <> ? "
            f"AND ending IN ({', '.join('?' * len(answers))}) AND CASE WHEN route <> '' THEN route ELSE model END = ?",
            [
                str(Ending.REPEATED),
                charge.request_id,
                charge.session,
                str(Source.COPY),
                *answers,
                item.partition(" ")[2],
            ],
        )
        transaction.execute("UPDATE ledger_items SET session = 0 WHERE item = ?", [item])
