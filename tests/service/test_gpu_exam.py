"""The exam on GPUs, rehearsed on processors: that its parts run and tell figures. How large these are is no matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cuda_machine import CudaMachine

pytestmark = pytest.mark.timeout(400)  # a minute and a half on a quiet machine: frameworks, servers and loads

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gpu_parts import PARTS  # noqa: E402

LEAST = {"machine": 7, "answers": 10, "served": 25, "cores": 12, "memory": 12}
"""Figures of each part that is rehearsed, without those that need a load generator which may be missing."""
LEFT_OUT = ("not rehearsed here: ", *(() if os.environ.get("CI") else ("wrk is not on", "h2load is not on")))
"""Why parts may leave something out. In CI, load generators have to be there."""


def exam(out: Path, *words: str, kind: str = "KIND_CPU", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_exam.py"), f"--kind={kind}", f"--out={out}", *words]
    within = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=350, env=within, check=False)


def result(out: Path, part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{part}.json").read_text())
    return found


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exam")
    done = exam(out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_rehearsed(rehearsal: Path, part: str) -> None:
    found = result(rehearsal, part)
    if part not in LEAST:
        why = PARTS[part].not_yet or "not rehearsed here: it needs a card"
        assert (found["outcome"], found["why"]) == ("skipped", why)
        return
    assert (found["outcome"], found["why"], found["errors"]) == ("ok", "", [])
    assert found["kind"] == "KIND_CPU"
    assert found["versions"]["torch"]
    assert "sources " in found["revision"]
    assert len(found["figures"]) >= LEAST[part]
    assert [gap for gap in found["skipped"] if not gap["why"].startswith(LEFT_OUT)] == []


@pytest.mark.parametrize("part", ["machine", "answers", "memory"])
def test_answers_are_right(rehearsal: Path, part: str) -> None:
    """Times are in seconds, and no matter here."""
    figures = [figure for figure in result(rehearsal, part)["figures"] if figure["unit"] != "s"]
    assert [figure["name"] for figure in figures if figure["met"] is False] == []


def test_the_device_paths_with_a_stand_in_for_cuda(tmp_path: Path) -> None:
    """What needs no card of this part, besides the memory that the stand-in has: all as on a card."""
    machine = CudaMachine(tmp_path, STAND_IN_CUDA_FRAMEWORKS="1")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    within = {**machine.environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = exam(tmp_path / "out", "--only", "devices", kind="KIND_GPU", **within)
    assert done.returncode == 0, done.stdout + done.stderr
    found = result(tmp_path / "out", "devices")
    assert (found["outcome"], found["cards"], found["skipped"]) == ("ok", ["Model 0", "Model 1"], [])
    assert len(found["figures"]) >= 50
    assert [figure["name"] for figure in found["figures"] if figure["met"] is False] == []


@pytest.mark.parametrize(
    ("program", "seconds", "why"),
    [("exec sleep 1000", 15, "it takes longer than "), ("kill -9 $PPID", 100, "its process ended with status -9")],
)
def test_a_part_that_hangs_or_crashes_keeps_what_it_had(tmp_path: Path, program: str, seconds: int, why: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "wrk").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "bin" / "wrk").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = exam(tmp_path, "--only", "machine", "engine", f"--seconds={seconds}", PATH=path, TMPDIR=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    found = result(tmp_path, "machine")
    assert (found["outcome"], found["errors"]) == ("cut", [])
    assert found["why"].startswith(why)
    assert [figure["name"] for figure in found["figures"]][-1] == "difference of an answer to tritonclient.grpc"
    assert result(tmp_path, "engine")["why"] == PARTS["engine"].not_yet
    assert [command for command in commands() if str(tmp_path) in command] == []


def commands() -> Iterator[str]:
    """Yield the command lines of all processes."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                yield (process / "cmdline").read_bytes().decode(errors="replace")
