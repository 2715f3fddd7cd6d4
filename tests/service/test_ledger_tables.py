"""The tables of the ledger and the bills made of them, in SQLite and in PostgreSQL."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nerite.core.errors import Unavailable
from nerite.core.item_attempt import new_attempt, new_batch_id
from nerite.ledger import tables
from nerite.ledger.bill import Month, bill_lines, bill_rows, equation_rows, focus_rows
from nerite.ledger.dead_rows import Refused, count_dead_rows, dead_rows, set_aside, write_again, write_apart
from nerite.ledger.instance_clock import InstanceTime
from nerite.ledger.prices import PriceList, parse_prices
from nerite.ledger.row import Amounts, Ending, LedgerRow, Origin, RowKey, Source
from nerite.storage.database import Database, Transaction
from nerite.tools import bill

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


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    where = str(tmp_path / "ledger.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres"))
    opened = Database(where, [tables.LedgerSchema()])
    with opened.transaction() as transaction:
        transaction.execute("DELETE FROM ledger_rows")
        transaction.execute("DELETE FROM ledger_times")
        transaction.execute("DELETE FROM ledger_items")
        transaction.execute("DELETE FROM ledger_dead_rows")
    yield opened
    opened.close()


def row(number: int, ended: float, amounts: Amounts, **key: Any) -> LedgerRow:
    return LedgerRow(
        number, ended - 1, ended, RowKey(**{"tenant": "acme", "model": "m", "version": "1", **key}), amounts
    )


def write(database: Database, rows: list[LedgerRow], times: list[InstanceTime] | None = None, session: int = 1) -> None:
    with database.transaction() as transaction:
        tables.write_rows(transaction, session, rows)
        tables.write_times(transaction, session, "here", times or [])


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


BATCH = new_batch_id()


def attempt(number: int, ended: float, request_id: str, **key: Any) -> LedgerRow:
    """Return a row of an attempt at an item."""
    return row(number, ended, Amounts(1, 2, 0, 3, decode_ns=10**9), **key)._replace(request_id=request_id)


def endings(database: Database) -> dict[str, int]:
    found = database.call(partial(tables.sums, start=0, end=9e9, group_by=["ending"]))
    return {each.group["ending"]: each.amounts.requests for each in found}


def billed(database: Database) -> int:
    lines = database.call(partial(bill_lines, prices=PriceList("", ()), month=NOVEMBER, tenant="acme"))
    return sum(line.amounts.requests for line in lines)


def test_of_several_attempts_at_an_item_the_first_is_charged(database: Database) -> None:
    first, second, third, other = (new_attempt(BATCH, line) for line in (1, 1, 1, 2))
    running = attempt(1, FIRST, first, ending=Ending.RUNNING)
    write(database, [running])
    write(database, [attempt(1, FIRST + 1, second)], session=2)
    write(database, [attempt(1, FIRST + 2, first)])
    assert endings(database) == {"answered": 1, "repeated": 1}
    # Two choices of one call, and another item; written again, because the first write may have been lost.
    rows = [attempt(2, FIRST + 3, third), attempt(3, FIRST + 3, third), attempt(4, FIRST, other)]
    rows += [attempt(5, FIRST, other), attempt(6, FIRST, new_attempt(BATCH, 2)), attempt(7, FIRST, "ff-1")]
    for _ in range(2):
        write(database, rows, session=3)
        assert endings(database) == {"answered": 4, "repeated": 4}
    write(database, [attempt(1, FIRST, other, ending=Ending.CANCELLED)], session=4)
    assert billed(database) == 4
    (whole,) = database.call(partial(tables.sums, start=0, end=9e9))
    assert whole.amounts.requests == 5, "with the one that was cancelled"
    (seconds,) = database.call(lambda each: each.rows("SELECT SUM(decode_seconds) FROM ledger_rows"))
    assert seconds == (9.0,), "no time is lost"


def test_an_item_that_is_repeated_after_its_day_was_summed_up(database: Database) -> None:
    write(database, [attempt(1, FIRST + 1, new_attempt(BATCH, 1)), attempt(2, FIRST + 1, "ff-1")])
    database.call(partial(tables.sum_up, before_day=NOVEMBER.days[0] + 1, session=77))
    write(database, [attempt(1, FIRST + DAY, new_attempt(BATCH, 1))], session=2)
    assert endings(database) == {"answered": 2, "repeated": 1}
    database.call(partial(tables.sum_up, before_day=NOVEMBER.days[0] + 2, session=78))
    assert endings(database) == {"answered": 2, "repeated": 1}
    late = NOVEMBER.days[0] + 1 + tables.LONGEST_BATCH_DAYS + 1
    database.call(partial(tables.sum_up, before_day=late, session=79))
    assert database.call(lambda each: each.rows("SELECT COUNT(*) FROM ledger_items")) == [(0,)]


def test_items_in_several_ledgers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An item ran at one server, and again at another with a ledger of its own."""
    late, early = tmp_path / "late.db", tmp_path / "early.db"
    for path, session, ended in ((late, 1, FIRST + 50), (early, 2, FIRST + 10)):
        made = Database(str(path), [tables.LedgerSchema()])
        again = new_attempt(BATCH, 1)
        write(
            made, [attempt(1, ended, again), attempt(2, ended, again, model="step", origin=Origin.CALL)], None, session
        )
        write(made, [attempt(3, ended, new_attempt(BATCH, session + 1))], None, session)
        made.close()
    usual = ["--ledger", str(late), "--ledger", str(early), "--month", "2026-11", "--format", "json", "--by", "model"]
    for _ in range(2):
        assert bill.run(usual) == 0
        lines = {line["model"]: line for line in json.loads(capsys.readouterr().out)}
        assert (lines["m"]["requests"], lines["m"]["busy_seconds"], lines["step"]["busy_seconds"]) == (3, 3.0, 1.0)
    made = Database(str(late), [tables.LedgerSchema()])
    assert endings(made) == {"answered": 1, "repeated": 2}
    write(made, [attempt(1, FIRST + 60, new_attempt(BATCH, 1))], None, 3)
    assert endings(made) == {"answered": 1, "repeated": 3}
    made.close()


def test_a_ledger_of_an_earlier_release(tmp_path: Path) -> None:
    before = tables.LedgerSchema(tables.LedgerSchema().migrations[:-2])
    made = Database(str(tmp_path / "ledger.db"), [before])
    columns = "session, number, day, started, ended, tenant, model, version, route, arm, class, origin, ending, "
    columns += (
        "requests, prompt_tokens, cached_tokens, answer_tokens, queue_seconds, compute_seconds, prefill_seconds, "
    )
    columns += "decode_seconds, kv_block_seconds"
    values = f"1, 1, 0, 0, {FIRST}, 'acme', 'm', '1', '', '', '', 'client', 'answered', 1, 0, 0, 0, 0, 0, 0, 0, 0"
    made.call(lambda each: each.execute(f"INSERT INTO ledger_rows ({columns}) VALUES ({values})"))
    made.close()
    made = Database(str(tmp_path / "ledger.db"), [tables.LedgerSchema()])
    write(made, [attempt(1, FIRST, new_attempt(BATCH, 1)), attempt(2, FIRST, new_attempt(BATCH, 1))], None, 2)
    assert endings(made) == {"answered": 2, "repeated": 1}
    made.close()


def test_of_too_many_groups_the_largest_are_told_and_all_others_in_one(database: Database) -> None:
    some = [
        row(number, FIRST, Amounts(requests=number, compute_ns=10**9), model=f"m{number}") for number in range(1, 8)
    ]
    write(database, [*some, row(9, FIRST, Amounts(requests=50), source=Source.COPY)])
    find = partial(tables.sums, start=FIRST, end=FIRST + DAY, group_by=["day", "model"])
    told = database.call(partial(find, most=3))
    assert [(each.group["model"], each.amounts.requests) for each in told] == [
        ("m5", 5), ("m6", 6), ("m7", 7), ("others", 1 + 2 + 3 + 4),
    ]  # fmt: skip
    assert told[-1].group["day"] == "others"
    assert told[-1].amounts.compute_ns == 4 * 10**9
    assert len(database.call(partial(find, most=7))) == len(database.call(find)) == 7
    by_source = database.call(partial(tables.sums, start=FIRST, end=9e9, group_by=["source"], most=1))
    assert [each.amounts.requests for each in by_source] == [50, 28], "copies count when they are asked for"


def test_rows_that_are_refused_are_found_among_the_others(database: Database) -> None:
    poison = {2: {"model": "a\ud800b"}, 17: {"tenant": "\ud83d"}, 256: {"pool": "\udfff"}}
    some = [row(number, FIRST, Amounts(compute_ns=10**9), **poison.get(number, {})) for number in range(1, 257)]
    written: list[int] = []

    def put(transaction: Transaction, part: Sequence[LedgerRow]) -> None:
        written.append(len(part))
        tables.write_rows(transaction, 5, part)

    with database.transaction() as transaction:
        refused = write_apart(transaction, some, put)
        assert [each.entry.number for each in refused] == [*poison]
        assert set_aside(transaction, 5, refused) == []
    assert len(written) < 64, "halves that hold no refused row are written at once"
    (found,) = database.call(partial(tables.sums, start=FIRST, end=FIRST + DAY))
    assert found.amounts.requests == 253
    kept = database.call(dead_rows)
    assert [each.row for each in kept] == [each.entry for each in refused]
    assert all("surrogates not allowed" in each.reason for each in kept)
    assert database.call(write_again) == (3, 0)
    assert database.call(count_dead_rows) == 0
    models = database.call(partial(tables.sums, start=0, end=9e9, group_by=["model"]))
    assert [each.group["model"] for each in models] == ["a\ufffdb", "m"]


def test_what_is_refused_again_stays_set_aside(database: Database) -> None:
    too_many = row(1, FIRST, Amounts(2**70))
    database.call(lambda transaction: set_aside(transaction, 1, [Refused(too_many, OverflowError("too large"))]))
    assert database.call(write_again) == (0, 1)
    assert database.call(dead_rows) == [(1, too_many, "too large")]


def test_a_database_that_fails_refuses_nothing(database: Database) -> None:
    def fail(transaction: Transaction, part: Sequence[LedgerRow]) -> None:
        transaction.rows("SELECT 1 FROM away")

    with pytest.raises(Unavailable), database.transaction() as transaction:
        write_apart(transaction, [row(1, FIRST, Amounts())], fail)


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
    assert bill.run([*priced, "--format", "json", "--output", str(tmp_path / "bill.json")]) == 0
    assert json.loads((tmp_path / "bill.json").read_text())[0]["cost"] == "8.000000"
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


def test_rows_that_were_set_aside_are_told_and_written_again(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = Database(str(ledger), [tables.LedgerSchema()])
    lost = Refused(row(2, FIRST, Amounts(compute_ns=10**9), model="a\0b\x1b[2J"), ValueError("NUL"))
    unkept = database.call(lambda transaction: set_aside(transaction, 1, [lost]))
    assert unkept == []
    database.close()
    usual = ["--ledger", str(ledger), "--month", "2026-11"]
    assert bill.run(usual) == 0
    assert "1 rows were set aside and are in no bill\n    --set-aside lists them." in capsys.readouterr().err
    assert bill.run([*usual, "--set-aside"]) == 0
    assert r"| 1/2 | acme   | a\x00b\x1b[2J | answered | NUL    |" in capsys.readouterr().out
    assert bill.run([*usual, "--set-aside", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["row"]["number"] == 2
    assert bill.run([*usual, "--write-set-aside"]) == 0
    assert "1 rows were written, 0 are refused again." in capsys.readouterr().out
    assert bill.run([*usual, "--format", "json"]) == 0
    out = capsys.readouterr()
    assert (json.loads(out.out)[0]["requests"], out.err) == (2, "")


@pytest.mark.parametrize(
    ("flags", "status", "wrong"),
    [
        (["--month", "11"], 1, "'11' is no month"),
        (["--month", "9999-12"], 1, "'9999-12' is no month"),
        (["--ledger", "none.db"], 1, "there is no ledger 'none.db'"),
        (["--sum-up-before", "2999-01-01"], 1, "2999-01-01 is not before today"),
        (["--format", "focus"], 2, "add --prices FILE"),
        (["--format", "parquet"], 2, "name a file with --output"),
        (["--prices", "none.toml"], 1, "cannot read the price list 'none.toml'"),
        (["--output", "bill.txt"], 2, "--output is for a bill as csv, json, focus or parquet"),
        (["--check", "--format", "csv", "--output", "bill.csv"], 2, "--output is for a bill"),
        (["--format", "json", "--output", "none/bill.json"], 1, "cannot write 'none/bill.json': No such file"),
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
    (line,) = parquet.read_table(tmp_path / "a").to_pylist()
    assert (line["tenant"], line["requests"], line["cost"]) == ("acme", 1, Decimal(0))
    kinds = parquet.read_schema(tmp_path / "a")
    assert str(kinds.field("cost").type) == "decimal128(38, 6)"
    assert bill.run([*flags, "--month", "2025-01"]) == 0
    assert parquet.read_table(tmp_path / "a").num_rows == 0
    assert parquet.read_schema(tmp_path / "a") == kinds, "also without any use"


def test_prices_change_within_a_month(database: Database) -> None:
    write(database, [row(1, FIRST, Amounts(compute_ns=10**9)), row(2, FIRST + 14 * DAY, Amounts(compute_ns=10**9))])
    text = (
        '[[price]]\nmodel = "m"\ncompute-seconds = 1\n[[price]]\nmodel = "m"\nfrom = 2026-11-15\ncompute-seconds = 3\n'
    )
    prices: PriceList = parse_prices(text, "prices.toml")
    lines = database.call(partial(bill_lines, prices=prices, month=NOVEMBER, tenant=None))
    assert [(line.day, line.cost) for line in lines] == [(date(2026, 11, 1), 1), (date(2026, 11, 15), 3)]
