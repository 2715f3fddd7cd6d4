"""The command ``serve`` of the image: starts the server as Docker, Amazon SageMaker and Vertex AI expect it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from nerite.cli.command import complain
from nerite.cli.command_line import run

MODELS: Final = "/models"
"""The repository that is served unless the command line or the cloud names another."""
SAGEMAKER_MODEL: Final = Path("/opt/ml/model")
"""Where SageMaker unpacks the only model of an endpoint."""
_SAGEMAKER_MODELS: Final = Path("/tmp/sagemaker")
"""An empty repository: SageMaker loads the models of a multi-model endpoint by their own paths."""


class StartCommand(NamedTuple):
    """How to start the server."""

    arguments: tuple[str, ...]
    """Command line of ``nerite serve``."""
    environment: Mapping[str, str]
    """Environment variables to set in addition."""


def main(arguments: Sequence[str]) -> int:
    """Serve until shut down; return the exit status."""
    try:
        command = start_command(arguments, os.environ, SAGEMAKER_MODEL)
    except ValueError as error:
        complain("serve", str(error))
        return 1
    if str(_SAGEMAKER_MODELS) in command.arguments:
        _SAGEMAKER_MODELS.mkdir(exist_ok=True)
    os.environ.update(command.environment)
    return run(command.arguments)


def start_command(arguments: Sequence[str], environment: Mapping[str, str], model: Path) -> StartCommand:
    """Return how to start the server: with ``arguments`` if there are any, or else as the environment demands.

    ``model`` is SageMaker's directory of a single model. Raises ``ValueError`` if it is not clear which one to serve.
    """
    if arguments:
        return StartCommand(tuple(arguments), {})
    if environment.get("SAGEMAKER_MULTI_MODEL") == "true":
        ping = {"SAGEMAKER_TRITON_PING_MODE": _ping_mode(environment, "live")}
        return StartCommand((str(_SAGEMAKER_MODELS), "--model-namespacing=true", *_sagemaker(environment)), ping)
    if model.is_dir():
        name = environment.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME") or _only_model(model)
        return StartCommand(
            (str(model), f"--load-model={name}", *_sagemaker(environment)),
            {
                "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": name,
                "SAGEMAKER_TRITON_PING_MODE": _ping_mode(environment, "ready"),
            },
        )
    if environment.get("AIP_STORAGE_URI"):  # Vertex AI, whose variables the server itself reads
        return StartCommand((), {})
    return StartCommand((MODELS,), {})


def _sagemaker(environment: Mapping[str, str]) -> Sequence[str]:
    port = environment.get("SAGEMAKER_BIND_TO_PORT") or "8080"
    return (
        "--model-control-mode=explicit",
        "--allow-sagemaker=true",
        f"--sagemaker-port={port}",
        *(f"--allow-{each}=false" for each in ("http", "grpc", "metrics")),
    )


def _ping_mode(environment: Mapping[str, str], usual: str) -> str:
    return environment.get("SAGEMAKER_TRITON_OVERRIDE_PING_MODE") or usual


def _only_model(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise ValueError(
            f"{directory} must contain the directory of one model, and has: {found}. "
            "Set SAGEMAKER_TRITON_DEFAULT_MODEL_NAME to the model that /invocations is to run."
        )
    return names[0]
