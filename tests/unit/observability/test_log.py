"""Levels, streams, files and forms of the log."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nerite.config.options import LogOptions
from nerite.observability.log import Log
from nerite.observability.log_records import LogLevel, LogRecord, LogSink, LogTable

RECORD = re.compile(r'[EWI]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ ([\w.]+):(\d+)\] "(.*)"')


class Written:
    """A log with two files for streams, and what is in them."""

    def __init__(self, folder: Path) -> None:
        self.out, self.err = folder / "out", folder / "err"
        self.sinks = [LogSink.to_file(str(path)) for path in (self.out, self.err)]
        self.log = Log(*self.sinks)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    found = Written(tmp_path)
    yield found
    found.log.configure(LogOptions())
    for sink in found.sinks:
        sink.close()


def messages(path: Path) -> list[str]:
    found = [RECORD.fullmatch(line) for line in path.read_text().splitlines()]
    assert all(found)
    return [match[3] for match in found if match]


def test_streams_and_levels(written: Written) -> None:
    log = written.log
    log.info("i")
    log.warning("w")
    log.error("e")
    log.verbose(1, "v")
    assert messages(written.out) == ["i"]
    assert messages(written.err) == ["w", "e"]
    assert written.err.read_text()[0] == "W"


def test_the_place_is_that_of_the_caller(written: Written) -> None:
    line = test_the_place_is_that_of_the_caller.__code__.co_firstlineno
    written.log.verbose_level = 1
    written.log.info("a")
    written.log.verbose(1, "b")
    written.log.table(LogTable(["H"], []), "c")
    places = re.findall(r"(\w+\.py):(\d+)\]", written.out.read_text())
    assert places == [("test_log.py", str(line + number)) for number in (3, 4, 5)]
    assert f" {os.getpid()} " in written.out.read_text()


SWITCHES: list[tuple[str, LogLevel, Callable[[Log], None]]] = [
    ("info_enabled", LogLevel.INFO, lambda log: log.info("x")),
    ("warning_enabled", LogLevel.WARNING, lambda log: log.warning("x")),
    ("error_enabled", LogLevel.ERROR, lambda log: log.error("x")),
]


@pytest.mark.parametrize(("switch", "level", "call"), SWITCHES)
def test_a_level_can_be_switched_while_running(
    written: Written, switch: str, level: LogLevel, call: Callable[[Log], None]
) -> None:
    def lines() -> int:
        return len(messages(written.out) + messages(written.err))

    setattr(written.log, switch, False)
    call(written.log)
    assert not written.log.wants(level)
    assert lines() == 0
    setattr(written.log, switch, True)
    call(written.log)
    assert written.log.wants(level)
    assert lines() == 1


def test_verbosity(written: Written) -> None:
    written.log.verbose_level = 2
    for level in (1, 2, 3):
        written.log.verbose(level, str(level))
    assert messages(written.out) == ["1", "2"]
    assert written.log.wants(LogLevel.VERBOSE)
    written.log.info_enabled = False
    written.log.verbose(1, "information being off does not matter")
    assert len(messages(written.out)) == 3


def test_tables_are_information(written: Written) -> None:
    written.log.info_enabled = False
    written.log.table(LogTable(["B"], []))
    assert written.out.read_text() == ""
    written.log.info_enabled = True
    written.log.table(LogTable(["C"], [["d"]]))
    assert written.out.read_text().endswith("] \n+---+\n| C |\n+---+\n| d |\n+---+\n\n")


def test_configure(written: Written, tmp_path: Path) -> None:
    file = tmp_path / "file"
    log = written.log
    log.configure(LogOptions(3, info=False, warning=True, error=False, format="ISO8601", file=str(file)))
    assert (log.verbose_level, log.info_enabled, log.warning_enabled, log.error_enabled) == (3, False, True, False)
    assert (log.format, log.file) == ("ISO8601", str(file))
    log.info("i")
    log.warning("w")
    log.verbose(3, "v")
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ W \d+ test_log.py:\d+\] "w"\n'
        r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ test_log.py:\d+\] "v"\n',
        file.read_text(),
    )
    assert written.err.read_text() == ""
    log.configure(LogOptions())
    log.warning("back")
    assert messages(written.err) == ["back"]


def test_a_file_that_cannot_be_opened_changes_nothing(written: Written) -> None:
    with pytest.raises(OSError, match="No such file"):
        written.log.configure(LogOptions(info=False, file="/no/such/file"))
    assert written.log.info_enabled
    assert written.log.file == ""


def test_the_form_can_be_changed_while_running(written: Written) -> None:
    with pytest.raises(ValueError, match="xml"):
        written.log.set_format("xml")
    assert written.log.format == "default"
    written.log.set_format("json")
    written.log.info("hello", model="m", request_id="7")
    event = json.loads(written.out.read_text())
    assert (event["message"], event["model"], event["request_id"], event["level"]) == ("hello", "m", "7", "info")


def test_escaping_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "0")
    found = Written(tmp_path)
    found.log.info('a "b"')
    assert found.out.read_text().endswith('] a "b"\n')
    for sink in found.sinks:
        sink.close()


def test_relayed_records_keep_their_place_and_time(written: Written) -> None:
    record = LogRecord(LogLevel.WARNING, "x", "model.py", 12, 99, 0)
    written.log.relay(record)
    assert written.err.read_text() == 'W0101 00:00:00.000000 99 model.py:12] "x"\n'
    written.log.warning_enabled = False
    written.log.relay(record)
    written.log.relay(record._replace(level=LogLevel.VERBOSE))
    assert len(messages(written.err) + messages(written.out)) == 1
