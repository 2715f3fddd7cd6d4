"""What MLflow asks of a target itself: help, and a way to run a model without a server that is there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mlflow.exceptions import MlflowException

from nerite.core.errors import NeriteError
from nerite.mlflow_plugin.depots import Bucket, Depot, Folder
from nerite.repository.remote import is_remote, repository_at

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


class Place(NamedTuple):
    """Where deployments go."""

    url: str
    depot: Depot

    @classmethod
    def of(cls, target_uri: str, environment: Mapping[str, str]) -> Place:
        """Return the place that a target's URI and the environment name. Raises ``MlflowException``."""
        _, _, suffix = target_uri.partition(":")
        url = suffix.strip("/") or environment.get("NERITE_URL") or environment.get("TRITON_URL") or "localhost:8000"
        repository = environment.get("NERITE_MODEL_REPOSITORY") or environment.get("TRITON_MODEL_REPO") or "models"
        return cls(url, _depot(repository, environment))


def _depot(repository: str, environment: Mapping[str, str]) -> Depot:
    if not is_remote(repository):
        return Folder(Path(repository))
    try:
        return Bucket(repository_at(repository, environment))
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
