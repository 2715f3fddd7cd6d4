"""docs/ensembles.md: its ensemble runs as written, fails as written, and goes as written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pages import Page, run
from serving import Serving, eventually, serving


@pytest.fixture
def models(tmp_path: Path) -> Path:
    python = Page("docs/python-models.md")
    for page, file in (
        (python, "models/doubler/1/model.py"),
        (python, "models/doubler/config.pbtxt"),
        (Page("docs/ensembles.md"), "models/quadruple/config.pbtxt"),
    ):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.block(f"# {file}\n"))
    (tmp_path / "models" / "quadruple" / "1").mkdir()
    return tmp_path / "models"


def ask(server: Serving, *numbers: float) -> tuple[int, dict[str, object]]:
    tensor = {"name": "NUMBER", "shape": [1, len(numbers)], "datatype": "FP32", "data": numbers}
    status, _, body = server.ask("POST", "/v2/models/quadruple/infer", {"inputs": [tensor]})
    return status, json.loads(body)


def test_it_runs_and_goes(models: Path, tmp_path: Path) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=quadruple")
    with serving(models, tmp_path / "log", *flags) as server:
        answer = ask(server, 1.5, 2.0)[1]
        assert [output["data"] for output in answer["outputs"]] == [[6.0, 8.0]]  # type: ignore[attr-defined]
        run(f"nerite client --url {server.http} unload quadruple --dependents")
        eventually(lambda: server.state("doubler") == server.state("quadruple") == "UNAVAILABLE")


def test_it_fails_as_the_page_says(models: Path, tmp_path: Path) -> None:
    source = models / "doubler" / "1" / "model.py"
    refusing = """
            if (value > 5).any():
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("too large")))
                continue
            output ="""
    source.write_text(source.read_text().replace("\n            output =", refusing))
    with serving(models, tmp_path / "log") as server:
        assert ask(server, 3, 3, 3, 3)[1] == {
            "error": Page("docs/ensembles.md").block("in ensemble 'quadruple'").rstrip()
        }


def test_a_mistake_is_told_as_the_page_says(models: Path, tmp_path: Path) -> None:
    config = models / "quadruple" / "config.pbtxt"
    config.write_text(config.read_text().replace('"RESULT" data_type: TYPE_FP32', '"RESULT" data_type: TYPE_INT8'))
    first, second = Page("docs/ensembles.md").block("models/quadruple/config.pbtxt:").splitlines()
    flags = ("--exit-on-error=false", "--strict-readiness=false")
    with serving(models, tmp_path / "log", *flags) as server:
        assert first.removesuffix("…").removeprefix("models") in server.text
        assert second.strip() in server.text
