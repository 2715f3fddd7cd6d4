"""docs/batches.md: its file is run by its commands and by the client of OpenAI."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_batches import UPPER
from test_openai_api import SIMPLE

from nerite.batches import metrics
from nerite.cluster.cluster_file import parse_cluster
from nerite.cluster.settings import RouterSettings
from pages import ROOT, Page, run
from serving import NERITE, Serving, python_model, serving

PAGE = Page("docs/batches.md")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("page")
    python_model(folder / "models", "parrot", UPPER, SIMPLE)
    program, verb, repository, flag = shlex.split(PAGE.block("nerite serve"))
    assert (program, verb, repository) == ("nerite", "serve", "models")
    with serving(folder / "models", folder / "log", flag.replace("batches.db", f"{folder}/batches.db")) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "questions.jsonl").write_text(PAGE.block('"custom_id": "q-1"'))
    return tmp_path


def test_the_command(server: Serving, folder: Path) -> None:
    command = PAGE.block("nerite batch run").replace("nerite batch run", "nerite batch run --url localhost:8000")
    assert run(command, server, folder) == PAGE.block("2 of 2")
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    texts = [answer["response"]["body"]["choices"][0]["text"] for answer in answers]
    assert texts == ["PRETTY POLLY", "ONE TWO THREE"]
    assert not (folder / "answers.jsonl.batch").exists()
    listed = run([str(NERITE), "batch", "list", "--url", "localhost:8000"], server)
    assert "completed" in listed
    assert "/v1/completions" in listed


def test_the_settings_of_a_router_are_valid() -> None:
    text = PAGE.block("batch-lease").replace("# batch", "batch") + '[[pool]]\nname = "main"\nmembers = ["h:1"]\n'
    found = parse_cluster(text).router
    default = RouterSettings()
    assert (found.batches, found.batch_files) == ("batches.db", "batch-files")
    for name in ("batch_concurrency", "batch_storage_bytes", "batch_lease"):
        assert getattr(found, name) == getattr(default, name)


def test_an_interrupted_run_is_taken_up_again(server: Serving, folder: Path) -> None:
    command = [str(NERITE), "batch", "run", "questions.jsonl", "-o", "a.jsonl", "--url", "localhost:8000"]
    made = json.loads(server.ask("GET", "/v1/batches")[2])["data"]
    if not made:
        run(command, server, folder)
        made = json.loads(server.ask("GET", "/v1/batches")[2])["data"]
    digest = hashlib.sha256((folder / "questions.jsonl").read_bytes()).hexdigest()
    state = folder / "a.jsonl.batch"
    state.write_text(json.dumps({"batch": made[0]["id"], "input_sha256": digest}))
    assert f"Taking up batch {made[0]['id']} again" in run(command, server, folder)
    assert len(json.loads(server.ask("GET", "/v1/batches")[2])["data"]) == len(made)
    state.write_text(json.dumps({"batch": made[0]["id"], "input_sha256": "other"}))
    with pytest.raises(AssertionError, match="has changed since batch"):
        run(command, server, folder)


def test_the_client_of_openai(server: Serving, folder: Path) -> None:
    assert run([sys.executable, "-c", PAGE.block("import openai")], server, folder) == "validating\n"


def test_every_metric_is_on_the_page() -> None:
    text = (ROOT / "docs" / "batches.md").read_text()
    for table in (metrics.RUNNER, metrics.OPEN):
        for metric in table.metrics:
            assert f"`{metric.name}`" in text, metric.name
