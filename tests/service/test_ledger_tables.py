"""The tables of the ledger and the bills made of them, in SQLite and in PostgreSQL."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nerite.ledger import tables
from nerite.ledger.bill import Month, bill_lines, bill_rows, equation_rows, focus_rows
from nerite.ledger.instance_clock import InstanceTime
from nerite.ledger.prices import PriceList, parse_prices
from nerite.ledger.row import Amounts, Ending, LedgerRow, Origin, RowKey
from nerite.storage.database import Database
from nerite.tools import bill
from postgres_server import postgres_server

DAY = 86400.0
NOVEMBER = Month.parse("2026-11")
FIRST = NOVEMBER.times[0]
PRICES = """
currency = "EUR"
provider = "Team ML"
[[price]]
model = "*"
compute-seconds = 2
[[price]]
model = "llm"
answer-tokens = 10
"""


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres_server(tmp_path_factory.mktemp("postgres")) as location:
        yield location


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    where = str(tmp_path / "ledger.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres"))
    opened = Database(where, [tables.LedgerSchema()])
    with opened.transaction() as transaction:
        transaction.execute("DELETE FROM ledger_rows")
        transaction.execute("DELETE FROM ledger_times")
    yield opened
    opened.close()


def row(number: int, ended: float, amounts: Amounts, **key: Any) -> LedgerRow:
    return LedgerRow(
        number, ended - 1, ended, RowKey(**{"tenant": "acme", "model": "m", "version": "1", **key}), amounts
    )


def write(database: Database, rows: list[LedgerRow], times: list[InstanceTime] | None = None, session: int = 1) -> None:
    database.call(partial(tables.write, session=session, server="here", rows=rows, times=times or []))


def test_a_row_that_is_written_again_replaces_the_earlier(database: Database) -> None:
    running = row(1, FIRST, Amounts(1, 4, 0, 2, decode_ns=10**9), ending=Ending.RUNNING)
    write(database, [running, row(2, FIRST, Amounts())])
    write(database, [row(1, FIRST + 5, Amounts(1, 4, 0, 7, decode_ns=3 * 10**9))])
    (found,) = database.call(partial(tables.sums, start=FIRST, end=FIRST + DAY))
    assert found.amounts == Amounts(2, 4, 0, 7, decode_ns=3 * 10**9)
    endings = database.call(partial(tables.sums, start=0, end=9e9, group_by=["ending"]))
    assert [each.group for each in endings] == [{"ending": "answered"}]
    write(database, [row(1, FIRST, Amounts())], session=2)
    (found,) = database.call(partial(tables.sums, start=0, end=9e9))
    assert found.amounts.requests == 3, "another server has numbers of its own"


def test_sums_are_of_a_time_of_some_by_group(database: Database) -> None:
    write(
        database,
        [
            row(1, FIRST, Amounts(compute_ns=1), model="a"),
            row(2, FIRST + DAY, Amounts(compute_ns=10), model="a"),
            row(3, FIRST + DAY, Amounts(compute_ns=100), model="b", tenant="other"),
            row(4, FIRST + 2 * DAY, Amounts(compute_ns=1000), model="b"),
        ],
    )
    found = database.call(partial(tables.sums, start=FIRST, end=FIRST + 2 * DAY, group_by=("day", "model")))
    day = NOVEMBER.days[0]
    assert [(each.group, each.amounts.compute_ns) for each in found] == [
        ({"day": day, "model": "a"}, 1),
        ({"day": day + 1, "model": "a"}, 10),
        ({"day": day + 1, "model": "b"}, 100),
    ]
    where = {"tenant": ["acme", "nobody"]}
    (found,) = [database.call(partial(tables.sums, start=0, end=9e9, where=where))]
    assert [each.amounts.compute_ns for each in found] == [1011]
    assert database.call(partial(tables.sums, start=5, end=6)) == []


def test_a_bill_has_what_is_charged(database: Database) -> None:
    write(
        database,
        [
            row(1, FIRST, Amounts(1, 5, 0, 1000, decode_ns=10**9), model="llm"),
            row(2, FIRST + DAY, Amounts(1, 5, 0, 500), model="llm", ending=Ending.CANCELLED),
            row(3, FIRST, Amounts(1, 0, 0, 9000), model="llm", ending=Ending.FAILED),
            row(4, FIRST, Amounts(compute_ns=3 * 10**9)),
            row(5, FIRST, Amounts(compute_ns=10**9), origin=Origin.CALL),
            row(6, FIRST, Amounts(compute_ns=10**9), origin=Origin.SHADOW),
            row(7, FIRST, Amounts(compute_ns=10**9), tenant="other"),
            row(8, FIRST - 1, Amounts(compute_ns=10**9)),
        ],
    )
    prices = parse_prices(PRICES, "prices.toml")
    lines = database.call(partial(bill_lines, prices=prices, month=NOVEMBER, tenant="acme"))
    rows = bill_rows(lines, "model", "EUR")
    assert [(each["model"], each["requests"], each["busy_seconds"], each["cost"]) for each in rows] == [
        ("llm", 2, 1.0, "15.000000"),
        ("m", 1, 4.0, "8.000000"),
    ]
    everybody = database.call(partial(bill_lines, prices=prices, month=NOVEMBER, tenant=None))
    assert [(each["tenant"], each["cost"]) for each in bill_rows(everybody, "tenant", "EUR")] == [
        ("acme", "23.000000"),
        ("other", "2.000000"),
    ]
    assert [each["day"] for each in bill_rows(lines, "day", "EUR")] == ["2026-11-01", "2026-11-02"]
    focus = focus_rows(lines, prices, NOVEMBER)
    assert sum(Decimal(each["BilledCost"]) for each in focus) == 23
    first = focus[0]
    assert (first["SubAccountId"], first["ResourceId"], first["ConsumedUnit"]) == ("acme", "llm", "Tokens")
    assert (first["BillingPeriodEnd"], first["ChargePeriodEnd"]) == ("2026-12-01T00:00:00Z", "2026-11-02T00:00:00Z")
    assert (first["ListUnitPrice"], first["ProviderName"]) == ("0.01", "Team ML")


def test_the_equation_of_a_month(database: Database) -> None:
    day = NOVEMBER.days[0]
    times = [
        InstanceTime(9, "m", "1", "m_0", day, FIRST, FIRST + 100, 60 * 10**9, 40 * 10**9),
        InstanceTime(10, "m", "1", "m_1", day - 1, 0.0, 1000.0, 0, 0),
    ]
    write(database, [row(1, FIRST, Amounts(compute_ns=39 * 10**9), ending=Ending.RUNNING)], times)
    one, all_of_them = database.call(partial(equation_rows, month=NOVEMBER))
    assert (one["model"], one["wall_seconds"], one["idle_seconds"], one["row_seconds"]) == ("m", 100, 60, 39)
    assert one["unaccounted_share"] == pytest.approx(0.01)
    assert (all_of_them["model"], all_of_them["cut_short"]) == ("all", 1)


def test_old_rows_are_summed_up(database: Database) -> None:
    rows = [row(number, FIRST + number, Amounts(1, 2, 0, 3, decode_ns=10**9)) for number in range(5)]
    later = [row(5, FIRST + DAY, Amounts()), row(6, FIRST, Amounts(), ending=Ending.RUNNING)]
    write(database, [*rows, row(7, FIRST, Amounts(compute_ns=1), model="other"), *later])
    by = ("day", "model", "ending")
    before = database.call(partial(tables.sums, start=0, end=9e9, group_by=by))
    assert database.call(partial(tables.sum_up, before_day=NOVEMBER.days[0] + 1, session=77)) == (6, 2)
    assert database.call(partial(tables.sums, start=0, end=9e9, group_by=by)) == before
    (count,) = database.call(lambda transaction: transaction.rows("SELECT COUNT(*) FROM ledger_rows"))
    assert count == (4,)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    database = Database(str(path), [tables.LedgerSchema()])
    day = NOVEMBER.days[0]
    times = [InstanceTime(9, "m", "1", "m_0", day, FIRST, FIRST + 10, 6 * 10**9, 4 * 10**9)]
    write(database, [row(1, FIRST, Amounts(1, 0, 0, 3, compute_ns=4 * 10**9))], times)
    database.close()
    (tmp_path / "prices.toml").write_text(PRICES)
    return path


def test_the_command(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--ledger", str(ledger), "--month", "2026-11"]
    priced = [*usual, "--prices", str(tmp_path / "prices.toml")]
    assert bill.run(priced) == 0
    assert "8.000000" in capsys.readouterr().out
    assert bill.run([*priced, "--by", "model", "--format", "json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["tenant"], told["model"], told["answer_tokens"], told["currency"]) == ("acme", "m", 3, "EUR")
    assert bill.run([*priced, "--format", "focus", "--output", str(tmp_path / "focus.csv")]) == 0
    with (tmp_path / "focus.csv").open() as file:
        (charge,) = csv.DictReader(file)
    assert (Decimal(charge["EffectiveCost"]), charge["PricingUnit"]) == (8, "Seconds")
    assert bill.run([*usual, "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("acme,1,0,0,3,4.0,0.0,0.000000,")
    assert bill.run([*usual, "--check"]) == 0
    assert "0.0000%" in capsys.readouterr().out
    assert bill.run([*usual, "--sum-up-before", "2026-11-01"]) == 0
    assert "0 rows before 2026-11-01 became 0." in capsys.readouterr().out
    assert bill.run(["--ledger", str(ledger), "--month", "2026-10", "--tenant", "acme"]) == 0
    assert "Nothing was used in 2026-10." in capsys.readouterr().out


def test_a_ledger_that_does_not_add_up_is_told(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = Database(str(ledger), [tables.LedgerSchema()])
    database.call(lambda transaction: transaction.execute("DELETE FROM ledger_rows"))
    database.close()
    assert bill.run(["--ledger", str(ledger), "--month", "2026-11", "--check", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)[-1]["unaccounted_seconds"] == 4


@pytest.mark.parametrize(
    ("flags", "status", "wrong"),
    [
        (["--month", "11"], 1, "'11' is no month"),
        (["--ledger", "none.db"], 1, "there is no ledger 'none.db'"),
        (["--sum-up-before", "2999-01-01"], 1, "2999-01-01 is not before today"),
        (["--format", "focus"], 2, "add --prices FILE"),
        (["--format", "parquet"], 2, "name a file with --output"),
        (["--prices", "none.toml"], 1, "cannot read the price list 'none.toml'"),
    ],
)
def test_what_the_command_refuses(
    ledger: Path, capsys: pytest.CaptureFixture[str], flags: list[str], status: int, wrong: str
) -> None:
    assert bill.run(["--ledger", str(ledger), *flags]) == status
    assert wrong in capsys.readouterr().err


def test_parquet(
    ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--ledger", str(ledger), "--month", "2026-11", "--format", "parquet", "--output", str(tmp_path / "a")]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        assert bill.run(flags) == 1
    assert "pip install pyarrow" in capsys.readouterr().err
    parquet = pytest.importorskip("pyarrow.parquet")
    assert bill.run(flags) == 0
    assert parquet.read_table(tmp_path / "a").to_pylist()[0]["tenant"] == "acme"


def test_prices_change_within_a_month(database: Database) -> None:
    write(database, [row(1, FIRST, Amounts(compute_ns=10**9)), row(2, FIRST + 14 * DAY, Amounts(compute_ns=10**9))])
    text = (
        '[[price]]\nmodel = "m"\ncompute-seconds = 1\n[[price]]\nmodel = "m"\nfrom = 2026-11-15\ncompute-seconds = 3\n'
    )
    prices: PriceList = parse_prices(text, "prices.toml")
    lines = database.call(partial(bill_lines, prices=prices, month=NOVEMBER, tenant=None))
    assert [(line.day, line.cost) for line in lines] == [(date(2026, 11, 1), 1), (date(2026, 11, 15), 3)]
