"""``NeriteDeployments``: what MLflow calls for a deployment's life."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import mlflow.artifacts
from mlflow.deployments import BaseDeploymentClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST

from nerite.client import Client, ClientError
from nerite.core.errors import AlreadyExists, NeriteError
from nerite.intake.order import Order
from nerite.mlflow_plugin.predictions import Predictions, arrays_of
from nerite.mlflow_plugin.target import Place

_NOTE: Final = "mlflow-meta.json"
"""What is noted of a deployment, in its model's directory; Triton's plugin has the same."""
_GONE: Final = "unloaded"
"""What servers say of a version that was there and is no more."""
_EXPLICIT: Final = "The server has to be started with --model-control-mode=explicit."


class NeriteDeployments(BaseDeploymentClient):
    """Deployments on one server. Every method raises ``MlflowException`` if it cannot do what it is for."""

    def __init__(self, target_uri: str) -> None:
        super().__init__(target_uri)  # type: ignore[no-untyped-call]  # it has no annotations
        place = Place.of(target_uri, os.environ)
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

        def order(repository: Path) -> Order:
            return Order(
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
