"""Forests over HTTP and gRPC, and docs/trees.md: what the page says to do is done, and its answers are those."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from pages import Page, run
from serving import Serving, serving
from tree_models import ROWS, TARGETS, TRAINING, Forest, lightgbm, place, sklearn, xgboost

PAGE = Page("docs/trees.md")
CONFIGURATIONS = {re.match("# models/([a-z]+)/", text)[1]: text for kind, text in PAGE.blocks if kind == "pbtxt"}  # type: ignore[index]
LONG = np.tile(ROWS[5:], (80, 1))
"""Rows enough to be received into memory of their own."""


@pytest.fixture(scope="module")
def forests() -> dict[str, Forest]:
    return {
        "xgboost-value": xgboost("reg:squarederror", "value"),
        "xgboost-two": xgboost("binary:logistic", "two"),
        "xgboost-three": xgboost("multi:softprob", "three"),
        "lightgbm-value": lightgbm("regression", "value"),
        "lightgbm-two": lightgbm("binary", "two"),
        "lightgbm-three": lightgbm("multiclass", "three"),
        "sklearn-forest": sklearn("RandomForestClassifier", "three"),
        "sklearn-boosted": sklearn("GradientBoostingRegressor"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, forests: dict[str, Forest]) -> Path:
    """What the page makes, and the forests."""
    import sklearn.ensemble

    made = tmp_path_factory.mktemp("page")
    forest = sklearn.ensemble.RandomForestRegressor(n_estimators=3).fit(TRAINING, TARGETS["value"])
    (made / "forest.pkl").write_bytes(pickle.dumps(forest))
    for language, text in PAGE.blocks:
        if language == "python":
            script = made / text.splitlines()[0].removeprefix("# ")
            script.write_text(text)
            run([sys.executable, str(script)], cwd=made)
    for name, config in CONFIGURATIONS.items():
        shutil.copytree(made / "models" / "rent", made / "models" / name)
        (made / "models" / name / "config.pbtxt").write_text(config)
    for name, trained in forests.items():
        place(trained, made / "models", name, config="")
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    command = PAGE.block("nerite serve").split()
    with serving(folder / command[2], folder / "log", *command[3:]) as running:
        yield running


def test_the_answer_on_the_page(server: Serving) -> None:
    found = run(PAGE.block("curl").replace("curl ", "curl --silent --show-error "), server)
    assert json.loads(found) == json.loads(PAGE.block("model_version"))


def test_what_was_a_pickle(server: Serving, folder: Path) -> None:
    forest = pickle.loads((folder / "forest.pkl").read_bytes())
    assert server.infer("forest", ROWS[6].tolist(), "input__0") == pytest.approx(forest.predict(ROWS[6:7]))


def test_the_configurations_on_the_page(server: Serving) -> None:
    assert server.infer("approval", [1.0, 30.0], "input__0") == [1]
    tensor = {"name": "input__0", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 30.0]}
    outputs = server.json("POST", "/v2/models/explained/infer", {"inputs": [tensor]})["outputs"]
    assert [(output["name"], output["shape"]) for output in outputs] == [
        ("output__0", [1, 1]),
        ("treeshap_output", [1, 3]),
    ]
    assert sum(outputs[1]["data"]) == pytest.approx(400)


MODELS = ("xgboost-value", "xgboost-two", "xgboost-three", "lightgbm-value", "lightgbm-two", "lightgbm-three",
          "sklearn-forest", "sklearn-boosted")  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_predictions_are_those_of_the_library(
    server: Serving, forests: dict[str, Forest], name: str, protocol: str
) -> None:
    module: Any = getattr(tritonclient, protocol)
    with module.InferenceServerClient(getattr(server, protocol)) as client:
        for rows in (ROWS[6:7], LONG):
            taken = module.InferInput("input__0", rows.shape, "FP32")
            taken.set_data_from_numpy(rows)
            answer = client.infer(name, [taken]).as_numpy("output__0")
            expected = np.reshape(forests[name].predict(rows), (len(rows), -1))
            np.testing.assert_allclose(answer, expected, rtol=2e-6, atol=1e-6)


def test_the_metadata(server: Serving) -> None:
    found = server.json("GET", "/v2/models/lightgbm-three")
    assert found["inputs"] == [{"name": "input__0", "datatype": "FP32", "shape": [-1, 5]}]
    assert found["outputs"] == [{"name": "output__0", "datatype": "FP32", "shape": [-1, 3]}]
    assert found["platform"] == "fil"
    config = server.json("GET", "/v2/models/lightgbm-three/config")
    assert (config["backend"], config["max_batch_size"]) == ("fil", 32768)


def test_a_file_that_is_broken_is_refused_and_the_others_serve(server: Serving, folder: Path) -> None:
    place(xgboost("reg:squarederror", "value"), folder / "models", "broken")
    path = folder / "models" / "broken" / "1" / "xgboost.ubj"
    path.write_bytes(path.read_bytes()[:2000])
    with serving(folder / "models", folder / "other", "--model-control-mode=explicit", "--load-model=rent") as other:
        status, _, body = other.ask("POST", "/v2/repository/models/broken/load")
        assert status == 400
        assert b"The file is cut off or damaged: copy it again" in body
        assert other.infer("rent", [1.0, 30.0], "input__0") == [400.0]
