"""The query of a usage report."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from nerite.core.errors import InvalidArgument
from nerite.ledger.row import Amounts
from nerite.ledger.tables import UsageSum
from nerite.ledger.usage import UsageQuery

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC).timestamp()
NOVEMBER = datetime(2026, 11, 1, tzinfo=UTC).timestamp()


def test_by_default_it_is_this_month() -> None:
    assert UsageQuery.parse("", NOW, "acme") == UsageQuery(NOVEMBER, NOW + 1, (), "acme")


def test_times_are_dates_times_or_seconds() -> None:
    query = UsageQuery.parse("start=2026-11-01&end=2026-11-02T00:00:00%2B01:00", NOW, None)
    assert (query.start, query.end) == (NOVEMBER, NOVEMBER + 23 * 3600)
    assert UsageQuery.parse("start=10&end=20", NOW, None) == UsageQuery(10.0, 20.0)


def test_groups() -> None:
    assert UsageQuery.parse("group_by=tenant,model&group_by=day,model", NOW, None).group_by == (
        "tenant",
        "model",
        "day",
    )


def test_the_report_has_dates_and_seconds() -> None:
    query = UsageQuery(0.0, 9e9, ("day", "model"))
    told = query.to_json([UsageSum({"day": 1, "model": "m"}, Amounts(2, 3, compute_ns=1_500_000_000))])
    (line,) = told["data"]
    assert (line["day"], line["model"], line["requests"], line["prompt_tokens"]) == ("1970-01-02", "m", 2, 3)
    assert (line["compute_seconds"], line["decode_seconds"]) == (1.5, 0)


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("strat=1", "'strat' is not a parameter of a usage report. Did you mean 'start'?"),
        ("start=1&start=2", "parameter 'start' is given 2 times"),
        ("start=today", "parameter 'start' must be a date such as 2026-11-01"),
        ("start=20&end=10", "'end' must be later than 'start'"),
        ("group_by=tenant", "'group_by' has 'tenant', but there are: day, model"),
        ("group_by=number", "'group_by' has 'number'"),
        ("&".join("a=1" for _ in range(40)), "at most 32 parameters"),
        ("start=" + "1" * 5000, "parameter 'start'"),
        ("end=" + "9" * 400, "parameter 'end' must be a date such as"),
    ],
)
def test_mistakes_are_named(query: str, wrong: str) -> None:
    with pytest.raises(InvalidArgument, match=wrong):
        UsageQuery.parse(query, NOW, "acme")
