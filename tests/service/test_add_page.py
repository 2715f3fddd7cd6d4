"""docs/add.md and docs/mlflow.md are run: each of their blocks, in a folder that has the models of their examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pages import Page, run
from serving import Serving, serving

PAGE = Page("docs/add.md")
MLFLOW = Page("docs/mlflow.md")


def iris(path: Path) -> None:
    """What the pages call the classifier: scores = softmax(features @ w)."""
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", 4])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 3])
    nodes = [helper.make_node("MatMul", ["features", "w"], ["z"]), helper.make_node("Softmax", ["z"], ["scores"])]
    weights = numpy_helper.from_array(np.eye(4, 3, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "iris", [features], [scores], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    folder = tmp_path_factory.mktemp("add_page")
    iris(folder / "iris.onnx")
    iris(folder / "better.onnx")
    module = torch.nn.Linear(4, 2).eval()
    torch.jit.save(torch.jit.trace(module, torch.zeros(1, 4)), folder / "script.pt")
    (folder / "logged").mkdir()
    iris(folder / "logged" / "model.onnx")
    (folder / "logged" / "MLmodel").write_text("flavors:\n  onnx:\n    data: model.onnx\n")
    return folder


def commands(folder: Path, part: str) -> list[str]:
    """Run each line of a block, but for the server; return what each printed."""
    lines = PAGE.block(part).strip().splitlines()
    return [run(line, cwd=folder) for line in lines if not line.startswith("nerite serve")]


def blurred(line: str) -> str:
    """Return a line without its figures and spaces, and without what depends on their length."""
    return re.sub(r"[\d.,\s-]+|[kM]B|bytes", "", line)


def test_every_block_is_tested_here() -> None:
    for page, known in (
        (PAGE, ("nerite ls\n", "Added as model", "script.pt", "--force")),
        (MLFLOW, ("nerite serve models", "import get_deploy_client")),
    ):
        assert len(page.blocks) == len(known)
        for part in known:
            page.block(part)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_adding(folder: Path) -> None:
    added, listed, shown = commands(folder, "nerite ls\n")
    printed = PAGE.block("Added as model").splitlines()
    assert [blurred(line) for line in added.splitlines()[: len(printed)]] == [blurred(line) for line in printed]
    assert re.search(r"\| iris  \| 1        \| (onnxruntime|openvino) ", listed), "the faster of the two"
    assert "nerite client infer iris --random" in shown
    (script,) = commands(folder, "script.pt")
    assert "Added as model 'script'" in script
    second, replaced, *removed = commands(folder, "--force")
    assert "version 2, in models" in second
    assert "version 2, in models" in replaced
    assert removed == ["Removed models/iris/1.\n", "Removed models/iris.\n"]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    (folder / "deployed").mkdir()
    _, _, flag = MLFLOW.block("nerite serve").strip().partition("models ")
    with serving(folder / "deployed", folder / "log", flag) as running:
        yield running


def test_mlflow(
    folder: Path, server: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NERITE_URL", server.http)
    monkeypatch.setenv("NERITE_MODEL_REPOSITORY", str(folder / "deployed"))
    monkeypatch.chdir(folder)
    exec(compile(MLFLOW.block("get_deploy_client"), "docs/mlflow.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["(1, 3)", "[('iris', '2')]"]
    assert list((folder / "deployed").iterdir()) == []
