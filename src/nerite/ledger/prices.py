"""The price list: what tokens, seconds and memory cost, per model and from which day on. Pure."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument
from nerite.ledger.row import SECOND, Amounts, Ending

ANY_MODEL: Final = "*"
MILLION: Final = 1_000_000
_GIB: Final = 2**30
_RATES: Final = ("prompt-tokens", "cached-tokens", "answer-tokens", "compute-seconds", "kv-gib-hours")
_TOP: Final = ("currency", "charged", "provider", "price")
_ENTRY: Final = ("model", "from", "kv-block-bytes", *_RATES)
CHARGED: Final = (Ending.ANSWERED, Ending.CACHED, Ending.JOINED, Ending.CANCELLED)
"""Endings that are charged, unless the list says otherwise."""


@dataclass(frozen=True)
class BillItem:
    """One kind of amount, its price and what it costs."""

    name: str
    unit: str
    quantity: Decimal
    unit_price: Decimal
    """Price of one unit."""
    cost: Decimal


@dataclass(frozen=True)
class ModelPrice:
    """Prices of a model from a day on."""

    model: str
    since: date
    rates: Mapping[str, Decimal]
    """By name: per 1,000 tokens, per second, per GiB and hour."""
    kv_block_bytes: int = 0

    def items(self, amounts: Amounts) -> list[BillItem]:
        """Return what amounts cost, by items with a price."""
        gib_hours = Decimal(amounts.kv_block_ns) * self.kv_block_bytes / _GIB / SECOND / 3600
        quantities = {
            "prompt-tokens": (Decimal(amounts.prompt_tokens - amounts.cached_tokens), 1000, "Tokens"),
            "cached-tokens": (Decimal(amounts.cached_tokens), 1000, "Tokens"),
            "answer-tokens": (Decimal(amounts.answer_tokens), 1000, "Tokens"),
            "compute-seconds": (Decimal(amounts.busy_ns) / SECOND, 1, "Seconds"),
            "kv-gib-hours": (gib_hours, 1, "GiB-Hours"),
        }
        found = []
        for name, rate in self.rates.items():
            quantity, per, unit = quantities[name]
            if quantity:
                found.append(BillItem(name, unit, quantity, rate / per, quantity * rate / per))
        return found

    def millionths(self, prompt_tokens: int, answer_tokens: int) -> int:
        """Return what tokens cost, in millionths of the currency, rounded up."""
        used = Amounts(prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)
        return math.ceil(sum((item.cost for item in self.items(used)), Decimal()) * MILLION)


@dataclass(frozen=True)
class PriceList:
    """All prices, in one currency."""

    currency: str
    prices: Sequence[ModelPrice]
    charged: Sequence[str] = CHARGED
    """Endings of requests that are charged."""
    provider: str = "Nerite"
    """Name of whoever bills, in FOCUS columns."""

    def price(self, model: str, day: date) -> ModelPrice | None:
        """Return the prices of a model on a day: its own, or else those of all models; None if there are none."""
        valid = [each for each in self.prices if each.since <= day]
        for name in (model, ANY_MODEL):
            found = [each for each in valid if each.model == name]
            if found:
                return max(found, key=lambda each: each.since)
        return None


def read_prices(path: Path) -> PriceList:
    """Read a price list. Raises ``InvalidArgument`` that names the place of a mistake."""
    try:
        return parse_prices(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read the price list '{path}': {error}") from None


def parse_prices(text: str, file: str) -> PriceList:
    """Parse a price list. Raises ``InvalidArgument``."""
    try:
        whole = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"the price list '{file}' is not TOML: {error}") from None
    where = f"the price list '{file}'"
    _refuse_unknown(whole, _TOP, where)
    entries = whole.get("price")
    if not isinstance(entries, list) or not entries:
        raise InvalidArgument(f"{where} has no prices: add [[price]] with a model and what it costs")
    prices = [_price(entry, f"{where}, price {number}") for number, entry in enumerate(entries, 1)]
    places = [(each.model, each.since) for each in prices]
    double = next((place for place in places if places.count(place) > 1), None)
    if double is not None:
        raise InvalidArgument(f"{where} has two prices of model '{double[0]}' from {double[1]} on: remove one")
    charged = whole.get("charged", list(CHARGED))
    endings = [str(ending) for ending in Ending if ending is not Ending.REPEATED]
    if not isinstance(charged, list) or not {*map(str, charged)} <= {*endings}:
        raise InvalidArgument(f"{where}: 'charged' must be a list of: {', '.join(endings)}")
    return PriceList(_text(whole, "currency", "EUR", where), prices, charged, _text(whole, "provider", "Nerite", where))


def _price(entry: Any, where: str) -> ModelPrice:
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{where} is not a table: write [[price]]")
    _refuse_unknown(entry, _ENTRY, where)
    model = _text(entry, "model", "", where)
    if not model:
        raise InvalidArgument(f"{where} has no 'model': name one, or \"*\" for all others")
    since = entry.get("from", date.min)
    if not isinstance(since, date) or isinstance(since, datetime):
        raise InvalidArgument(f"{where}: 'from' must be a date such as 2026-11-01, without quotation marks")
    rates = {}
    for name in _RATES:
        if name in entry:
            rate = entry[name]
            if type(rate) not in (int, Decimal) or not Decimal(rate).is_finite() or rate < 0:
                raise InvalidArgument(f"{where}: '{name}' must be a number of 0 or more")
            rates[name] = Decimal(rate)
    block = entry.get("kv-block-bytes", 0)
    if type(block) is not int or block < 0 or ("kv-gib-hours" in rates and not block):
        raise InvalidArgument(
            f"{where}: 'kv-gib-hours' needs 'kv-block-bytes', the bytes of a KV cache block of the model"
        )
    return ModelPrice(model, since, rates, block)


def _text(table: Mapping[str, Any], name: str, default: str, where: str) -> str:
    value = table.get(name, default)
    if not isinstance(value, str):
        raise InvalidArgument(f"{where}: '{name}' must be text")
    return value


def _refuse_unknown(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in table:
        if name not in known:
            meant = nearest(name, known)
            remedy = f"Did you mean '{meant}'?" if meant else f"There are: {', '.join(known)}."
            raise InvalidArgument(f"{where} has '{name}', which is unknown. {remedy}")
