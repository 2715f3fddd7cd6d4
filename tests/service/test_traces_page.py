"""The page about traces says what the server does, and its commands lead where it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from collector import collecting
from pages import Page, rows, run
from serving import IDENTITY, python_model, serving

PAGE = "docs/traces.md"
BODY = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}


def flags(command: str, **other: str) -> list[str]:
    """The flags of a command of the page; ``other`` are values in the place of its own."""
    for before, after in other.items():
        assert f"{before}=" in command
        command = re.sub(rf"{before}=\S+", f"{before}={after}", command)
    return command.split()[3:]


def test_a_file_and_what_is_in_it(tmp_path: Path) -> None:
    command = Page(PAGE).block("triton,file=")
    python_model(tmp_path / "models", "m", IDENTITY)
    given = flags(command, file=str(tmp_path / "trace"), rate="1")
    with serving(tmp_path / "models", tmp_path / "log", *given) as server:
        server.ask("POST", "/v2/models/m/infer", BODY)
        told = set(server.json("GET", "/v2/trace/setting"))
    settings = {name.strip("`") for name in rows(PAGE, "setting")}
    assert told - {"trace_file", "trace_mode"} == settings
    records = json.loads((tmp_path / "trace").read_text())
    names = {record["timestamps"][0]["name"] for record in records if "timestamps" in record}
    assert {name for each in rows(PAGE, "name") for name in re.findall(r"[A-Z]+_[A-Z_]+", each)} == names


@pytest.mark.parametrize("rate", [100, 0])
def test_spans(tmp_path: Path, rate: int) -> None:
    sampled, others = (text for language, text in Page(PAGE).blocks if language == "sh")
    python_model(tmp_path / "models", "m", IDENTITY)
    with collecting() as collector:
        environment = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.url}
        command, *rest = (sampled if rate else others).splitlines()
        given = flags(command) if rest else flags(command, rate="1")
        with serving(tmp_path / "models", tmp_path / "log", *given, environment=environment) as server:
            server.ask("POST", "/v2/models/m/infer", BODY)
            for line in rest:
                run(line, server)
        names = [span.name for span in collector.spans]
        assert names == ["InferRequest", "m", "compute"]
        told = {name for span in collector.spans for name in span.attributes}
        documented = {
            name for row in rows(PAGE, "span").values() for name in re.findall("`([a-z_.]+)`", row["attributes"])
        }
        assert told <= documented
        if rest:
            assert f"{collector.spans[0].trace}-{collector.spans[0].parent}" in rest[0]


def test_a_model_that_notes_something_itself(tmp_path: Path) -> None:
    model = python_model(tmp_path / "models", "m", IDENTITY)
    (model / "1" / "model.py").write_text(Page(PAGE).block("start_as_current_span"))
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert server.infer("m", [2.0]) == [4.0]
