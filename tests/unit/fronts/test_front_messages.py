"""Messages between core and fronts: each kind has a number of its own, also among those of all channels."""

from __future__ import annotations

from nerite.fronts import messages as kinds
from nerite.workers.ipc import messages

NOT_KINDS = {"BYTES_SLOT", "REPEATED"}
"""Other numbers of the module."""
SHARED = ("SEGMENT", "RETURN", "FORGET")
"""Kinds of all channels."""


def test_every_kind_has_a_number_of_its_own() -> None:
    numbers = {name: value for name, value in vars(kinds).items() if name.isupper() and type(value) is int}
    numbers = {name: value for name, value in numbers.items() if name not in NOT_KINDS}
    numbers |= {name: getattr(messages, name) for name in SHARED}
    assert len(numbers) > 20
    assert sorted(numbers.values()) == sorted(set(numbers.values()))
