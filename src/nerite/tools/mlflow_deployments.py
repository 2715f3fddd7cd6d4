"""Deployment plugin of MLflow: deploys models that MLflow has logged to a server by way of its model repository."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import (
    INTERNAL_ERROR,
    INVALID_PARAMETER_VALUE,
    RESOURCE_ALREADY_EXISTS,
    RESOURCE_DOES_NOT_EXIST,
)

from nerite.client import Client, ClientError, ModelDescription
from nerite.core.errors import AlreadyExists, NeriteError
from nerite.repository.remote import is_remote, repository_at
from nerite.sources.fetching import fetch_logged_model
from nerite.tools.add.addition import add_model
from nerite.tools.add.destination import remove_model
from nerite.tools.add.order import AddOrder, AddOutcome, Watcher

if TYPE_CHECKING:
    from nerite.repository.remote.repository import RemoteRepository

# Repositories of deployments: a folder that the server can also reach, or an object store. Both raise ``NeriteError``.


class LocalDeployments:
    """A repository in a local folder."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def note(self, name: str, file: str) -> bytes | None:
        """Return the content of a file in a model's directory, or None if it does not exist."""
        try:
            return (self._place / name / file).read_bytes()
        except OSError:
            return None

    def add(self, order: Callable[[Path], AddOrder], confirm: Callable[[], None]) -> AddOutcome:
        """Add a model; ``order`` is called with the repository's directory. Undo the addition if ``confirm`` raises."""
        return add_model(order(self._place), Watcher(), confirm)

    def remove(self, name: str) -> None:
        """Remove a model if it exists."""
        directory = self._place / name
        if directory.is_dir():
            remove_model(self._place, directory)


class RemoteDeployments:
    """A repository in an object store: a model is assembled in a local folder, then uploaded as a whole."""

    def __init__(self, remote: RemoteRepository) -> None:
        self._remote = remote

    def note(self, name: str, file: str) -> bytes | None:
        """Return the content of a file in a model's directory."""
        return self._remote.content(name, file)

    def add(self, order: Callable[[Path], AddOrder], confirm: Callable[[], None]) -> AddOutcome:
        """Add a model."""
        with tempfile.TemporaryDirectory(prefix="nerite-") as aside:
            wanted = order(Path(aside))
            laid_out = wanted.repository / wanted.name
            with self._existing(wanted.name) as before:
                if before is not None:
                    shutil.copytree(before, laid_out)

                def publish() -> None:
                    try:
                        self._remote.publish(wanted.name, laid_out)
                        confirm()
                    except BaseException:
                        if before is not None:
                            self._remote.publish(wanted.name, before)
                        else:
                            self._remote.remove(wanted.name)
                        raise

                try:
                    return add_model(wanted, Watcher(), publish)
                except NeriteError as error:
                    # The temporary folder would mean nothing to the user.
                    raise type(error)(error.message.replace(aside, self._remote.location)) from None

    def remove(self, name: str) -> None:
        """Remove a model if it exists."""
        self._remote.remove(name)

    @contextmanager
    def _existing(self, name: str) -> Iterator[Path | None]:
        """Yield a local copy of a model as it is in the object store, or None if it does not exist."""
        directory = self._remote.fetch(name)
        try:
            yield directory
        finally:
            if directory is not None:
                self._remote.release(directory)


# Conversion of inputs from and outputs to the types that MLflow uses.


class Predictions(PredictionsResponse):
    """The outputs of a model by name, under the key ``outputs``."""

    def get_predictions(self, predictions_format: str = "dataframe", dtype: Any = None) -> Any:
        """Return the outputs as a pandas DataFrame with a column each, or the only output as an ``ndarray``."""
        outputs = self["outputs"]
        if predictions_format == "dataframe":
            import pandas

            return pandas.DataFrame({name: list(array) for name, array in outputs.items()})
        if predictions_format == "ndarray" and len(outputs) == 1:
            return np.asarray(next(iter(outputs.values())), dtype)
        raise MlflowException(
            f"The outputs {', '.join(outputs)} cannot be returned as '{predictions_format}'. Use ['outputs'] instead.",
            error_code=INVALID_PARAMETER_VALUE,
        )

    def to_json(self, path: str | None = None) -> str | None:
        """Return the outputs as JSON, or write them to ``path``."""
        text = json.dumps({"outputs": {name: _as_lists(array) for name, array in self["outputs"].items()}})
        if path is None:
            return text
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return None


def arrays_of(model: ModelDescription, inputs: Any) -> dict[str, Any]:
    """Return the value of each model input. Raises ``MlflowException`` if values cannot be assigned to inputs."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    only = model.inputs[0].name if len(model.inputs) == 1 else ""
    columns = getattr(inputs, "columns", None)
    if columns is not None:
        names = [str(column) for column in columns]
        if set(names) <= {tensor.name for tensor in model.inputs}:
            ranks = {tensor.name: len(tensor.shape) for tensor in model.inputs}
            return {
                name: _rows(inputs[column].tolist(), ranks[name]) for name, column in zip(names, columns, strict=True)
            }
        if only:
            return {only: inputs.to_numpy().tolist()}
    elif only and inputs is not None:
        return {only: inputs}
    wanted = ", ".join(map(str, model.inputs))
    raise MlflowException(
        f"The inputs must be passed by name, because the model '{model.name}' has these: {wanted}",
        error_code=INVALID_PARAMETER_VALUE,
    )


def _rows(column: list[Any], rank: int) -> list[Any]:
    """Return a column as the rows of a tensor; a scalar becomes a row with one element."""
    return [[value] for value in column] if rank > 1 and not np.ndim(column[0] if column else ()) else column


def _as_lists(array: Any) -> Any:
    if array.dtype != object:
        return array.tolist()
    return [_as_lists(row) if isinstance(row, np.ndarray) else row.decode(errors="replace") for row in array]


# Functions that MLflow expects of a deployment plugin: help, and running a model locally, which is not supported.

_HELP = """\
Deploys MLflow models to a running server (Nerite or Triton) by way of its model repository.

The server must be in explicit model control mode:
    nerite serve models --model-control-mode=explicit
It is configured by these variables, or by the target's name:
    NERITE_URL, or TRITON_URL                          HOST:PORT of its HTTP port (default: localhost:8000)
    NERITE_MODEL_REPOSITORY, or TRITON_MODEL_REPO      its repository: a folder (default: models), or s3://…, gs://…, as://…
    nerite:http://HOST:PORT                            target that names the server

Flavours: triton, onnx, xgboost, lightgbm, catboost, tensorflow, transformers, pytorch, sklearn. Without --flavor, the
first of these that the model has is used.

Settings, as in --config version=2:
    version=N     deploy as this version, in addition to existing ones (default: as the only version)
    trust=true    run code that the model contains, which is needed to read sklearn pickles
"""


def _deployments(repository: str) -> LocalDeployments | RemoteDeployments:
    if not is_remote(repository):
        return LocalDeployments(Path(repository))
    with _as_mlflow_errors():
        return RemoteDeployments(repository_at(repository, os.environ))


@contextmanager
def _as_mlflow_errors(error_code: int = INTERNAL_ERROR) -> Iterator[None]:
    """Raise errors of the ``with`` block as ``MlflowException``, with ``error_code`` for Nerite's own errors."""
    try:
        yield
    except ClientError as error:
        raise MlflowException(str(error)) from None
    except AlreadyExists as error:
        raise MlflowException(error.message, error_code=RESOURCE_ALREADY_EXISTS) from None
    except NeriteError as error:
        raise MlflowException(error.message, error_code=error_code) from None


def target_help() -> str:
    """Return the help that ``mlflow deployments help`` prints."""
    return _HELP


def run_local(
    target: str, name: str, model_uri: str, flavor: str | None = None, config: dict[str, Any] | None = None
) -> NoReturn:
    """Raise ``MlflowException`` with instructions, because running locally is not supported."""
    folder = os.environ.get("NERITE_MODEL_REPOSITORY", "models")
    raise MlflowException(
        f"The target {target} cannot run models locally. Start a server, and deploy to it: "
        f"nerite serve {folder} --model-control-mode=explicit"
    )


_NOTE: Final = "mlflow-meta.json"
"""File in a model's directory with the metadata of its deployment; the same as that of Triton's plugin."""
_UNLOADED: Final = "unloaded"
"""Reason that servers report for versions that were unloaded."""
_EXPLICIT: Final = "The server must be started with --model-control-mode=explicit."


class NeriteDeployments(BaseDeploymentClient):
    """MLflow's client for the deployments on one server. Every method raises ``MlflowException`` if it fails."""

    def __init__(self, target_uri: str) -> None:
        super().__init__(target_uri)  # type: ignore[no-untyped-call]  # it has no annotations
        own, triton = os.environ.get("NERITE_URL"), os.environ.get("TRITON_URL")
        self._url = target_uri.partition(":")[2].strip("/") or own or triton or "localhost:8000"
        own, triton = os.environ.get("NERITE_MODEL_REPOSITORY"), os.environ.get("TRITON_MODEL_REPO")
        self._deployments = _deployments(own or triton or "models")

    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Deploy a new model; return when it is ready."""
        return self._deploy(name, model_uri, flavor, config or {}, replace=False)

    def update_deployment(
        self,
        name: str,
        model_uri: str | None = None,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Replace a deployed model by another one without losing a request."""
        deployed = self.get_deployment(name)
        uri = model_uri or deployed["mlflow_model_uri"]
        return self._deploy(name, uri, flavor, config or {}, replace=True)

    def delete_deployment(self, name: str, config: dict[str, Any] | None = None, endpoint: str | None = None) -> None:
        """Unload a model and remove its files. A model that does not exist is not an error."""
        with _as_mlflow_errors():
            with Client(self._url) as client:
                try:
                    client.unload(name)
                except ClientError as error:
                    if error.status not in (400, 404):
                        raise
            self._deployments.remove(name)

    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        """Return every version of every model that MLflow has deployed, with its state on the server."""
        with _as_mlflow_errors(), Client(self._url) as client:
            versions = client.models()
        noted = {version.name: self._note(version.name) for version in versions}
        return [
            {"name": each.name, "version": each.version, "state": each.state, "reason": each.reason, **noted[each.name]}
            for each in versions
            if noted[each.name] and each.state and not each.reason.startswith(_UNLOADED)
        ]

    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        """Return the latest version of a deployment, with its state and metadata."""
        found = [each for each in self.list_deployments() if each["name"] == name]
        if not found:
            raise MlflowException(f"Deployment '{name}' does not exist.", error_code=RESOURCE_DOES_NOT_EXIST)
        return found[-1]

    def predict(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> Predictions:
        """Run inference on a deployment; return its outputs by name.

        ``inputs`` are arrays or lists by name; a pandas DataFrame with a column for each input, or for each feature of
        the only input; or an array for the only input.
        """
        if not deployment_name:
            raise MlflowException("A deployment name is required.", error_code=INVALID_PARAMETER_VALUE)
        with _as_mlflow_errors(), Client(self._url) as client:
            model = client.model(deployment_name)
            return Predictions(outputs=client.infer(deployment_name, arrays_of(model, inputs)))

    def _deploy(
        self, name: str, model_uri: str, flavor: str | None, config: dict[str, Any], *, replace: bool
    ) -> dict[str, Any]:
        version = int(config["version"]) if "version" in config else None
        with _as_mlflow_errors(RESOURCE_DOES_NOT_EXIST):
            folder, _ = fetch_logged_model(model_uri)
        # Models of the flavour triton, and models logged without MLmodel, have no flavours to choose from.
        wanted = flavor if flavor and (folder / "MLmodel").is_file() else ""

        def order(repository: Path) -> AddOrder:
            return AddOrder(
                folder,
                repository,
                name=name,
                version=version,
                flavor=wanted or "",
                trusted=str(config.get("trust", "")).lower() == "true",
                force=replace,
                # The target server itself will try it.
                load=False,
                notes={_NOTE: json.dumps({"name": name, "mlflow_model_uri": model_uri, "flavor": flavor or ""})},
            )

        with _as_mlflow_errors(INVALID_PARAMETER_VALUE):
            outcome = self._deployments.add(order, lambda: self._load(name))
        return {"name": name, "flavor": flavor or "", "version": outcome.destination.version}

    def _load(self, name: str) -> None:
        try:
            with Client(self._url) as client:
                client.load(name)
        except ClientError as error:
            remedy = f" {_EXPLICIT}" if "not allowed" in str(error) else ""
            raise MlflowException(f"{error}{remedy}") from None

    def _note(self, name: str) -> dict[str, Any]:
        with _as_mlflow_errors():
            text = self._deployments.note(name, _NOTE)
        try:
            note: dict[str, Any] = json.loads(text or b"{}")
        except ValueError:
            return {}
        return note
