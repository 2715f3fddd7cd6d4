"""Deployments by MLflow's own client, on a server that runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mlflow.deployments import BaseDeploymentClient, get_deploy_client
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from onnx import TensorProto, helper, numpy_helper

import nerite.tools.mlflow_deployments
from object_store import KEYS, object_store, refusing
from serving import IDENTITY, Serving, pbtxt, python_model, serving


def logged(folder: Path, factor: float, features: int = 2) -> Path:
    """What ``mlflow.onnx.save_model`` writes."""
    folder.mkdir()
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", features]) for name in ("x", "y"))
    weights = numpy_helper.from_array(np.float32(factor), "w")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["y"])], "graph", [x], [y], [weights])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
    )
    described = Model(run_id="0123")
    described.add_flavor("onnx", onnx_version=onnx.__version__, data="model.onnx", providers=["CPUExecutionProvider"])
    described.add_flavor("python_function", loader_module="mlflow.onnx", python_version="3.11", env="conda.yaml")
    described.save(str(folder / "MLmodel"))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("mlflow")
    (folder / "models").mkdir()
    with serving(folder / "models", folder / "log", "--model-control-mode=explicit") as running:
        yield running


@pytest.fixture
def repository(server: Serving, monkeypatch: pytest.MonkeyPatch) -> Path:
    models = server.log.with_name("models")
    monkeypatch.setenv("TRITON_URL", server.http)
    monkeypatch.setenv("TRITON_MODEL_REPO", str(models))
    return models


@pytest.fixture(params=["nerite", "triton"])
def client(request: pytest.FixtureRequest, repository: Path) -> BaseDeploymentClient:
    return get_deploy_client(request.param)


def answer(client: BaseDeploymentClient, name: str) -> Any:
    return client.predict(name, {"x": [[1, 2]]})["outputs"]["y"].tolist()


def test_the_life_of_a_deployment(client: BaseDeploymentClient, repository: Path, tmp_path: Path) -> None:
    first = str(logged(tmp_path / "first", 2))
    assert client.create_deployment("net", first, flavor="onnx") == {"name": "net", "flavor": "onnx", "version": 1}
    assert answer(client, "net") == [[2, 4]]
    (listed,) = client.list_deployments()
    assert listed == client.get_deployment("net")
    assert (listed["name"], listed["state"], listed["mlflow_model_uri"]) == ("net", "READY", first)

    with pytest.raises(MlflowException, match=r"the model 'net' already exists in .*") as caught:
        client.create_deployment("net", first)
    assert caught.value.error_code == "RESOURCE_ALREADY_EXISTS"

    client.update_deployment("net", str(logged(tmp_path / "second", 3)))
    assert answer(client, "net") == [[3, 6]]
    client.update_deployment("net", first, config={"version": "2"})
    assert answer(client, "net") == [[2, 4]]
    assert sorted(child.name for child in (repository / "net").iterdir() if child.is_dir()) == ["1", "2"]

    client.delete_deployment("net")
    client.delete_deployment("net")
    assert client.list_deployments() == []
    assert list(repository.iterdir()) == []
    with pytest.raises(MlflowException, match="Deployment 'net' does not exist"):
        client.get_deployment("net")


def test_an_update_that_cannot_be_loaded(repository: Path, tmp_path: Path) -> None:
    client = get_deploy_client("nerite")
    client.create_deployment("kept", str(logged(tmp_path / "good", 2)))
    bad = logged(tmp_path / "bad", 3)
    (bad / "config.pbtxt").write_text('backend: "onnxruntime" max_batch_size: 4 input { name: "z" }')
    with pytest.raises(MlflowException, match=r"failed to load 'kept'|load failed for model 'kept'"):
        client.update_deployment("kept", str(bad))
    assert not (repository / "kept" / "config.pbtxt").read_text().startswith("backend")
    assert answer(client, "kept") == [[2, 4]]
    with pytest.raises(MlflowException, match="load"):
        client.create_deployment("never", str(bad))
    assert not (repository / "never").exists()
    client.delete_deployment("kept")


def test_a_model_of_the_flavour_triton(repository: Path, tmp_path: Path) -> None:
    client = get_deploy_client("triton")
    folder = python_model(tmp_path / "logged", "identity", IDENTITY, pbtxt())
    (tmp_path / "logged" / "MLmodel").write_text("flavors:\n  triton:\n    data: identity\n")
    client.create_deployment("identity", str(tmp_path / "logged"), flavor="triton")
    assert client.predict("identity", np.ones((1, 3), np.float32))["outputs"]["OUTPUT0"].tolist() == [[1, 1, 1]]
    client.delete_deployment("identity")
    shutil.rmtree(folder)
    with pytest.raises(MlflowException, match="named in MLmodel, is missing"):
        client.create_deployment("identity", str(tmp_path / "logged"), flavor="triton")


def test_a_repository_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is deployed is written there, and what could not be loaded is as if it had never been."""
    kept = f"--repository-cache-directory={tmp_path / 'cache'}"
    with object_store() as store:
        store.put("models/other/config.pbtxt", 'backend: "python"')
        with serving(
            store.location, tmp_path / "log", "--model-control-mode=explicit", kept, environment=KEYS
        ) as server:
            for name, value in {**KEYS, "TRITON_URL": server.http, "TRITON_MODEL_REPO": store.location}.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
            client = get_deploy_client("triton")
            first = str(logged(tmp_path / "first", 2))
            client.create_deployment("net", first, flavor="onnx")
            assert answer(client, "net") == [[2, 4]]
            with pytest.raises(MlflowException, match=f"the model 'net' already exists in {store.location}"):
                client.create_deployment("net", first)

            written = store.keys("models/net")
            client.update_deployment("net", str(logged(tmp_path / "second", 3)), config={"version": 2})
            assert answer(client, "net") == [[3, 6]]
            assert store.keys("models/net") - written == {"models/net/2/model.onnx"}
            before = store.contents("models/net")
            bad = logged(tmp_path / "bad", 2)
            (bad / "config.pbtxt").write_text('backend: "nobody"')
            for deploy, name in ((client.update_deployment, "net"), (client.create_deployment, "never")):
                with pytest.raises(MlflowException, match=f"load failed for model '{name}'"):
                    deploy(name, str(bad))
            assert store.contents("models/net") == before
            assert answer(client, "net") == [[3, 6]]
            assert store.keys("models/never") == set()

            deployed = client.get_deployment("net")
            assert [deployed[key] for key in ("name", "version", "state", "flavor")] == ["net", "2", "READY", "onnx"]
            client.update_deployment("net", first)
            assert answer(client, "net") == [[2, 4]]
            assert store.keys("models/net") == written
            client.delete_deployment("net")
            client.delete_deployment("net")
            assert store.keys("models") == {"models/other/config.pbtxt"}
            store.door = refusing("403 Forbidden", "AccessDenied")
            with pytest.raises(MlflowException, match="access was denied with the credentials of AWS_ACCESS_KEY_ID"):
                client.create_deployment("net", first)


class Frame:
    """As much of a pandas DataFrame as is looked at."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = list(columns)
        self._data = columns

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        column = np.empty(len(self._data[name]), object)
        column[:] = self._data[name]
        return column

    def to_numpy(self) -> np.ndarray[Any, Any]:
        return np.array(list(self._data.values())).T


def test_predictions(repository: Path, tmp_path: Path) -> None:
    client = get_deploy_client("nerite")
    client.create_deployment("net", str(logged(tmp_path / "net", 2)))
    for inputs in (Frame(x=[[1, 2], [3, 4]]), Frame(width=[1, 3], height=[2, 4]), [[1, 2], [3, 4]]):
        predicted = client.predict("net", inputs)
        assert predicted["outputs"]["y"].tolist() == [[2, 4], [6, 8]]
    assert json.loads(predicted.to_json()) == {"outputs": {"y": [[2, 4], [6, 8]]}}
    assert predicted.get_predictions("ndarray").tolist() == [[2, 4], [6, 8]]
    predicted.to_json(str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == {"outputs": {"y": [[2, 4], [6, 8]]}}
    with pytest.raises(MlflowException, match=r"\[request id: <id_unknown>\]|does not fit"):
        client.predict("net", {"x": [[1, 2, 3]]})
    with pytest.raises(MlflowException, match="A deployment name is required"):
        client.predict()
    client.delete_deployment("net")


def test_a_server_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NERITE_MODEL_REPOSITORY", str(tmp_path / "models"))
    client = get_deploy_client("nerite:http://127.0.0.1:1")
    with pytest.raises(MlflowException, match=r"127\.0\.0\.1:1"):
        client.create_deployment("net", str(logged(tmp_path / "net", 2)))
    assert not (tmp_path / "models").exists()


def test_help() -> None:
    assert "NERITE_MODEL_REPOSITORY" in nerite.tools.mlflow_deployments.target_help()
    with pytest.raises(MlflowException, match="nerite serve"):
        nerite.tools.mlflow_deployments.run_local("nerite", "net", "models:/net/1")
