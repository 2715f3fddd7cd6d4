"""``NeriteDeployments``: what MLflow calls for a deployment's life."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol

import mlflow.artifacts
import numpy as np
from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST

from nerite.client import Client, ClientError, ModelDescription
from nerite.core.errors import AlreadyExists, NeriteError
from nerite.repository.remote import is_remote, repository_at
from nerite.tools.add.addition import add_model
from nerite.tools.add.destination import remove_model
from nerite.tools.add.order import AddOrder, AddOutcome

if TYPE_CHECKING:
    from nerite.repository.remote.repository import RemoteRepository

# Where deployments are kept: a folder that the server can reach, too, or an object store.


class Depot(Protocol):
    """A model repository that deployments are put into. Every method raises ``NeriteError`` if it cannot."""

    def note(self, name: str, file: str) -> bytes | None:
        """Return the content of a file in a model's directory; None: there is no such."""

    def add(self, order: Callable[[Path], AddOrder], confirm: Callable[[], None]) -> AddOutcome:
        """Add a model, in the repository that ``order`` is told. If ``confirm`` raises, all is as it was."""

    def remove(self, name: str) -> None:
        """Remove a model, if it is there."""


class FolderDepot:
    """A repository in a folder."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def note(self, name: str, file: str) -> bytes | None:
        """Return the content of a file in a model's directory."""
        try:
            return (self._place / name / file).read_bytes()
        except OSError:
            return None

    def add(self, order: Callable[[Path], AddOrder], confirm: Callable[[], None]) -> AddOutcome:
        """Add a model."""
        return add_model(order(self._place), _Silent(), confirm)

    def remove(self, name: str) -> None:
        """Remove a model, if it is there."""
        directory = self._place / name
        if directory.is_dir():
            remove_model(self._place, directory)


class BucketDepot:
    """A repository in an object store: a model is laid out in a folder here, and goes there as a whole."""

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
            with self._as_it_is(wanted.name) as before:
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
                    return add_model(wanted, _Silent(), publish)
                except NeriteError as error:
                    # Where it was laid out is nothing that anybody will find.
                    raise type(error)(error.message.replace(aside, self._remote.location)) from None

    def remove(self, name: str) -> None:
        """Remove a model, if it is there."""
        self._remote.remove(name)

    @contextmanager
    def _as_it_is(self, name: str) -> Iterator[Path | None]:
        directory = self._remote.fetch(name)
        try:
            yield directory
        finally:
            if directory is not None:
                self._remote.release(directory)


class _Silent:
    """Looks on, says nothing, and takes no settings but those of the model."""

    def copied(self, done: int, total: int) -> None:
        """Say nothing."""

    def doing(self, what: str) -> None:
        """Say nothing."""

    def accepts(self, outcome: AddOutcome) -> bool:
        """Leave the settings as they are."""
        return False


# Inputs as MLflow brings them, and outputs as it wants them.


class Predictions(PredictionsResponse):
    """The outputs of a model by name, under the key ``outputs``."""

    def get_predictions(self, predictions_format: str = "dataframe", dtype: Any = None) -> Any:
        """Return the outputs as a pandas DataFrame, a column each; or the only output as an ``ndarray``."""
        outputs = self["outputs"]
        if predictions_format == "dataframe":
            import pandas

            return pandas.DataFrame({name: list(array) for name, array in outputs.items()})
        if predictions_format == "ndarray" and len(outputs) == 1:
            return np.asarray(next(iter(outputs.values())), dtype)
        raise MlflowException(
            f"The outputs {', '.join(outputs)} cannot be one '{predictions_format}'. Take them from ['outputs'].",
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
    """Return what is given for each input of a model. Raises ``MlflowException`` for what cannot be told apart."""
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
        f"The inputs have to be given by their names, for the model '{model.name}' has these: {wanted}",
        error_code=INVALID_PARAMETER_VALUE,
    )


def _rows(column: list[Any], rank: int) -> list[Any]:
    """Return a column as the rows of a tensor: a number that stands alone is a row of one."""
    return [[value] for value in column] if rank > 1 and not np.ndim(column[0] if column else ()) else column


def _as_lists(array: Any) -> Any:
    if array.dtype != object:
        return array.tolist()
    return [_as_lists(row) if isinstance(row, np.ndarray) else row.decode(errors="replace") for row in array]


# What MLflow asks of a target itself: help, and a way to run a model without a server that is there.

_HELP = """\
Deploys models of MLflow to a running server (Nerite or Triton), by way of its model repository.

The server has to be in the control mode 'explicit':
    nerite serve models --model-control-mode=explicit
and is found by these variables, or by the target's name:
    NERITE_URL, or TRITON_URL                          HOST:PORT of its HTTP port (default: localhost:8000)
    NERITE_MODEL_REPOSITORY, or TRITON_MODEL_REPO      the repository: a folder (default: models), or s3://…, gs://…, as://…
    nerite:http://HOST:PORT                            as the target, for the server

Flavours: triton, onnx, xgboost, lightgbm, catboost, tensorflow, transformers, pytorch, sklearn; without --flavor the
first of these that the model has.

Settings, as in --config version=2:
    version=N     deploy it as this version, beside the others (default: it is the model's only one)
    trust=true    run code that is in the model: to read a pickle of sklearn
"""


class RunPlace(NamedTuple):
    """Where deployments go."""

    url: str
    depot: Depot

    @classmethod
    def of(cls, target_uri: str, environment: Mapping[str, str]) -> RunPlace:
        """Return the place that a target's URI and the environment name. Raises ``MlflowException``."""
        _, _, suffix = target_uri.partition(":")
        url = suffix.strip("/") or environment.get("NERITE_URL") or environment.get("TRITON_URL") or "localhost:8000"
        repository = environment.get("NERITE_MODEL_REPOSITORY") or environment.get("TRITON_MODEL_REPO") or "models"
        return cls(url, _depot(repository, environment))


def _depot(repository: str, environment: Mapping[str, str]) -> Depot:
    if not is_remote(repository):
        return FolderDepot(Path(repository))
    try:
        return BucketDepot(repository_at(repository, environment))
    except NeriteError as error:
        raise MlflowException(error.message) from None


def target_help() -> str:
    """Return what ``mlflow deployments help`` prints."""
    return _HELP


def run_local(
    target: str, name: str, model_uri: str, flavor: str | None = None, config: dict[str, Any] | None = None
) -> NoReturn:
    """Say how it is done instead."""
    folder = os.environ.get("NERITE_MODEL_REPOSITORY", "models")
    raise MlflowException(
        f"The target {target} has no server of its own. Start one, and deploy to it: "
        f"nerite serve {folder} --model-control-mode=explicit"
    )


_NOTE: Final = "mlflow-meta.json"
"""What is noted of a deployment, in its model's directory; Triton's plugin has the same."""
_GONE: Final = "unloaded"
"""What servers say of a version that was there and is no more."""
_EXPLICIT: Final = "The server has to be started with --model-control-mode=explicit."


class NeriteDeployments(BaseDeploymentClient):
    """Deployments on one server. Every method raises ``MlflowException`` if it cannot do what it is for."""

    def __init__(self, target_uri: str) -> None:
        super().__init__(target_uri)  # type: ignore[no-untyped-call]  # it has no annotations
        place = RunPlace.of(target_uri, os.environ)
        self._url = place.url
        self._depot = place.depot

    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Deploy a model that is not there; return when it can be asked."""
        return self._deploy(name, model_uri, flavor, config or {}, replace=False)

    def update_deployment(
        self,
        name: str,
        model_uri: str | None = None,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Put another model in the place of one that is there, without losing a request."""
        deployed = self.get_deployment(name)
        uri = model_uri or deployed["mlflow_model_uri"]
        return self._deploy(name, uri, flavor, config or {}, replace=True)

    def delete_deployment(self, name: str, config: dict[str, Any] | None = None, endpoint: str | None = None) -> None:
        """Unload a model, and remove its files. One that is not there is no mistake."""
        with self._client() as client:
            try:
                client.unload(name)
            except ClientError as error:
                if error.status != 400 and error.status != 404:
                    raise MlflowException(str(error)) from None
        try:
            self._depot.remove(name)
        except NeriteError as error:
            raise MlflowException(error.message) from None

    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        """Return every version of every model that MLflow has deployed, with its state in the server."""
        with self._client() as client:
            try:
                versions = client.models()
            except ClientError as error:
                raise MlflowException(str(error)) from None
        noted = {version.name: self._note(version.name) for version in versions}
        return [
            {"name": each.name, "version": each.version, "state": each.state, "reason": each.reason, **noted[each.name]}
            for each in versions
            if noted[each.name] and each.state and each.reason != _GONE
        ]

    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        """Return what is known of one deployment."""
        found = [each for each in self.list_deployments() if each["name"] == name]
        if not found:
            raise MlflowException(f"There is no deployment '{name}'.", error_code=RESOURCE_DOES_NOT_EXIST)
        return found[-1]

    def predict(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> Predictions:
        """Ask a deployment; return its outputs by name.

        ``inputs`` are arrays or lists by name; or a pandas DataFrame with a column for each input, or for each feature
        of the only input; or an array, for the only input.
        """
        if not deployment_name:
            raise MlflowException("Which deployment is to predict?", error_code=INVALID_PARAMETER_VALUE)
        with self._client() as client:
            try:
                model = client.model(deployment_name)
                return Predictions(outputs=client.infer(deployment_name, arrays_of(model, inputs)))
            except ClientError as error:
                raise MlflowException(str(error)) from None

    def _deploy(
        self, name: str, model_uri: str, flavor: str | None, config: dict[str, Any], *, replace: bool
    ) -> dict[str, Any]:
        version = int(config["version"]) if "version" in config else None
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri))
        # A model of the flavour triton, or one that was logged without MLmodel, has none to choose from.
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
                # The server it is for tries it.
                load=False,
                notes={_NOTE: json.dumps({"name": name, "mlflow_model_uri": model_uri, "flavor": flavor or ""})},
            )

        try:
            outcome = self._depot.add(order, lambda: self._load(name))
        except AlreadyExists as error:
            raise MlflowException(error.message, error_code=RESOURCE_ALREADY_EXISTS) from None
        except NeriteError as error:
            raise MlflowException(error.message, error_code=INVALID_PARAMETER_VALUE) from None
        return {"name": name, "flavor": flavor or "", "version": outcome.destination.version}

    def _load(self, name: str) -> None:
        try:
            with self._client() as client:
                client.load(name)
        except ClientError as error:
            remedy = f" {_EXPLICIT}" if "not allowed" in str(error) else ""
            raise MlflowException(f"{error}{remedy}") from None

    def _client(self) -> Client:
        try:
            return Client(self._url)
        except ClientError as error:
            raise MlflowException(str(error)) from None

    def _note(self, name: str) -> dict[str, Any]:
        try:
            note: dict[str, Any] = json.loads(self._depot.note(name, _NOTE) or b"{}")
        except ValueError:
            return {}
        except NeriteError as error:
            raise MlflowException(error.message) from None
        return note
