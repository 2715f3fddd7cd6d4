"""The price list."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pytest

from nerite.core.errors import InvalidArgument
from nerite.ledger.prices import CHARGED, PriceList, parse_prices
from nerite.ledger.row import Amounts

LIST = """
currency = "USD"

[[price]]
model = "*"
compute-seconds = 0.5

[[price]]
model = "llama"
from = 2026-11-01
prompt-tokens = 1
cached-tokens = 0.25
answer-tokens = 3.0
kv-gib-hours = 2
kv-block-bytes = 1_073_741_824

[[price]]
model = "llama"
from = 2026-12-01
prompt-tokens = 0.5
"""


@pytest.fixture
def prices() -> PriceList:
    return parse_prices(LIST, "prices.toml")


def test_the_latest_price_of_the_model_is_valid_or_that_of_all(prices: PriceList) -> None:
    found = [prices.price("llama", date(2026, month, 15)) for month in (10, 11, 12)]
    assert [each and (each.model, each.since.month) for each in found] == [("*", 1), ("llama", 11), ("llama", 12)]
    assert PriceList("EUR", ()).price("llama", date(2026, 11, 1)) is None
    assert (prices.currency, prices.charged) == ("USD", list(CHARGED))


def test_what_amounts_cost(prices: PriceList) -> None:
    price = prices.price("llama", date(2026, 11, 1))
    assert price is not None
    used = Amounts(1, 1500, 500, 2000, 0, 0, 10**9, 10**9, kv_block_ns=3600 * 10**9)
    assert {item.name: item.cost for item in price.items(used)} == {
        "prompt-tokens": Decimal(1),
        "cached-tokens": Decimal("0.125"),
        "answer-tokens": Decimal(6),
        "kv-gib-hours": Decimal(2),
    }
    every = prices.price("other", date(2026, 11, 1))
    assert every is not None
    (item,) = every.items(used)
    assert (item.unit, item.quantity, item.unit_price, item.cost) == ("Seconds", 2, Decimal("0.5"), 1)
    assert every.items(Amounts()) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("currency =", "is not TOML"),
        ('currency = "EUR"', "has no prices"),
        ("[[prise]]", "has 'prise', which is unknown. Did you mean 'price'?"),
        ('[[price]]\nmodel = "*"\nprompt-token = 1', "price 1 has 'prompt-token', which is unknown. Did you mean"),
        ("[[price]]\nprompt-tokens = 1", "price 1 has no 'model'"),
        ('[[price]]\nmodel = "*"\nprompt-tokens = -1', "'prompt-tokens' must be a number of 0 or more"),
        ('[[price]]\nmodel = "*"\nprompt-tokens = nan', "'prompt-tokens' must be a number of 0 or more"),
        ('[[price]]\nmodel = "*"\nprompt-tokens = true', "'prompt-tokens' must be a number of 0 or more"),
        ('[[price]]\nmodel = "*"\nfrom = "2026"', "'from' must be a date"),
        ('[[price]]\nmodel = "*"\nkv-gib-hours = 1', "'kv-gib-hours' needs 'kv-block-bytes'"),
        ('[[price]]\nmodel = "*"\n[[price]]\nmodel = "*"', "two prices of model '\\*'"),
        ('charged = ["lost"]\n[[price]]\nmodel = "*"', "'charged' must be a list of: answered, cached"),
        ("price = 3", "has no prices"),
    ],
)
def test_mistakes_are_named(text: str, wrong: str) -> None:
    with pytest.raises(InvalidArgument, match=wrong):
        parse_prices(text, "prices.toml")
