"""Budgets in money: what tokens cost by the price list is leased, charged in advance, and corrected at the end."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from test_leased_admission import REDIS, Office, S, admitted, refused

from nerite.admission.accounts import Accounts
from nerite.admission.controller import AdmissionController
from nerite.admission.policy import AdmissionPolicy, parse_policy
from nerite.admission.refusals import QuotaLimit
from nerite.admission.ticket import AdmissionTicket, TicketEnding
from nerite.core.errors import InvalidArgument

PRICES = """
currency = "EUR"
[[price]]
model = "m"
prompt-tokens = 0.5
answer-tokens = 2.0
compute-seconds = 9.0
[[price]]
model = "m"
from = 2026-12-01
prompt-tokens = 5
"""
POLICY = f'prices = "prices.toml"\n{REDIS}[tenants.a]\nmoney_per_month = 1.5\n'


def office(folder: Path, today: date = date(2026, 11, 5), model: str = "m") -> Office:
    """Return a controller of a model whose tokens have prices."""
    (folder / "prices.toml").write_text(PRICES)
    made = Office(tokens=True, connected=False)
    made.accounts = Accounts(policy(folder), made.book, lambda: today)
    made.controller = AdmissionController(model, made.accounts, made.now, tokens=True)
    made.book.connected()
    made.answer()
    return made


def policy(folder: Path, text: str = POLICY) -> AdmissionPolicy:
    return parse_policy(text, str(folder / "policy.toml"))


def left(made: Office) -> int:
    (budget,) = made.accounts.of("a", made.now).standing(made.now).rates
    assert (budget.limit, budget.burst) == (QuotaLimit.MONEY, 1_500_000)
    return budget.left


def test_tokens_are_charged_at_their_price(tmp_path: Path) -> None:
    made = office(tmp_path)
    ticket = admitted(made.offer(AdmissionTicket("a", 1000, 400)))
    assert left(made) == 1_500_000 - 500_000 - 800_000
    made.controller.correct(ticket, 600, made.now)
    assert left(made) == 1_500_000 - 300_000 - 800_000
    made.controller.started(ticket, made.now + S)
    made.controller.progressed(ticket, 50, made.now + S)
    made.controller.finished(ticket, TicketEnding.COMPLETE, made.now + S)
    assert left(made) == 1_500_000 - 300_000 - 100_000


def test_what_is_not_generated_is_refunded(tmp_path: Path) -> None:
    made = office(tmp_path)
    ticket = admitted(made.offer(AdmissionTicket("a", 1000, 400)))
    made.controller.finished(ticket, TicketEnding.FAILED, made.now)
    assert left(made) == 1_500_000


def test_a_request_beyond_the_budget_is_refused_with_both_amounts(tmp_path: Path) -> None:
    made = office(tmp_path)
    admitted(made.offer(AdmissionTicket("a", 2000, 100)))
    refusal = refused(made.offer(AdmissionTicket("a", 1000, 1)))
    error = refusal.as_error()
    assert error.http_status == 429
    assert refusal.retry_after is None
    assert "money_per_month of tenant 'a' is 1.5" in error.message
    assert "may cost 0.502, more than is left of the month" in error.message
    assert "0.3 left of 1.5" in error.message


def test_prices_are_those_of_the_day_and_of_the_model(tmp_path: Path) -> None:
    made = office(tmp_path, date(2026, 12, 1))
    admitted(made.offer(AdmissionTicket("a", 100, 400)))
    assert left(made) == 1_000_000
    made = office(tmp_path, model="free")
    admitted(made.offer(AdmissionTicket("a", 100_000, 400)))
    assert left(made) == 1_500_000


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (POLICY.replace('prices = "prices.toml"\n', ""), "tenants.a.money_per_month: needs a price list"),
        (POLICY.replace(REDIS, ""), "money_per_month: needs a Redis"),
        (POLICY.replace("1.5", "-1"), "money_per_month: must be a number >= 0"),
        (POLICY.replace('"prices.toml"', '"none.toml"'), "prices: cannot read the price list"),
        (POLICY.replace('"prices.toml"', "7"), "prices: must be the path of a price list"),
    ],
)
def test_mistakes(text: str, mistake: str, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)
    with pytest.raises(InvalidArgument, match=mistake):
        policy(tmp_path, text)
