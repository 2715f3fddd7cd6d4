"""Traces of a real server: switched on and off while it serves, of one model, and written at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving import IDENTITY, Serving, eventually, python_model, serving


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("one", "other"):
        python_model(tmp_path / "models", name, IDENTITY)
    return tmp_path / "models"


def models(file: Path) -> list[str]:
    """The models of the traces in a file, in the order in which these were complete."""
    records: list[dict[str, Any]] = json.loads(file.read_text())
    return [record["model_name"] for record in records if "model_name" in record]


def ask(server: Serving, *names: str) -> None:
    for name in names:
        server.infer(name, [1.0])


def test_on_and_off_while_it_serves(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    with serving(repository, tmp_path / "log", f"--trace-config=triton,file={file}", "--trace-config=rate=1") as server:
        ask(server, "one", "other")
        server.json("POST", "/v2/models/one/trace/setting", {"trace_level": ["TIMESTAMPS"]})
        ask(server, "one", "other", "one")
        server.json("POST", "/v2/models/one/trace/setting", {"trace_level": None})
        eventually(file.exists, what="the traces so far")
        assert models(file) == ["one", "one"]
        ask(server, "one", "other")
        server.json("POST", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"], "trace_rate": "2"})
        ask(server, "one", "other", "one", "other")
        assert models(file) == ["one", "one"]
    assert models(file) == ["one", "one", "other", "other"]


def test_a_model_that_is_loaded_again_is_traced_again(repository: Path, tmp_path: Path) -> None:
    flags = (
        f"--trace-config=triton,file={tmp_path / 'trace'}",
        "--trace-config=rate=1",
        "--model-control-mode=explicit",
    )
    with serving(repository, tmp_path / "log", *flags, "--load-model=one") as server:
        server.json("POST", "/v2/models/one/trace/setting", {"trace_level": ["TIMESTAMPS"]})
        server.ask("POST", "/v2/repository/models/one/unload")
        eventually(lambda: not server.ready("one"))
        assert server.ask("GET", "/v2/models/one/trace/setting")[0] == 400
        server.ask("POST", "/v2/repository/models/one/load")
        ask(server, "one")
    assert models(tmp_path / "trace") == ["one"]


@pytest.mark.parametrize(("mode", "level"), [("triton", "TIMESTAMPS"), ("opentelemetry", "TENSORS")])
def test_levels_that_lead_to_nothing_are_said(repository: Path, tmp_path: Path, mode: str, level: str) -> None:
    flags = (f"--trace-config=mode={mode}", f"--trace-config=level={level}", "--trace-config=rate=1")
    with serving(repository, tmp_path / "log", *flags) as server:
        ask(server, "one")
        assert "nothing is traced: " in server.text
