"""What a worker prints: lines about a request go to the log, all others to the pipe."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from doubles import request
from nerite.core.request import at_hand
from nerite.observability.captured_output import CapturedOutput

Line = tuple[str, str, str, int]


class Bench:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.logged: list[Line] = []
        self.out = CapturedOutput(self.writer, "stdout", lambda *line: self.logged.append(line))

    @property
    def piped(self) -> bytes:
        """What went to the pipe. Only once."""
        self.out.flush()
        os.close(self.writer)
        return os.read(self.reader, 4096)


@pytest.fixture
def bench() -> Iterator[Bench]:
    before = at_hand.get()
    yield Bench()
    at_hand.set(before)


def about(id: str) -> None:
    at_hand.set([request(id=id)] if id else [])


def test_a_line_of_nobody(bench: Bench) -> None:
    print("one", 2, file=bench.out)
    assert (bench.piped, bench.logged) == (b"one 2\n", [])


def test_lines_of_a_request(bench: Bench) -> None:
    about("me")
    print("one", 2, file=bench.out)
    bench.out.writelines(["three\n", "\n", "four"])
    print(" five", file=bench.out)
    assert [line[1:] for line in bench.logged] == [
        ("one 2", "stdout", 0),
        ("three", "stdout", 0),
        ("four five", "stdout", 0),
    ]
    assert bench.piped == b""


def test_an_unfinished_line_is_not_given_to_another_request(bench: Bench) -> None:
    about("me")
    print("mine", end="", file=bench.out)
    assert bench.logged == []
    about("you")
    print("yours", end="", file=bench.out)
    about("")
    print("nobody's", file=bench.out)
    assert [line[1] for line in bench.logged] == ["mine", "yours"]
    assert bench.piped == b"nobody's\n"


def test_it_is_a_file(bench: Bench) -> None:
    assert bench.out.fileno() == bench.writer
    assert bench.out.encoding == "utf-8"
    bench.out.buffer.write(b"bytes ")
    bench.out.write("half a character \ud800\n")
    assert bench.piped == b"bytes half a character \\ud800\n"
