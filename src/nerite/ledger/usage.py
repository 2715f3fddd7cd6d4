"""The query of a usage report: which rows, and what they are summed up by. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final
from urllib.parse import parse_qsl

from nerite.config.mistake import nearest
from nerite.core.client_text import checked_name
from nerite.core.errors import InvalidArgument
from nerite.ledger.row import SECOND, Amounts
from nerite.ledger.tables import GROUPS, UsageSum, sums
from nerite.storage.database import Transaction

MAX_GROUPS: Final = 10_000
"""Groups of one report. Further ones are told in one sum, so that no client can make a report fail for others."""
_PARAMETERS: Final = ("start", "end", "group_by")
_MOST_DIGITS: Final = 12
"""Of Unix seconds: a time within thirty thousand years."""


@dataclass(frozen=True)
class UsageQuery:
    """Rows of a time and perhaps of a tenant, to be summed up."""

    start: float
    """Unix time."""
    end: float
    """Unix time, exclusive."""
    group_by: Sequence[str] = ()
    tenant: str | None = None
    """None: all tenants."""

    @classmethod
    def parse(cls, text: str, now: float, tenant: str | None) -> UsageQuery:
        """Read the query of a URL: start, end and group_by. Raises ``InvalidArgument``.

        By default, from the first of the month (UTC) until ``now``, and all in one sum.
        """
        values: dict[str, list[str]] = {name: [] for name in _PARAMETERS}
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=32)
        except ValueError:
            raise InvalidArgument("the query of a usage report may have at most 32 parameters") from None
        for name, value in pairs:
            if name not in values:
                checked_name(name, "the name of a parameter")
                meant = nearest(name, _PARAMETERS)
                remedy = f"Did you mean '{meant}'?" if meant else f"There are: {', '.join(_PARAMETERS)}."
                raise InvalidArgument(f"'{name}' is not a parameter of a usage report. {remedy}")
            values[name].append(checked_name(value, f"parameter '{name}'"))
        for name in ("start", "end"):
            if len(values[name]) > 1:
                raise InvalidArgument(f"parameter '{name}' is given {len(values[name])} times: give it once")
        today = datetime.fromtimestamp(now, UTC)
        first = datetime(today.year, today.month, 1, tzinfo=UTC).timestamp()
        start = read_time("start", values["start"][0]) if values["start"] else first
        end = read_time("end", values["end"][0]) if values["end"] else now + 1
        if end <= start:
            raise InvalidArgument("parameter 'end' must be later than 'start'")
        return cls(start, end, _groups(values["group_by"], own=tenant is not None), tenant)

    def sums(self, transaction: Transaction) -> list[UsageSum]:
        """Return the sums; all but the largest groups in one, if there are too many."""
        where: dict[str, Sequence[str]] = {} if self.tenant is None else {"tenant": [self.tenant]}
        return sums(transaction, self.start, self.end, self.group_by, where, MAX_GROUPS)

    def to_json(self, found: Sequence[UsageSum]) -> dict[str, Any]:
        """Return the report."""
        return {
            "object": "list",
            "start": self.start,
            "end": self.end,
            "group_by": list(self.group_by),
            "data": [{**shown_group(each.group), **amounts_json(each.amounts)} for each in found],
        }


def _groups(values: Sequence[str], *, own: bool) -> tuple[str, ...]:
    allowed = [name for name in GROUPS if not (own and name == "tenant")]
    names = tuple(dict.fromkeys(name.strip() for value in values for name in value.split(",") if name.strip()))
    for name in names:
        if name not in allowed:
            raise InvalidArgument(f"'group_by' has '{name}', but there are: {', '.join(allowed)}")
    return names


def read_time(name: str, text: str) -> float:
    """Return a time as Unix time: a date or time of ISO 8601, in UTC if it names no zone, or Unix seconds."""
    try:
        if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS:
            return float(text)
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"parameter '{name}' must be a date such as 2026-11-01, a time such as 2026-11-01T12:00:00Z, or Unix "
            f"seconds, got: '{text}'"
        ) from None


def date_of(day: int) -> date:
    """Return the date of a number of days since 1970-01-01."""
    return date(1970, 1, 1) + timedelta(day)


def shown_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a group with the day, the only number among them, as a date."""
    return {name: date_of(value).isoformat() if isinstance(value, int) else value for name, value in group.items()}


def amounts_json(amounts: Amounts) -> dict[str, int | float]:
    """Return amounts by name, with times in seconds."""
    return {
        name.replace("_ns", "_seconds"): value / SECOND if name.endswith("_ns") else value
        for name, value in amounts._asdict().items()
    }
