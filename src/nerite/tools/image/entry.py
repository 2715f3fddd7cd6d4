"""The command ``serve`` of the image: starts the server as Docker, KServe, Amazon SageMaker and Vertex AI expect it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nerite.cli.command import complain
from nerite.cli.command_line import run

MODELS: Final = "/models"
"""The repository that is served unless the command line or the cloud names another."""
SAGEMAKER_MODEL: Final = Path("/opt/ml/model")
"""Where SageMaker unpacks the only model of an endpoint."""
MADE: Final = "/tmp/models"
"""A repository that is made here: the one of a multi-model endpoint, which begins empty, or of a single directory."""
_LOADING: Final = "--model-control-mode=explicit"


@dataclass(frozen=True, slots=True)
class StartCommand:
    """How to start the server."""

    arguments: tuple[str, ...] = ()
    """Command line of ``nerite serve``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set in addition."""
    model: tuple[str, str] | None = None
    """Name and directory of a model's files that are to be the only version of a model in ``MADE``."""


def main(arguments: Sequence[str]) -> int:
    """Serve until shut down; return the exit status."""
    try:
        command = start_command(arguments, os.environ, SAGEMAKER_MODEL)
        if MADE in command.arguments:
            make_repository(Path(MADE), command.model)
    except (ValueError, OSError) as error:
        complain("serve", str(error))
        return 1
    os.environ.update(command.environment)
    return run(command.arguments)


def make_repository(repository: Path, model: tuple[str, str] | None) -> None:
    """Make a repository that is empty, or has one model, whose version 1 is a link to a directory."""
    repository.mkdir(exist_ok=True)
    if model is not None:
        name, directory = model
        (repository / name).mkdir(exist_ok=True)
        version = repository / name / "1"
        version.unlink(missing_ok=True)  # of an earlier start of the same container
        version.symlink_to(Path(directory).resolve(strict=True))


def start_command(arguments: Sequence[str], environment: Mapping[str, str], model: Path) -> StartCommand:
    """Return how to start the server: with ``arguments`` if there are any, or else as the environment demands.

    ``model`` is SageMaker's directory of a single model. Raises ``ValueError`` if it is not clear what to serve.
    """
    if any(argument.partition("=")[0] == "--model" for argument in arguments):
        return _of_vllm(arguments)
    if arguments:
        return StartCommand(tuple(arguments))
    if environment.get("SAGEMAKER_MULTI_MODEL") == "true":
        ping = {"SAGEMAKER_TRITON_PING_MODE": _ping_mode(environment, "live")}
        return StartCommand((MADE, _LOADING, "--model-namespacing=true", *_sagemaker(environment)), ping)
    if model.is_dir():
        name = environment.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME") or _only_model(model)
        variables = {
            "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": name,
            "SAGEMAKER_TRITON_PING_MODE": _ping_mode(environment, "ready"),
        }
        return StartCommand((str(model), _LOADING, f"--load-model={name}", *_sagemaker(environment)), variables)
    if environment.get("AIP_STORAGE_URI"):
        return StartCommand()  # Vertex AI, whose variables the server itself reads
    return StartCommand((MODELS,))


def _of_vllm(arguments: Sequence[str]) -> StartCommand:
    """Translate the arguments with which vLLM serves one directory; others are ``nerite serve``'s."""
    given: dict[str, str] = {}
    others = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in ("--model", "--served-model-name", "--port", "--host"):
            given[name] = value if equals else next(rest, "")
        else:
            others.append(argument)
    directory = given["--model"]
    name = given.get("--served-model-name") or Path(directory).name
    if not directory or Path(name).name != name:
        raise ValueError(
            "--model must be a directory and --served-model-name a name without slashes, "
            f"not '{directory}' and '{name}'"
        )
    return StartCommand((MADE, *_ports(given), *others), model=(name, directory))


def _ports(given: Mapping[str, str]) -> Iterator[str]:
    if "--port" in given:
        yield f"--http-port={given['--port']}"
    if "--host" in given:
        yield f"--address={given['--host']}"


def _sagemaker(environment: Mapping[str, str]) -> Sequence[str]:
    port = environment.get("SAGEMAKER_BIND_TO_PORT") or "8080"
    closed = (f"--allow-{each}=false" for each in ("http", "grpc", "metrics"))
    return ("--allow-sagemaker=true", f"--sagemaker-port={port}", *closed)


def _ping_mode(environment: Mapping[str, str], usual: str) -> str:
    return environment.get("SAGEMAKER_TRITON_OVERRIDE_PING_MODE") or usual


def _only_model(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
    if len(names) != 1:
        raise ValueError(
            f"{directory} must contain the directory of one model, and has: {', '.join(names) or 'none'}. "
            "Set SAGEMAKER_TRITON_DEFAULT_MODEL_NAME to the model that /invocations is to run."
        )
    return names[0]
