"""Models of MLflow by name: registered ones too, whose aliases become versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from nerite.core.errors import NotFound
from nerite.sources.fetching import ModelFetcher, fetch_logged_model
from nerite.sources.hub_download import FetchWatcher
from nerite.sources.name import MlflowName

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is version 1 of the registered model iris, which is its champion."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'runs'}")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    folder = tmp_path / "logged"
    folder.mkdir()
    (folder / "MLmodel").write_text("flavors:\n  onnx:\n    data: model.onnx\n")
    (folder / "model.onnx").write_bytes(b"onnx")
    client = MlflowClient()
    client.create_registered_model("iris")
    version = client.create_model_version("iris", str(folder))
    client.set_registered_model_alias("iris", "champion", version.version)
    return folder


def test_an_alias_becomes_a_version(logged: Path, tmp_path: Path) -> None:
    with ModelFetcher({}, tmp_path, FetchWatcher()) as fetcher:
        found = [fetcher.fetch(MlflowName("models:/iris@champion")), fetcher.fetch(MlflowName("models:/iris/1"))]
    assert {(each.name, each.origin) for each in found} == {("iris", "mlflow:models:/iris/1")}
    assert all((each.path / "model.onnx").read_bytes() == b"onnx" for each in found)
    assert found[0].path != found[1].path, "each has a folder of its own"


def test_a_path(logged: Path, tmp_path: Path) -> None:
    with ModelFetcher({}, tmp_path, FetchWatcher()) as fetcher:
        found = fetcher.fetch(MlflowName(str(logged)))
        assert (found.name, found.origin) == ("logged", f"mlflow:{logged}")
        assert (found.path / "model.onnx").read_bytes() == b"onnx"


@pytest.mark.parametrize("uri", ["models:/iris@nobody", "models:/other/1", "runs:/0123/model", "/no/such/directory"])
def test_what_is_not_there(logged: Path, tmp_path: Path, uri: str) -> None:
    with pytest.raises(NotFound, match=uri):
        fetch_logged_model(uri, tmp_path)
