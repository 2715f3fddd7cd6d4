"""Models of frameworks in environments of their own: the framework is there, and the server has none."""

from __future__ import annotations

import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import tree_models
from serving import IN_PROCESS, Serving, serving

WITHOUT_FRAMEWORKS = """
from importlib.machinery import PathFinder

found, none = PathFinder.find_spec, ("onnxruntime", "treelite", "xgboost")
PathFinder.find_spec = lambda name, *more: None if name in none else found(name, *more)
"""
"""What a server imports that is to find none of them, though they are installed."""


def environment(folder: Path, *packages: str) -> str:
    """Make an environment that has some of the packages here, and numpy; return the parameter that names it."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for package in ("numpy", "numpy.libs", *packages):
        here = Path(sysconfig.get_path("purelib"), package)
        if here.exists():
            (site / package).symlink_to(here)
    return f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{folder}" }} }}\n'


def onnx_model(repository: Path, name: str, config: str) -> None:
    """Write a model that doubles INPUT0."""
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["N", 2]) for end in ("INPUT0", "OUTPUT0")]
    graph = helper.make_graph([helper.make_node("Add", ["INPUT0", "INPUT0"], ["OUTPUT0"])], "g", ends[:1], ends[1:])
    (repository / name / "1").mkdir(parents=True)
    doubling = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(doubling, repository / name / "1" / "model.onnx")
    (repository / name / "config.pbtxt").write_text(f'backend: "onnxruntime"\nmax_batch_size: 4\n{config}')


@pytest.fixture(scope="module")
def forest() -> tree_models.Forest:
    return tree_models.xgboost("reg:squarederror", "value")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, forest: tree_models.Forest) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("frameworks_apart")
    models = folder / "models"
    of_onnx = environment(folder / "onnx", "onnxruntime")
    onnx_model(models, "doubling", of_onnx)
    onnx_model(models, "inside", of_onnx + IN_PROCESS)
    onnx_model(models, "lacking", environment(folder / "bare"))
    of_trees = environment(folder / "trees", "treelite", "treelite.libs", "xgboost", "xgboost.libs")
    tree_models.place(forest, models, "forest", f'backend: "fil"\n{of_trees}')
    (folder / "first").mkdir()
    (folder / "first" / "sitecustomize.py").write_text(WITHOUT_FRAMEWORKS)
    surroundings = {"PYTHONPATH": str(folder / "first")}
    with serving(models, folder / "log", "--exit-on-error=false", environment=surroundings) as running:
        yield running


def test_they_serve(server: Serving, forest: tree_models.Forest) -> None:
    assert server.infer("doubling", [1.0, 2.0]) == [2.0, 4.0]
    row = tree_models.ROWS[:1]
    assert server.infer("forest", row[0].tolist(), "input__0") == pytest.approx(forest.predict(row))


def test_what_cannot_be(server: Serving) -> None:
    reasons = {entry["name"]: entry.get("reason", "") for entry in server.json("POST", "/v2/repository/index")}
    assert (
        "the environment of model 'lacking' (EXECUTION_ENV_PATH) lacks the Python package 'onnxruntime'."
        in (reasons["lacking"])
    )
    assert "/bare/bin/python -m pip install onnxruntime" in reasons["lacking"]
    assert (
        "model 'inside' cannot run both in the server process (EXECUTION_MODE in_process) and in an environment of its "
        "own (EXECUTION_ENV_PATH): remove one of the two parameters"
    ) in reasons["inside"]
