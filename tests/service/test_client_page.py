"""docs/client.md is run: each of its blocks, against a server that has the model of its examples."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator

import pytest

from nerite.client import Client
from pages import ROOT, Page, run
from serving import Serving, eventually, serving

PAGE = Page("docs/client.md")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("client_page")
    shutil.copytree(ROOT / "examples" / "sources" / "scaler", folder / "models" / "scaler")
    with serving(folder / "models", folder / "log", "--model-control-mode=explicit", "--load-model=scaler") as running:
        yield running


def commands(part: str, server: Serving) -> list[str]:
    """Run each line of a block; return what each printed."""
    lines = PAGE.block(part).strip().splitlines()
    return [run(line.replace("nerite client", f"nerite client --url {shlex.quote(server.http)}")) for line in lines]


def test_every_block_is_tested_here() -> None:
    known = ("nerite client ls", "| Output |", "--stream", "nerite client stats", "nerite client load", "import numpy")
    assert len(PAGE.blocks) == len(known)
    for part in known:
        PAGE.block(part)


def test_infer(server: Serving) -> None:
    models, table, made_up, document = commands("nerite client ls", server)
    assert "| scaler | 2       | READY |" in models
    assert table == PAGE.block("| Output |")
    assert "[128]" in made_up
    assert "--shape numbers:128; specify others likewise." in made_up
    assert '"datatype": "FP32"' in document


def test_stream(server: Serving) -> None:
    (line,) = commands("--stream", server)
    assert '"scaled": [-0.848' in line


def test_statistics(server: Serving) -> None:
    table, lines = commands("nerite client stats", server)
    assert "| Mean batch |" in table
    assert len(lines.splitlines()) == 2


def test_python(server: Serving) -> None:
    printed = run([sys.executable, "-c", PAGE.block("import numpy")], server).splitlines()
    assert "scaler 2: READY" in printed[0]
    assert "0.1 cannot be converted without loss. To have it rounded, pass array.astype(numpy.float32)." in printed[3]
    assert printed[3].endswith(" None")
    assert printed[4].startswith("[-0.848")


def test_load_and_unload(server: Serving) -> None:
    said = commands("nerite client load", server)
    assert said == ["scaler is loaded.\n", "scaler is loaded.\n", "scaler is being unloaded.\n"]
    with Client(server.http) as client:
        eventually(lambda: not client.ready("scaler"))
        client.load("scaler")
