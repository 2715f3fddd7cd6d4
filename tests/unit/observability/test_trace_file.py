"""The files that traces are written to: always JSON, whatever came in between."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from nerite.observability import tracing as module
from nerite.observability.tracing import TraceFile


def trace(number: int) -> bytes:
    return b'{"id":%d,"model_name":"m"},{"id":%d,"timestamps":[]}' % (number, number)


def ids(path: Path) -> list[int]:
    return [record["id"] for record in json.loads(path.read_text()) if "model_name" in record]


def files(folder: Path) -> dict[str, list[int]]:
    return {path.name: ids(path) for path in sorted(folder.iterdir())}


def test_a_file_for_each_so_many(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "t"))
    for number in range(5):
        file.add(trace(number), 2, last=False)
    assert files(tmp_path) == {"t.0": [0, 1], "t.1": [2, 3]}
    file.write()
    file.write()
    assert files(tmp_path) == {"t.0": [0, 1], "t.1": [2, 3], "t.2": [4]}


def test_one_file_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    file = TraceFile(str(tmp_path / "t"))
    (tmp_path / "t").write_text("of an earlier run")
    for number in range(7):
        file.add(trace(number), 0, last=False)
    assert files(tmp_path) == {"t": [0, 1, 2, 3, 4, 5]}
    file.write()
    assert files(tmp_path) == {"t": [0, 1, 2, 3, 4, 5, 6]}


def test_the_last_that_was_asked_for_is_not_waited_for(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "t"))
    file.add(trace(0), 0, last=False)
    file.add(trace(1), 0, last=True)
    assert files(tmp_path) == {"t.0": [0, 1]}


def test_nothing_is_written_of_nothing(tmp_path: Path) -> None:
    TraceFile(str(tmp_path / "t")).write()
    assert files(tmp_path) == {}


def test_a_file_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = TraceFile(str(tmp_path / "nowhere" / "t"))
    file.add(trace(0), 1, last=False)
    said = capfd.readouterr().err
    assert "cannot write 1 traces" in said and "No such file or directory" in said
    assert "--trace-config triton,file" in said


def test_a_full_disk_loses_traces_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 2)
    room = 100

    class Small(module.FileIO):
        def write(self, data: object) -> int:
            left = room - self.tell()
            if left <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(memoryview(data)[:left])  # type: ignore[arg-type]

    real = Path.open

    def opened(path: Path, mode: str = "r", *how: Any, **more: Any) -> Any:
        return Small(path, mode) if "b" in mode else real(path, mode, *how, **more)

    monkeypatch.setattr(Path, "open", opened)
    file = TraceFile(str(tmp_path / "t"))
    numbered = TraceFile(str(tmp_path / "n"))

    def add(first: int) -> None:
        for number in (first, first + 1):
            file.add(trace(number), 0, last=False)
            numbered.add(trace(number), 2, last=False)

    add(0)
    assert files(tmp_path) == {}
    room = 150
    add(2)
    add(4)
    assert files(tmp_path) == {"n.1": [2, 3], "n.2": [4, 5], "t": [2, 3]}
    room = 10_000
    add(6)
    assert files(tmp_path) == {"n.1": [2, 3], "n.2": [4, 5], "n.3": [6, 7], "t": [2, 3, 6, 7]}
    said = capfd.readouterr().err
    assert (
        f"cannot write 2 traces, which are lost: No space left on device: '{tmp_path}/t' (free up space there)" in said
    )
    (tmp_path / "t").unlink()
    add(8)
    assert ids(tmp_path / "t") == [8, 9]
