"""docs/openvino.md: the model that it exports is served, and its configurations load."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from nerite.frameworks.openvino.graph import openvino
from pages import Page, run
from serving import serving

PAGE = Page("docs/openvino.md")
CONFIGURATIONS = [text for language, text in PAGE.blocks if language == "pbtxt"]
ov = openvino()


def classifier(folder: Path) -> None:
    """scores = the means of the channels of image, ten times: for pictures of 8 x 8, one at a time."""
    ops = ov.opset13
    image = ops.parameter(ov.PartialShape([1, 3, 8, 8]), np.float32, name="image")
    means = ops.reshape(ops.reduce_mean(image, ops.constant([2, 3]), False), ops.constant([0, 3]), special_zero=True)
    scores = ops.result(ops.matmul(means, ops.constant(np.ones((3, 10), np.float32)), False, False))
    scores.output(0).set_names({"scores"})
    folder.mkdir(parents=True)
    ov.serialize(ov.Model([scores], [image], "m"), str(folder / "model.xml"), str(folder / "model.bin"))


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The export must not report to anybody.
    monkeypatch.setenv("CI", "true")
    run([sys.executable, "-c", PAGE.block("save_model")], cwd=tmp_path)
    models = tmp_path / "models"
    named, image, threads = CONFIGURATIONS
    for name, config in (("named", named), ("image", image), ("threads", threads)):
        classifier(models / name / "1")
        (models / name / "config.pbtxt").write_text(config)
    assert PAGE.block("serve") == "nerite serve models\n"
    with serving(models, tmp_path / "log") as server:
        (answer,) = json.loads(run(PAGE.block("curl"), server))["outputs"]
        assert (answer["name"], answer["shape"]) == ("scores", [1, 3])
        assert sum(answer["data"]) == pytest.approx(1, abs=0.02)
        sent = {"name": "image", "datatype": "UINT8", "shape": [2, 3, 2, 2], "data": [1] * 24}
        _, _, body = server.ask("POST", "/v2/models/image/infer", {"inputs": [sent]})
        assert json.loads(body)["outputs"][0]["data"] == pytest.approx([3] * 20, rel=0.02)
