"""Bills: what tenants used in a month, and what that costs. Pure, but for the query."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, Literal

from nerite.core.errors import InvalidArgument
from nerite.ledger.prices import BillItem, PriceList
from nerite.ledger.row import SECOND, Amounts, Origin
from nerite.ledger.tables import equations, sums
from nerite.ledger.usage import date_of
from nerite.storage.database import Transaction

_EPOCH: Final = date(1970, 1, 1)
_CENT: Final = Decimal("0.000001")
"""Costs are rounded to this only when they are shown."""
By = Literal["tenant", "model", "day"]


@dataclass(frozen=True)
class Month:
    """A month, in UTC."""

    first: date
    end: date
    """First day of the next month."""

    @classmethod
    def parse(cls, text: str) -> Month:
        """Read ``YYYY-MM``. Raises ``InvalidArgument``."""
        try:
            first = date.fromisoformat(f"{text}-01")
            return cls(first, (first + timedelta(32)).replace(day=1))
        except (ValueError, OverflowError):  # the last month that there is has no end
            raise InvalidArgument(f"'{text}' is no month: write YYYY-MM, such as 2026-11") from None

    @property
    def times(self) -> tuple[float, float]:
        """Begin and end as Unix times."""
        return unix_time(self.first), unix_time(self.end)

    @property
    def days(self) -> tuple[int, int]:
        """Begin and end as days since 1970-01-01."""
        return (self.first - _EPOCH).days, (self.end - _EPOCH).days


def unix_time(day: date) -> float:
    """Return the beginning of a UTC day."""
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


@dataclass(frozen=True)
class BillLine:
    """What a tenant used of a model on a day."""

    tenant: str
    model: str
    day: date
    amounts: Amounts
    items: Sequence[BillItem]

    @property
    def cost(self) -> Decimal:
        """The cost of all items."""
        return sum((item.cost for item in self.items), Decimal())


def bill_lines(transaction: Transaction, prices: PriceList, month: Month, tenant: str | None) -> list[BillLine]:
    """Return the lines of a month, for one tenant or all, by tenant, model and day.

    Steps of ensembles and calls of models are charged, too, but do not count as requests of the tenant.
    """
    where: dict[str, Sequence[str]] = {
        "ending": [str(ending) for ending in prices.charged],
        "origin": [str(Origin.CLIENT), str(Origin.CALL)],
    }
    if tenant is not None:
        where["tenant"] = [tenant]
    used: dict[tuple[str, str, int], Amounts] = {}
    for group, amounts in sums(transaction, *month.times, ("tenant", "model", "day", "origin"), where):
        if group["origin"] == Origin.CALL:
            amounts = amounts._replace(requests=0)
        place = group["tenant"], group["model"], int(group["day"])
        used[place] = added(used.get(place, Amounts(0)), amounts)
    return [_line(prices, name, model, date_of(number), amounts) for (name, model, number), amounts in used.items()]


def merged(lines: Iterable[BillLine], prices: PriceList) -> list[BillLine]:
    """Return lines of several ledgers with one for each tenant, model and day."""
    found: dict[tuple[str, str, date], Amounts] = {}
    for line in lines:
        place = line.tenant, line.model, line.day
        found[place] = added(found.get(place, Amounts(0)), line.amounts)
    return [_line(prices, *place, amounts) for place, amounts in sorted(found.items())]


def _line(prices: PriceList, tenant: str, model: str, day: date, amounts: Amounts) -> BillLine:
    price = prices.price(model, day)
    return BillLine(tenant, model, day, amounts, [] if price is None else price.items(amounts))


def added(one: Amounts, other: Amounts) -> Amounts:
    """Return the sum of two amounts."""
    return Amounts(*map(sum, zip(one, other, strict=True)))


COLUMNS: Final = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "answer_tokens",
    "busy_seconds",
    "kv_block_seconds",
    "cost",
    "currency",
)
"""Columns of a bill, behind those that it is grouped by."""


def bill_rows(lines: Iterable[BillLine], by: By, currency: str) -> list[dict[str, Any]]:
    """Return a row for each tenant and, if ``by`` says so, each of its models or days."""
    grouped: dict[tuple[str, str], tuple[Amounts, Decimal]] = {}
    for line in lines:
        value = {"tenant": "", "model": line.model, "day": line.day.isoformat()}[by]
        amounts, cost = grouped.get((line.tenant, value), (Amounts(0), Decimal()))
        grouped[line.tenant, value] = added(amounts, line.amounts), cost + line.cost
    rows = []
    for (tenant, value), (amounts, cost) in sorted(grouped.items()):
        own: dict[str, str] = {} if by == "tenant" else {by: value}
        rows.append(
            {
                "tenant": tenant,
                **own,
                "requests": amounts.requests,
                "prompt_tokens": amounts.prompt_tokens,
                "cached_tokens": amounts.cached_tokens,
                "answer_tokens": amounts.answer_tokens,
                "busy_seconds": round(amounts.busy_ns / SECOND, 6),
                "kv_block_seconds": round(amounts.kv_block_ns / SECOND, 6),
                "cost": shown_cost(cost),
                "currency": currency,
            }
        )
    return rows


def shown_cost(cost: Decimal) -> str:
    """Return a cost with six decimals."""
    return str(cost.quantize(_CENT))


FOCUS_COLUMNS: Final = (
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedCost",
    "ContractedUnitPrice",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "ListUnitPrice",
    "PricingCategory",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "ServiceCategory",
    "ServiceName",
    "SkuId",
    "SkuPriceId",
    "SubAccountId",
    "SubAccountName",
    "Tags",
)
"""Columns of the FinOps Open Cost and Usage Specification (FOCUS) 1.0, without those of zones and commitments."""


def focus_rows(lines: Iterable[BillLine], prices: PriceList, month: Month) -> list[dict[str, str]]:
    """Return a row for each item of each line, with FOCUS columns. A tenant is a sub account."""
    return [_focus_row(line, item, prices, month) for line in lines for item in line.items]


def _focus_row(line: BillLine, item: BillItem, prices: PriceList, month: Month) -> dict[str, str]:
    cost, unit_price = str(item.cost), str(item.unit_price)
    sku = f"{line.model}/{item.name}"
    row = dict.fromkeys(FOCUS_COLUMNS, "")
    row.update(
        dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
        **dict.fromkeys(("ContractedUnitPrice", "ListUnitPrice"), unit_price),
        **dict.fromkeys(("ConsumedQuantity", "PricingQuantity"), str(item.quantity)),
        **dict.fromkeys(("ConsumedUnit", "PricingUnit"), item.unit),
        **dict.fromkeys(("BillingAccountId", "BillingAccountName", "InvoiceIssuerName"), prices.provider),
        **dict.fromkeys(("ProviderName", "PublisherName"), prices.provider),
        **dict.fromkeys(("ResourceId", "ResourceName"), line.model),
        **dict.fromkeys(("SkuId", "SkuPriceId"), sku),
        **dict.fromkeys(("SubAccountId", "SubAccountName"), line.tenant),
        BillingCurrency=prices.currency,
        BillingPeriodStart=_midnight(month.first),
        BillingPeriodEnd=_midnight(month.end),
        ChargeCategory="Usage",
        ChargeDescription=f"{item.name.replace('-', ' ')} of model {line.model}",
        ChargeFrequency="Usage-Based",
        ChargePeriodStart=_midnight(line.day),
        ChargePeriodEnd=_midnight(line.day + timedelta(1)),
        PricingCategory="Standard",
        ResourceType="Model",
        ServiceCategory="AI and Machine Learning",
        ServiceName="Inference",
        Tags=json.dumps({"model": line.model, "tenant": line.tenant}),
    )
    return row


def _midnight(day: date) -> str:
    return f"{day.isoformat()}T00:00:00Z"


def equation_rows(transaction: Transaction, month: Month) -> list[Mapping[str, Any]]:
    """Return the equation of each model for a month, and at last that of all."""
    found = equations(transaction, *month.days)
    rows: list[Mapping[str, Any]] = [
        {
            "model": each.model,
            "wall_seconds": each.wall,
            "idle_seconds": each.idle,
            "row_seconds": each.rows,
            "unaccounted_seconds": each.unaccounted,
            "unaccounted_share": each.share,
            "cut_short": each.cut_short,
        }
        for each in found
    ]
    names = ("wall_seconds", "idle_seconds", "row_seconds", "unaccounted_seconds", "cut_short")
    total: dict[str, Any] = {"model": "all", **{name: sum(row[name] for row in rows) for name in names}}
    total["unaccounted_share"] = total["unaccounted_seconds"] / total["wall_seconds"] if total["wall_seconds"] else 0.0
    return [*rows, total]
