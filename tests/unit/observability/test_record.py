"""The three forms of a record."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.observability.log_records import JsonFormatter, LogLevel, LogRecord, LogTable, TextFormatter, bounded

TIME = 1_763_643_272_269_120_999  # 2025-11-20 12:54:32.269120999 UTC


def record(
    message: str = "hello", level: LogLevel = LogLevel.INFO, table: LogTable | None = None, **extras: object
) -> LogRecord:
    return LogRecord(level, message, "server.py", 604, 7480, TIME, table, extras)


@pytest.mark.parametrize(
    ("level", "letter"), [(LogLevel.INFO, "I"), (LogLevel.VERBOSE, "I"), (LogLevel.WARNING, "W"), (LogLevel.ERROR, "E")]
)
def test_the_preamble(level: LogLevel, letter: str) -> None:
    found = record(level=level)
    assert TextFormatter().format(found) == f'{letter}1120 12:54:32.269120 7480 server.py:604] "hello"'
    assert TextFormatter(iso8601=True).format(found) == f'2025-11-20T12:54:32Z {letter} 7480 server.py:604] "hello"'


@pytest.mark.parametrize(
    ("message", "written"),
    [
        ("", '""'),
        ("a\nb\tc\rd", r'"a\nb\tc\rd"'),
        ('say "hi" \\ /', r'"say \"hi\" \\ /"'),
        ("\x1b[31m\x00\x7f", r'"\u001B[31m\u0000\u007F"'),
        ("\x80\x9b\x9f\xa0", '"\\u0080\\u009B\\u009F\xa0"'),
        ("grüße 世界", '"grüße 世界"'),
        ("\b\f", r'"\b\f"'),
    ],
)
def test_a_message_is_a_json_string(message: str, written: str) -> None:
    assert TextFormatter().format(record(message)).endswith(f"] {written}")


@given(st.text())
def test_a_message_never_takes_a_second_line_and_comes_back(message: str) -> None:
    line = TextFormatter().format(record(message))
    assert "\n" not in line and "\r" not in line
    assert json.loads(line.partition("] ")[2]) == message


def test_without_escaping() -> None:
    assert TextFormatter(escape=False).format(record('a\n"b"')).endswith('] a\n"b"')


def test_the_instance_stands_before_the_message() -> None:
    assert TextFormatter().format(record("x", instance="m_0", model="m")).endswith('] "[m_0] x"')


def test_the_id_of_the_request_stands_before_the_message() -> None:
    assert TextFormatter().format(record("x", request_id="me")).endswith('] "[request id: me] x"')
    both = record("x", instance="m_0", request_id="me")
    assert TextFormatter().format(both).endswith('] "[m_0] [request id: me] x"')


def test_a_table_stands_on_lines_of_its_own() -> None:
    table = LogTable(["Model"], [["a"]])
    box = "\n+-------+\n| Model |\n+-------+\n| a     |\n+-------+\n"
    assert TextFormatter().format(record("", table=table)).endswith(f"604] {box}")
    assert TextFormatter().format(record("Models", table=table)).endswith(f'604] "Models"{box}')
    assert max(map(len, TextFormatter(width=8).format(record("", table=table)).split("\n")[1:])) == 8


def test_a_table_cannot_command_a_terminal() -> None:
    table = LogTable(["Model"], [["a\x1b[31m\x9b\nb"]])
    text = TextFormatter().format(record("", table=table))
    assert "\x1b" not in text and "\x9b" not in text
    assert r"| a\u001B[31m\u009B |" in text.split("\n")
    assert "\x1b" in TextFormatter(escape=False).format(record("", table=table))


def test_what_is_long_is_cut() -> None:
    plain = record("x" * 65536, model="m" * 1024, count=3)
    assert bounded(plain) is plain
    cut = bounded(record("x" * 60_000_000, model="m" * 5_000, count=3))
    assert cut.message.startswith("x" * 65536 + "…") and len(cut.message) < 65536 + 50
    assert len(str(cut.extras["model"])) == 1024
    assert cut.extras["count"] == 3


def test_the_second_moves_on() -> None:
    formatter = TextFormatter()
    first, second = (record()._replace(time_ns=TIME + step) for step in (0, 1_000_000_000))
    assert [formatter.format(r)[6:14] for r in (first, second, first)] == ["12:54:32", "12:54:33", "12:54:32"]


def test_json() -> None:
    line = JsonFormatter().format(record("a\nb", LogLevel.VERBOSE, request_id="7", path=object, pid="no"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2025-11-20T12:54:32.269120Z",
        "level": "verbose",
        "message": "a\nb",
        "file": "server.py",
        "line": 604,
        "pid": 7480,
        "request_id": "7",
        "path": "<class 'object'>",
    }


def test_json_has_no_control_characters() -> None:
    line = JsonFormatter().format(record("a\x7f\x9b", model="\x1b"))
    assert line.isprintable()
    assert (json.loads(line)["message"], json.loads(line)["model"]) == ("a\x7f\x9b", "\x1b")


def test_json_tables_are_objects() -> None:
    table = LogTable(["Model", "Version"], [["a", "1"], ["b", "2"]])
    found = json.loads(JsonFormatter().format(record("Models", table=table)))
    assert found["table"] == [{"model": "a", "version": "1"}, {"model": "b", "version": "2"}]
