"""Tenants in the sequence batcher: whose sequence an id names, and how many slots the sequences of one may hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
from sequence_owner import Owner, asked, half

from nerite.scheduling.decider import BatchingRules
from nerite.scheduling.sequence import SequenceRequest, SequenceRules

DIRECT: Final = SequenceRules("model", 2, 1000)
OLDEST: Final = SequenceRules("model", 2, 1000, BatchingRules(8))
BOTH: Final = pytest.mark.parametrize("rules", [DIRECT, OLDEST], ids=["direct", "oldest"])


def told(of: Owner, each: SequenceRequest) -> str:
    refusal = of.offer(each)
    return "" if refusal is None else refusal.message


@BOTH
@pytest.mark.parametrize("name", [42, "a call"])
def test_a_sequence_is_its_tenants_alone(rules: SequenceRules, name: int | str) -> None:
    """Another tenant cannot continue, restart or end it by its id, and is not told that it exists."""
    of = Owner(replace(rules, slots=4, share_of=lambda _: 1.0), 1)
    of.offer(asked(name, start=True, tenant="alice"))
    of.choose()
    of.finish("model_0")
    for thief in ("bob", ""):
        text = told(of, asked(name, tenant=thief))
        assert text.endswith("must specify the START flag on the first request of the sequence")
        assert told(of, asked(name, end=True, tenant=thief)) == text
        of.offer(asked(name, start=True, end=True, tenant=thief))
    assert told(of, asked(name, tenant="alice")) == ""
    ran = [each for each in of.choose()["model_0"] if each is not None]
    assert [each.sequence.id for each in ran] == [name] * 3
    assert len({each.sequence for each in ran}) == 3
    of.finish("model_0")
    assert told(of, asked(name, tenant="alice")) == ""


@BOTH
def test_a_cancelled_sequence_ends_for_its_tenant_only(rules: SequenceRules) -> None:
    of = Owner(replace(rules, share_of=lambda _: 1.0), 1)
    of.offer(asked(1, start=True, tenant="alice"))
    lost = asked(1, start=True, tenant="bob")
    of.offer(lost)
    of.cancel(lost)
    assert told(of, asked(1, tenant="alice")) == ""
    assert "was cancelled" in told(of, asked(1, tenant="bob"))
    assert "was cancelled" not in told(of, asked(1))


@BOTH
def test_no_tenant_takes_all_slots(rules: SequenceRules) -> None:
    of = Owner(replace(rules, slots=4, share_of=half), 1)
    for number in range(1, 6):
        of.offer(asked(number, start=True, tenant="bob"))
    of.offer(asked(1, start=True, tenant="alice"))
    begun = {(talk.key, talk.sequence.slots is not None) for talk in of.conversations}
    assert begun == {(("bob", number), number < 3) for number in range(1, 6)} | {(("alice", 1), True)}
    of.choose()
    of.finish("model_0")
    of.offer(asked(1, end=True, tenant="bob"))
    of.choose()
    of.finish("model_0")
    assert [talk.key for talk in of.conversations if talk.sequence.slots is not None] == [
        ("bob", 2), ("bob", 3), ("alice", 1)
    ]  # fmt: skip


def test_a_tenant_may_always_have_one_slot() -> None:
    of = Owner(replace(DIRECT, slots=1, share_of=half), 1)
    of.offer(asked(1, start=True, tenant="bob"))
    assert of.choose().keys() == {"model_0"}


@pytest.mark.parametrize(
    ("slots", "order"),
    [(1, ["bob 1", "bob 2", "alice 1", "default 1", "bob 3", "bob 4"]),
     (2, ["bob 1, bob 2", "alice 1, bob 3", "default 1, bob 4"]),
     (3, ["bob 1, bob 2, bob 3", "alice 1, default 1, bob 4"])],
)  # fmt: skip
def test_tenants_take_turns(slots: int, order: list[str]) -> None:
    """Whoever holds fewest slots is next, however many sequences of another one came before."""
    of = Owner(replace(DIRECT, slots=slots, share_of=lambda _: 1.0), 1)
    for number in range(1, 5):
        of.offer(asked(number, start=True, end=True, tenant="bob"))
    of.offer(asked(1, start=True, end=True, tenant="alice"))
    of.offer(asked(1, start=True, end=True))
    found = []
    while started := of.choose():
        ran = [each.sequence for each in started["model_0"] if each is not None]
        found.append(", ".join(f"{each.tenant} {each.id}" for each in ran))
        of.finish("model_0")
    assert found == order


def test_slots_that_nobody_else_needs_are_given_at_the_end() -> None:
    of = Owner(replace(DIRECT, slots=2, share_of=half), 1)
    for number in (1, 2):
        of.offer(asked(number, start=True, tenant="bob"))
    assert len(of.choose()["model_0"]) == 1
    of.finish("model_0")
    of.stop()
    assert [each.sequence.id for each in of.choose()["model_0"] if each is not None] == [2]
