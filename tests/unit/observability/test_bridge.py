"""What others say arrives in the log."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from doubles import request
from nerite.core.request import at_hand
from nerite.observability.log import Log, LogHandler, install_logging
from nerite.observability.log_records import LogSink


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def log(path: Path) -> Iterator[Log]:
    sink = LogSink.to_file(str(path))
    yield Log(sink, sink)
    sink.close()


@pytest.fixture
def installed(log: Log) -> Iterator[Log]:
    root, ours = logging.getLogger(), logging.getLogger("nerite")
    before = root.handlers[:], root.level, ours.level
    # Handlers that a test runner put there are not ours to close.
    root.handlers = []
    install_logging(log)
    yield log
    logging.captureWarnings(False)
    root.handlers, root.level = before[0], before[1]
    ours.setLevel(before[2])


def test_our_own_rooms(installed: Log, path: Path) -> None:
    logger = logging.getLogger("nerite.repository")
    logger.info("loading: %s:%d", "m", 1)
    logger.debug("a detail")
    installed.verbose_level = 1
    logger.debug("a wanted detail")
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    assert lines[0][0] == "I"
    assert lines[0].endswith('] "loading: m:1"')
    assert " test_bridge.py:" in lines[0]
    assert lines[1].endswith('] "a wanted detail"')


def test_what_is_printed(installed: Log, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Once more: pytest has streams of its own for each phase of a test.
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    install_logging(installed)
    print("from somewhere")
    print("wrong", file=sys.stderr)
    first, second = path.read_text().splitlines()
    assert first.endswith(' stdout:0] "from somewhere"')
    assert second.endswith(' stderr:0] "wrong"')


def test_what_models_in_this_process_say(installed: Log, path: Path) -> None:
    logging.getLogger("triton_python_backend_utils").info("by the logger")
    logging.getLogger("mine").info("before")
    before = at_hand.set([request(1, id="me")])
    logging.getLogger("mine").info("meanwhile")
    at_hand.reset(before)
    first, second = path.read_text().splitlines()
    assert first.endswith('] "by the logger"')
    assert second.endswith('] "[request id: me] mine: meanwhile"')


def test_libraries(installed: Log, path: Path) -> None:
    logger = logging.getLogger("some.library")
    logger.info("chatter")
    logger.warning("careful")
    assert path.read_text()[0] == "W"
    assert path.read_text().endswith('] "some.library: careful"\n')


def test_settings_apply(installed: Log, path: Path) -> None:
    installed.error_enabled = installed.info_enabled = False
    logging.getLogger("nerite.x").error("no")
    logging.getLogger("nerite.x").info("no")
    assert path.read_text() == ""


def test_tracebacks_stay_on_the_line(installed: Log, path: Path) -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("nerite.execution").exception("failed")
    (line,) = path.read_text().splitlines()
    assert line.startswith("E")
    assert '] "failed\\nTraceback (most recent call last):\\n' in line
    assert line.endswith('RuntimeError: boom"')


def test_tracebacks_and_messages_of_any_length_are_cut(installed: Log, path: Path) -> None:
    try:
        raise RuntimeError("x" * 60_000_000)
    except RuntimeError:
        logging.getLogger("nerite.execution").exception("failed")
    logging.getLogger("nerite.execution").error("y" * 60_000_000)
    one, other = path.read_text().splitlines()
    assert len(one) < 40_000 and "RuntimeError: xxx" in one
    assert len(other) < 70_000 and other.endswith('more characters)"')


def test_warnings(installed: Log, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert "py.warnings: " in path.read_text()
    assert "DeprecationWarning: old" in path.read_text()


def test_a_record_that_cannot_be_formatted_is_not_raised(log: Log, path: Path) -> None:
    record = logging.LogRecord("nerite.x", logging.WARNING, __file__, 1, "%d", ("no number",), None)
    LogHandler(log).handle(record)
    assert path.read_text().endswith(""" "%d (not formatted: ('no number',))"\n""")


@pytest.mark.parametrize(
    ("level", "letter"), [("INFO", "I"), ("WARNING", "W"), ("ERROR", "E"), ("CRITICAL", "E"), ("STDOUT", "I")]
)
def test_worker_lines(log: Log, path: Path, level: str, letter: str) -> None:
    log.worker_line("m_0", level, 'said "x"')
    log.worker_line("m_0", level, "y", "model.py", 7)
    first, second = path.read_text().splitlines()
    assert first[0] == letter
    assert first.endswith(r' worker:0] "[m_0] said \"x\""')
    assert second.endswith(' model.py:7] "[m_0] y"')


def test_worker_lines_in_json(log: Log, path: Path) -> None:
    log.set_format("json")
    log.worker_line("m_0", "INFO", "x")
    assert json.loads(path.read_text())["instance"] == "m_0"
    log.info_enabled = False
    log.worker_line("m_0", "INFO", "x")
    assert len(path.read_text().splitlines()) == 1
