"""Lines arrive whole, and a sink never raises."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from nerite.observability.log_records import LogSink


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    sink = LogSink.to_file(str(path))
    sink.write("one")
    # A log that was truncated by a rotation goes on at its new end.
    assert path.read_text() == "before\none\n"
    os.truncate(path, 0)
    sink.write("grüße")
    sink.close()
    assert path.read_text(encoding="utf-8") == "grüße\n"


def test_a_file_that_cannot_be_opened() -> None:
    with pytest.raises(OSError, match="No such file"):
        LogSink.to_file("/no/such/file")


def test_what_utf8_cannot_hold_is_escaped(tmp_path: Path) -> None:
    sink = LogSink.to_file(str(tmp_path / "log"))
    sink.write("a\udc80b")
    sink.close()
    assert (tmp_path / "log").read_text() == "a\\udc80b\n"


def test_a_closed_sink_drops_lines_and_leaves_other_files_alone(tmp_path: Path) -> None:
    sink = LogSink.to_file(str(tmp_path / "log"))
    sink.close()
    sink.close()
    with (tmp_path / "other").open("w"):
        sink.write("lost")
    assert (tmp_path / "other").read_text() == ""


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    LogSink(writer).write("lost")
    os.close(writer)


def test_long_lines_from_many_threads_are_not_mixed_even_on_a_slow_non_blocking_pipe() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    sink = LogSink(writer)
    length = 100_000  # more than a pipe takes at once
    threads = [threading.Thread(target=sink.write, args=(str(n) * length,)) for n in range(4)]
    for thread in threads:
        thread.start()
    got = b""
    while len(got) < 4 * (length + 1):
        got += os.read(reader, 4096)
    for thread in threads:
        thread.join()
    assert sorted(got.split()) == [str(n).encode() * length for n in range(4)]
    os.close(reader)
    os.close(writer)
