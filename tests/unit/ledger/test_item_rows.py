"""Rows of items of batches: which of several attempts is charged, in one ledger and in several."""

from __future__ import annotations

from typing import Any

import pytest

from nerite.core.item_attempt import item_of, new_attempt, new_batch_id
from nerite.ledger.reconciliation import ItemCharge, repeated_charges
from nerite.ledger.row import Amounts, Ending, LedgerRow, RowKey, Source, charged_once, summed

BATCH = new_batch_id()


def row(request_id: str, number: int = 1, **key: Any) -> LedgerRow:
    return LedgerRow(number, 1.0, 2.0, RowKey(**{"model": "m", **key}), Amounts(answer_tokens=5), request_id)


def test_attempts_at_one_item() -> None:
    one, other = new_attempt(BATCH, 17), new_attempt(BATCH, 17)
    assert one != other
    assert item_of(one) == item_of(other) == f"{BATCH}.11"
    assert item_of(new_attempt(BATCH, 18)) != item_of(one)
    assert len(new_attempt(BATCH, 10**9)) <= 64, "the longest id that servers take"
    for name in ("", "ff-1", BATCH, f"{BATCH}.1", f"{one}0", f"x{one}", f"{one}\n"):
        assert item_of(name) == ""


@pytest.mark.parametrize(
    ("ending", "source", "charged"),
    [
        (Ending.ANSWERED, Source.SERVER, Ending.REPEATED),
        (Ending.CACHED, Source.SERVER, Ending.REPEATED),
        (Ending.ANSWERED, Source.ROUTER, Ending.REPEATED),
        (Ending.ANSWERED, Source.COPY, Ending.ANSWERED),
        (Ending.CANCELLED, Source.SERVER, Ending.PREEMPTED),
        (Ending.FAILED, Source.SERVER, Ending.FAILED),
        (Ending.RUNNING, Source.SERVER, Ending.RUNNING),
    ],
)
def test_an_attempt_beside_the_one_that_is_charged(ending: str, source: str, charged: str) -> None:
    one, other = (new_attempt(BATCH, 1) for _ in range(2))
    made = row(other, ending=ending, source=source)
    for holder in (one, ""):
        (found,) = charged_once([made], {f"{item_of(one)} m": holder})
        assert found.key.ending == charged
        assert found.amounts == made.amounts


def test_the_attempt_that_is_charged_and_requests_of_clients() -> None:
    one = new_attempt(BATCH, 1)
    rows = [
        row(one),
        row(one, 2),  # another choice of the same call
        row(one, 3, model="step", origin="call"),
        row("ff-1", 4, ending=Ending.CANCELLED),
        row("", 5, ending=Ending.CANCELLED),
    ]
    assert charged_once(rows, {f"{item_of(one)} m": one}) == rows
    assert charged_once(rows[2:3], {f"{item_of(one)} m": ""}) == rows[2:3], "of another model"


def test_sums_leave_items_out_until_there_are_too_many() -> None:
    rows = [row(new_attempt(BATCH, line), line) for line in range(1, 6)]
    rows += [row("", number) for number in range(6, 9)]
    whole = summed(rows, 5)
    assert whole[:5] == rows[:5]
    assert [(each.key.ending, each.amounts.requests) for each in whole[5:]] == [("answered", 3)]
    whole = summed(rows, 2)
    assert {(each.key.ending, each.amounts.requests) for each in whole[2:]} == {("repeated", 3), ("answered", 3)}
    assert sum(each.amounts.answer_tokens for each in whole) == 40


def test_the_first_of_several_ledgers_charges() -> None:
    early, late = ItemCharge(1.0, 7, "a"), ItemCharge(2.0, 8, "b")
    alone = ItemCharge(3.0, 9, "c")
    assert repeated_charges([{"x": late, "y": alone}, {"x": early}, {"x": late}]) == [{"x": late}, {}, {"x": late}]
    assert repeated_charges([{"x": early}, {"x": early}]) == [{}, {}], "one ledger, named twice"
