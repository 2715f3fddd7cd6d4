"""The pages for those who come from TorchServe and MLServer are followed, with files as those programs have them."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

import joblib
import pytest
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier

from pages import ROOT, Page, run
from serving import NERITE, served, serving
from tools import require

TORCHSERVE = Page("docs/coming-from-torchserve.md")
MLSERVER = Page("docs/coming-from-mlserver.md")

HANDLER = """
class LengthHandler:
    def __init__(self):
        self.extra = None

    def initialize(self, context):
        self.extra = open(context.system_properties["model_dir"] + "/extra.txt").read()

    def handle(self, data, context):
        assert len(data) <= context.system_properties["batch_size"]
        return [{"bytes": len(row["body"]), "extra": self.extra, "model": context.model_name} for row in data]
"""


def mar(file: Path, handler: str, **files: str) -> None:
    """Write an archive as torch-model-archiver does."""
    manifest = {
        "createdOn": "26/11/2026 12:00:00",
        "runtime": "python",
        "model": {"modelName": file.stem, "handler": handler, "modelVersion": "1.0"},
        "archiverVersion": "0.12.0",
    }
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        for name, content in files.items():
            archive.writestr(name.replace("__", "."), content)


def test_a_program_of_torch(tmp_path: Path) -> None:
    program, commands = TORCHSERVE.block("torch.export.Dim"), TORCHSERVE.block("nerite add flowers.pt2").splitlines()
    (tmp_path / "export.py").write_text(program)
    assert commands[0] == "python export.py"
    run([sys.executable, "export.py"], cwd=tmp_path)
    for command in commands[1:]:
        run(command, cwd=tmp_path)
    assert (tmp_path / "models" / "flowers" / "1" / "model.pt2").is_file()


def test_an_archive(tmp_path: Path) -> None:
    require("curl")
    mar(tmp_path / "lengths.mar", "lengths.py", lengths__py=HANDLER, extra__txt="more")
    picture = bytes(range(256))
    (tmp_path / "kitten.jpg").write_bytes(picture)
    command = TORCHSERVE.block("nerite serve lengths.mar").split()
    ports = [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]
    archive = str(tmp_path / "lengths.mar")
    assert command == ["nerite", "serve", "lengths.mar", "--trust"]
    with served([str(NERITE), "serve", archive, "--trust", *ports], tmp_path / "log") as server:
        answer = json.loads(run(TORCHSERVE.block("kitten.jpg"), server, cwd=tmp_path))["outputs"][0]
        assert answer["name"] == "prediction"
        assert json.loads(answer["data"][0]) == {"bytes": len(picture), "extra": "more", "model": "lengths"}
    add, serve = TORCHSERVE.block("nerite add lengths.mar").splitlines()
    assert serve == "nerite serve models"
    run(add, cwd=tmp_path)
    with serving(tmp_path / "models", tmp_path / "log") as server:
        texts = {"name": "body", "datatype": "BYTES", "shape": [2, 1], "data": ["abc", "de"]}
        several = server.json("POST", "/v2/models/lengths/infer", {"inputs": [texts]})["outputs"][0]["data"]
        assert [json.loads(each)["bytes"] for each in several] == [3, 2]


def test_a_model_of_scikit_learn(tmp_path: Path) -> None:
    require("curl")
    install, add, serve = MLSERVER.block("iris.joblib").splitlines()
    assert install == "pip install 'nerite[sklearn,onnx]'"
    assert serve == "nerite serve models"
    features, kinds = load_iris(return_X_y=True)
    joblib.dump(RandomForestClassifier(5, random_state=0).fit(features, kinds), tmp_path / "iris.joblib")
    run(add, cwd=tmp_path)
    with serving(tmp_path / "models", tmp_path / "log") as server:
        answer = json.loads(run(MLSERVER.block("curl"), server))
        assert answer["outputs"][0]["data"] == [0]


def test_a_runtime(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(MLSERVER.block("# after"))
    assert MLSERVER.block("nerite serve double.py").strip() == "nerite serve double.py"
    ports = [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]
    with served([str(NERITE), "serve", "double.py", *ports], tmp_path / "log") as server:
        assert server.infer("double", [1.5, 2.0], name="x") == [3.0, 4.0]


@pytest.mark.parametrize("page", ["coming-from-torchserve", "coming-from-mlserver"])
def test_flags_metrics_and_endpoints_are_ours(page: str) -> None:
    """The column of Nerite names flags, metrics and commands that there are."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    flags = (ROOT / "docs" / "flags.md").read_text()
    metrics = (ROOT / "docs" / "metrics.md").read_text() + (ROOT / "docs" / "contract.md").read_text()
    named = [line.rpartition(" | ")[2] for line in text.splitlines() if line.startswith("| ")]
    assert [flag for cell in named for flag in re.findall(r"`(--[a-z-]+)", cell) if f"`{flag}`" not in flags] == []
    assert [name for cell in named for name in re.findall(r"nv_\w+", cell) if name not in metrics] == []


def test_every_block_is_known_here() -> None:
    known = {
        TORCHSERVE: (
            *("torch.export.Dim", "nerite add flowers.pt2", "nerite serve lengths.mar", "nerite add lengths.mar"),
            "kitten.jpg",
        ),
        MLSERVER: ("iris.joblib", "curl", "# before", "# after", "nerite serve double.py"),
    }
    for page, parts in known.items():
        assert len(page.blocks) == len(parts)
        for part in parts:
            page.block(part)
