"""The README is run: each command and each block of code, in order, as a newcomer would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nerite.client import Client
from pages import ROOT, Page, run
from serving import PATIENCE, Serving, served, serving

README = Page("README.md")


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """What ``make serve`` starts."""
    subprocess.run([sys.executable, ROOT / "examples" / "build.py"], check=True, timeout=PATIENCE)
    with serving(ROOT / "examples" / "models", tmp_path_factory.mktemp("readme") / "log") as server:
        yield server


def test_every_block_is_tested_here() -> None:
    known = (
        "make serve",
        "curl localhost",
        "import tritonclient.http",
        "nerite.serve(double)",
        "class TritonPythonModel",
        "nerite check models",
    )
    assert len(README.blocks) == len(known)
    for beginning in known:
        README.block(beginning)


def test_make_targets_exist() -> None:
    for line in README.block("make serve").strip().splitlines():
        run(["make", "--dry-run", *line.partition("#")[0].split()[1:]])


def test_make_says_how_nerite_is_called() -> None:
    said = ". .venv/bin/activate"
    assert said in run(["make", "--dry-run", "serve"])
    assert said in (ROOT / "README.md").read_text()


def test_curl(examples: Serving) -> None:
    answer = run(README.block("curl localhost"), examples)
    assert '"model_name":"scaler","model_version":"2"' in answer


def test_client(examples: Serving) -> None:
    answer = run([sys.executable, "-c", README.block("import tritonclient.http")], examples)
    assert answer.startswith("[0.  ")


def test_a_function(tmp_path: Path) -> None:
    ports = "http_port=0, grpc_port=0, metrics_port=0"
    program = README.block("nerite.serve(double)").replace("serve(double)", f"serve(double, {ports})")
    (tmp_path / "double.py").write_text(program)
    with served([sys.executable, "double.py"], tmp_path / "log") as running, Client(running.http) as client:
        assert client.infer("double", {"x": [[1.0]]})["output"].tolist() == [[2.0]]


def test_own_model(tmp_path: Path) -> None:
    target = tmp_path / "models" / "double" / "1" / "model.py"
    target.parent.mkdir(parents=True)
    target.write_text(README.block("class TritonPythonModel"))
    check, serve = README.block("nerite check models").strip().splitlines()
    run(check, cwd=tmp_path)
    assert serve == "nerite serve models"
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert server.infer("double", [1.0, 2.5], name="x") == [2.0, 5.0]
        assert "Nerite" in server.text
        assert f"curl http://{server.http}/v2/models/double/infer" in server.text


@pytest.mark.parametrize("client", ["infer_curl.sh", "infer_http.py", "infer_grpc.py", "infer_plain.py"])
@pytest.mark.parametrize("digit", ["seven", "three"])
def test_example_clients(examples: Serving, client: str, digit: str) -> None:
    folder = ROOT / "examples" / "clients"
    url = examples.grpc if "grpc" in client else examples.http
    picture = str(folder / "pictures" / f"{digit}.txt")
    if client.endswith(".sh"):
        answer = run(f"URL={url} sh {folder / client} {picture}")
    else:
        answer = run([sys.executable, str(folder / client), "--url", url, picture])
    assert digit in answer or {"seven": "7 ", "three": "3 "}[digit] in answer
