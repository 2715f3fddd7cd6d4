"""``nerite bill``: what tenants used in a month and what it costs, read from the ledger of a server."""

from __future__ import annotations

import argparse
import csv
import io
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final

from nerite.cli.command import UsageError, complain, new_parser, show, show_json, show_table, status_of
from nerite.core.errors import InvalidArgument
from nerite.ledger.bill import COLUMNS, FOCUS_COLUMNS, Month, bill_lines, bill_rows, equation_rows, focus_rows, merged
from nerite.ledger.dead_rows import DeadRow, count_dead_rows, dead_rows, write_again
from nerite.ledger.prices import PriceList, read_prices
from nerite.ledger.reconciliation import drop_charges, item_charges, reconcile, repeated_charges
from nerite.ledger.tables import LONGEST_BATCH_DAYS, LedgerSchema, sum_up
from nerite.storage.database import Database

_EPILOG = """\
The ledger is written by nerite serve --ledger LOCATION. Prices, formats and the equation that --check proves are
described in docs/ledger.md.

Examples:
  nerite bill --ledger ledger.db
  nerite bill --ledger ledger.db --prices prices.toml --tenant acme --month 2026-11 --by model
  nerite bill --ledger postgresql://nerite@db/ledger --prices prices.toml --format focus > november.csv
  nerite bill --ledger ledger.db --check
  nerite bill --ledger router.db --ledger server.db --reconcile
  nerite bill --ledger ledger.db --set-aside
"""
_FORMATS: Final = ("table", "csv", "json", "focus", "parquet")
_MOST_SHOWN: Final = 50
"""Differences that a table shows."""
TOLERANCE: Final = 0.005
"""Share of the time of instances that ``--check`` allows to be unaccounted for."""


def run(arguments: Sequence[str]) -> int:
    """Print a bill, or check the ledger; return the exit status."""
    return status_of("nerite bill", lambda: _report(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite bill", "Show what tenants used in a month, and what it costs.", _EPILOG)
    parser.add_argument(
        "--ledger",
        metavar="LOCATION",
        action="append",
        required=True,
        help="path of the ledger, or postgresql://USER@HOST/NAME; several are added up",
    )
    parser.add_argument("--prices", metavar="FILE", type=Path, help="price list (TOML); without it, amounts alone")
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant; '' is everybody without a policy")
    month = datetime.now(UTC).strftime("%Y-%m")
    parser.add_argument("--month", metavar="YYYY-MM", default=month, help="month in UTC (default: this month)")
    parser.add_argument("--by", choices=("tenant", "model", "day"), default="tenant", help="a line for each of these")
    parser.add_argument("--format", choices=_FORMATS, default="table", help="format of the bill (default: table)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="file to write, instead of standard output")
    parser.add_argument(
        "--sum-up-before",
        metavar="DATE",
        type=date.fromisoformat,
        help="replace the rows of each earlier day by sums that bills and usage do not change by, and exit",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare the rows with the time of the instances instead of billing"
    )
    parser.add_argument(
        "--reconcile",
        action="store_true",
        help="list the requests of which routers and servers have recorded different things, instead of billing",
    )
    parser.add_argument(
        "--set-aside",
        action="store_true",
        help="list the rows that the database has refused, which are in no bill, instead of billing",
    )
    parser.add_argument(
        "--write-set-aside",
        action="store_true",
        help="write these rows again, with characters of names replaced that the database refuses, and exit",
    )
    return parser


def _report(options: argparse.Namespace) -> int:
    month = Month.parse(options.month)
    prices = PriceList("", ()) if options.prices is None else read_prices(options.prices)
    if options.format == "focus" and options.prices is None:
        raise UsageError("a bill with FOCUS columns consists of costs: add --prices FILE")
    other = options.check or options.reconcile or options.sum_up_before is not None
    other = other or options.set_aside or options.write_set_aside
    if options.output is not None and (other or options.format == "table"):
        raise UsageError("--output is for a bill as csv, json, focus or parquet: add --format, or remove it")
    if options.format == "parquet" and options.output is None:
        raise UsageError("Parquet is binary: name a file with --output")
    with ExitStack() as stack:
        databases = [_opened(location, stack) for location in options.ledger]
        if options.set_aside:
            _list_set_aside([row for each in databases for row in each.call(dead_rows)], options)
            return 0
        if options.write_set_aside:
            return max([_write_set_aside(each) for each in databases])
        if not (options.check or options.reconcile):
            _charge_once(databases, month.times[0] if options.sum_up_before is None else 0.0)
        if options.sum_up_before is not None:
            for database in databases:
                _sum_up(database, options.sum_up_before)
            return 0
        if options.reconcile:
            return _reconcile(databases, month, options)
        if options.check:
            return max(_check(each.call(partial(equation_rows, month=month)), options) for each in databases)
        find = partial(bill_lines, prices=prices, month=month, tenant=options.tenant)
        missing = sum(each.call(count_dead_rows) for each in databases)
        lines = merged((line for each in databases for line in each.call(find)), prices)
    if missing:
        complain("nerite bill", f"{missing} rows were set aside and are in no bill", "--set-aside lists them.")
    if options.format == "focus":
        _put(_csv(FOCUS_COLUMNS, focus_rows(lines, prices, month)), options.output)
        return 0
    columns = ["tenant", *([] if options.by == "tenant" else [options.by]), *COLUMNS]
    _write(columns, bill_rows(lines, options.by, prices.currency), options)
    return 0


def _opened(location: str, stack: ExitStack) -> Database:
    """Return a ledger that ``stack`` closes. Raises ``InvalidArgument``."""
    if "://" not in location and not Path(location).exists():
        raise InvalidArgument(f"there is no ledger '{location}': nerite serve --ledger {location} makes it")
    database = Database(location, [LedgerSchema()])
    stack.callback(database.close)
    return database


def _charge_once(databases: Sequence[Database], since: float) -> None:
    """Have each item of a batch that ended at a time or later charged in one of the ledgers alone."""
    if len(databases) > 1:
        since -= LONGEST_BATCH_DAYS * 86400
        charges = [each.call(partial(item_charges, since=since)) for each in databases]
        for database, repeated in zip(databases, repeated_charges(charges), strict=True):
            if repeated:
                database.call(partial(drop_charges, charges=repeated))


def _reconcile(ledgers: Sequence[Database], month: Month, options: argparse.Namespace) -> int:
    """Show how routers and servers differ; return 1 if they do."""
    found = [reconcile(ledgers, day) for day in range(*month.days)]
    compared = sum(each.compared for each in found)
    differences = [difference for each in found for difference in each.differences]
    if options.format == "json":
        show_json({"compared": compared, "differences": [each._asdict() for each in differences]})
        return 1 if differences else 0
    show(f"{compared} requests were recorded by a router and a server; {len(differences)} differences.")
    if differences:
        shown = [[*each] for each in differences[:_MOST_SHOWN]]
        show_table(("Request", "What differs", "Router", "Server"), shown)
        if len(differences) > _MOST_SHOWN:
            show(f"{len(differences) - _MOST_SHOWN} more: --format json has them all.")
    return 1 if differences else 0


def _sum_up(database: Database, before: date) -> None:
    if before >= datetime.now(UTC).date():
        raise InvalidArgument(f"only days that are over can be summed up: {before} is not before today (UTC)")
    day = (before - date(1970, 1, 1)).days
    count, left = database.call(partial(sum_up, before_day=day, session=secrets.randbits(62)))
    show(f"{count} rows before {before} became {left}.")


def _list_set_aside(rows: Sequence[DeadRow], options: argparse.Namespace) -> None:
    """Show the rows that were set aside, in all ledgers and whatever the month."""
    if options.format == "json":
        show_json([each._asdict() | {"row": each.row._asdict()} for each in rows])
        return
    show(f"{len(rows)} rows were set aside.")
    if rows:
        shown = [
            [
                f"{session}/{row.number}",
                *map(_escaped, (row.key.tenant, row.key.model)),
                row.key.ending,
                _escaped(reason),
            ]
            for session, row, reason in rows[:_MOST_SHOWN]
        ]
        show_table(("Row", "Tenant", "Model", "Ending", "Reason"), shown)
        if len(rows) > _MOST_SHOWN:
            show(f"{len(rows) - _MOST_SHOWN} more: --format json has them all.")


def _escaped(text: str) -> str:
    return ascii(text)[1:-1]


def _write_set_aside(database: Database) -> int:
    """Write the rows that were set aside; return 1 if some are refused again."""
    written, left = database.call(write_again)
    show(f"{written} rows were written, {left} are refused again.")
    return int(left > 0)


def _write(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    if options.format == "parquet":
        _write_parquet(columns, rows, options.output)
    elif options.format == "csv":
        _put(_csv(columns, rows), options.output)
    elif options.format == "json":
        _put(json.dumps(list(rows), indent=2, ensure_ascii=False), options.output)
    elif rows:
        shown = [_heading(column) for column in columns]
        show_table(shown, [[str(row[column]) for column in columns] for row in rows])
    else:
        show(f"Nothing was used in {options.month}.")


def _check(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> int:
    """Show the equation; return 1 if more is unaccounted for than ``TOLERANCE``."""
    if options.format == "json":
        show_json(list(rows))
    else:
        table = [
            [
                row["model"],
                *(f"{row[name]:.3f}" for name in ("wall_seconds", "idle_seconds", "row_seconds")),
                f"{row['unaccounted_seconds']:.6f}",
                f"{row['unaccounted_share']:.4%}",
                str(row["cut_short"]),
            ]
            for row in rows
        ]
        show_table(("Model", "Wall s", "Idle s", "Rows s", "Unaccounted s", "Share", "Cut short"), table)
    return int(abs(rows[-1]["unaccounted_share"]) > TOLERANCE)


def _heading(column: str) -> str:
    return column.replace("_", " ").capitalize()


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _put(text: str, output: Path | None) -> None:
    if output is None:
        show(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot write '{output}': {error.strerror}") from None


def _write_parquet(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], output: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InvalidArgument("Parquet needs pyarrow: pip install pyarrow, or use --format csv") from None
    kinds = {"requests": pyarrow.int64(), "cost": pyarrow.decimal128(38, 6)}
    kinds |= {column: pyarrow.int64() for column in columns if column.endswith("_tokens")}
    kinds |= {column: pyarrow.float64() for column in columns if column.endswith("_seconds")}
    schema = pyarrow.schema([(column, kinds.get(column, pyarrow.string())) for column in columns])
    # The kinds of columns are the same whatever there is: also in a month without any use.
    found = [{**row, "cost": Decimal(row["cost"])} for row in rows]
    try:
        parquet.write_table(pyarrow.Table.from_pylist(found, schema), output)
    except OSError as error:
        raise InvalidArgument(f"cannot write '{output}': {error.strerror or error}") from None
