from __future__ import annotations

import argparse
import itertools

import pytest

from nerite.tools.bench.forms import RequestForm, RoundRobin, Sequences, SequenceStep
from nerite.tools.bench.options import counts, numbers
from nerite.tools.bench.planning import constant


class Said(RequestForm):
    def __init__(self, text: str) -> None:
        self.text = text

    def encoded(self, step: SequenceStep | None = None) -> bytes:
        assert step is not None
        return f"{self.text} {step.sequence_id}{' start' * step.sequence_start}{' end' * step.sequence_end}".encode()


def test_constant_arrivals_of_several_generators_are_those_of_one() -> None:
    one = list(itertools.islice(constant(10), 6))
    assert one == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    shares = [list(itertools.islice(constant(10, share, 2), 3)) for share in range(2)]
    assert sorted(itertools.chain(*shares)) == one


def test_slots_take_turns() -> None:
    make = RoundRobin((b"a", b"b", b"c")).begin(0, 1)
    first, second = make(), make()
    assert [each.following() for each in (first, second, first, second)] == [b"a", b"b", b"c", b"a"]
    assert RoundRobin((b"a", b"b")).begin(1, 2)().following() == b"b"
    assert first.ending() is None


def test_a_sequence_stays_with_its_slot_and_its_id_is_nobody_elses() -> None:
    scripts = Sequences(((Said("x"), Said("y")), (Said("z"),)), first_id=7)
    make = scripts.begin(0, 2)
    first, second = make(), make()
    assert first.following() == b"x 7 start"
    assert second.following() == b"z 9 start end"
    assert first.following() == b"y 7 end"
    assert first.following() == b"x 11 start"
    assert scripts.begin(1, 2)().following() == b"x 8 start"


def test_a_sequence_that_is_open_can_be_ended() -> None:
    script = Sequences(((Said("x"), Said("y"), Said("z")),)).begin(0, 1)()
    assert script.ending() is None
    script.following()
    assert script.ending() == b"z 1 end"
    assert script.ending() is None
    assert script.following() == b"x 2 start"


@pytest.mark.parametrize(
    "text, levels",
    [("8", [8]), ("1,2,4", [1, 2, 4]), ("1:3", [1, 2, 3]), ("1:9:4", [1, 5, 9]), ("1:32:*2", [1, 2, 4, 8, 16, 32])],
)
def test_levels(text: str, levels: list[float]) -> None:
    assert list(numbers(text)) == levels
    assert list(counts(text)) == levels


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "4:1", "1:4:0", "1:4:*1", "1:2:3:4"])
def test_what_is_no_level(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        numbers(text)


def test_half_a_request_is_no_level() -> None:
    assert numbers("0.5") == (0.5,)
    with pytest.raises(argparse.ArgumentTypeError, match="whole numbers"):
        counts("0.5")
