"""``nerite doctor`` on this machine, as docs/doctor.md shows it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from nerite.tools import doctor as doctor_command
from nerite.tools import doctor_machine
from pages import Page, rows
from serving import IDENTITY, NERITE, python_model

PAGE = Page("docs/doctor.md")


def test_the_page(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY)
    command = PAGE.block("--json").split()
    # All there is: also every installed framework is imported, which takes most of the time.
    done = subprocess.run([str(NERITE), *command[1:]], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert {each["part"] for each in found} == set(rows("docs/doctor.md", "part"))
    assert {each["level"] for each in found} <= {"ok", "note", "warning", "problem"}
    assert all(set(each) == {"part", "level", "text", "remedy"} for each in found)
    (repository,) = [each["text"] for each in found if each["part"] == "repositories"]
    assert repository == "1 model without mistakes"


def test_no_problems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor_machine, "broken", lambda packages: {})
    assert doctor_command.run([]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[-1].startswith("no problems, ")


def test_a_port_that_is_taken_and_a_repository_with_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_machine, "broken", lambda packages: {})
    for number in range(7):
        python_model(tmp_path / "models", f"m{number}", IDENTITY, 'backend: "python" max_batch_size: "many"')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status = doctor_command.run(["--grpc-port", str(port), "--http-port", "0", str(tmp_path / "models"), "--json"])
    printed = capsys.readouterr()
    assert printed.err == ""
    found = json.loads(printed.out)
    (busy,) = [each for each in found if each["part"] == "ports" and str(port) in each["text"]]
    assert busy["level"] == "warning"
    assert busy["text"].endswith(f"(pid {os.getpid()})")
    wrong = [each for each in found if each["level"] == "problem"]
    assert (status, len(wrong)) == (1, 6)
    assert wrong[0]["text"].startswith(f"{tmp_path}/models/m0/config.pbtxt:1:")
    assert wrong[-1]["remedy"] == f"nerite check {tmp_path}/models"
