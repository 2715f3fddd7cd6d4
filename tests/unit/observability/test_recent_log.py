"""The last records of the log in memory."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from nerite.config.options import LogOptions
from nerite.observability.log import Log
from nerite.observability.log_records import LogLevel, LogRecord, LogSink, LogTable
from nerite.observability.recent_log import RecentLog, RecentRecord


def record(message: str, level: LogLevel = LogLevel.INFO, table: LogTable | None = None, **extras: object) -> LogRecord:
    return LogRecord(level, message, "a.py", 7, 42, 1_500_000_000, table, extras)


def texts(log: RecentLog, **asked: Any) -> list[str]:
    return [each.text for each in log.read(**asked)[1]]


def test_what_is_told_of_a_record() -> None:
    log = RecentLog()
    log.add(record("hello", LogLevel.ERROR, instance="a_0_0", request_id="r", peer="nobody"))
    count, (only,) = log.read()[0], log.read()[1]
    assert count == 1
    assert only.to_json() == {
        "number": 1,
        "time": 1.5,
        "level": "error",
        "message": "hello",
        "source": "a.py:7",
        "pid": 42,
        "instance": "a_0_0",
        "request_id": "r",
    }


def test_what_utf_8_cannot_encode_is_escaped() -> None:
    log = RecentLog()
    log.add(record("\udcff", instance="\udc80"))
    (only,) = log.read()[1]
    assert json.dumps(only.to_json(), ensure_ascii=False).encode()


def test_a_table_is_drawn() -> None:
    log = RecentLog()
    log.add(record("models", table=LogTable(("Model", "State"), [("a", "READY")])))
    assert texts(log)[0].startswith("models\n+-") and "| a " in texts(log)[0]


def test_those_that_are_known_are_left_out() -> None:
    log = RecentLog()
    for number in range(4):
        log.add(record(str(number)))
    assert (log.read(after=2)[0], texts(log, after=2)) == (4, ["2", "3"])


@pytest.mark.parametrize(("level", "shown"), [("error", "E"), ("warning", "EW"), ("info", "EWI"), ("verbose", "EWIV")])
def test_levels(level: str, shown: str) -> None:
    log = RecentLog()
    for each in LogLevel:
        log.add(record(each.value, each))
    assert "".join(texts(log, level=level)) == shown


def test_no_number_of_others_takes_the_room_of_errors() -> None:
    log = RecentLog(most=10)
    log.add(record("the error", LogLevel.ERROR))
    for number in range(100):
        log.add(record(str(number)))
    assert texts(log) == ["the error", *map(str, range(90, 100))]


def test_the_text_is_bounded() -> None:
    log = RecentLog()
    for _ in range(200):
        log.add(record("x" * 60_000))
    kept = texts(log)
    assert 10 < len(kept) < 200
    assert sum(map(len, kept)) <= 1 << 20


@pytest.mark.parametrize(
    ("concerned", "other"),
    [
        (record("", model="add"), record("", model="adder")),
        (record("", instance="add_0_1"), record("", instance="adder_0_1")),
        (record("", instance="add_auto_complete"), record("", instance="added_auto_complete")),
        (record("", instance="own name"), record("", instance="other name")),
        (record("failed to load 'add' version 1: no"), record("failed to load 'adder' version 1: no")),
        (record("loading: add:1"), record("loading: adder:1")),
        (record('no "add" here'), record("please add it")),
    ],
)
def test_records_about_a_model(concerned: LogRecord, other: LogRecord) -> None:
    def concerns(each: LogRecord) -> bool:
        return RecentRecord(1, each, each.message).concerns("add", {"own name"})

    assert (concerns(concerned), concerns(other)) == (True, False)


def test_names_are_taken_as_they_are() -> None:
    assert not RecentRecord(1, record(""), "'axb'").concerns("a.b", ())


def test_what_is_written_is_kept() -> None:
    with open(os.devnull, "wb") as nothing:
        log = Log(LogSink(nothing.fileno()), LogSink(nothing.fileno()))
        log.configure(LogOptions(info=False))
        log.warning("before")
        log.recent = RecentLog()
        log.info("off")
        log.error("seen", model="a")
        for _ in range(100):
            log.error("again and again")
    assert texts(log.recent) == ["seen", *["again and again"] * 10]
