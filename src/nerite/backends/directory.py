"""The backend directory: ``<directory>/<name>/model.py`` is the backend called ``<name>``, written in Python.

Triton calls them python-based backends. The file is what a Python model's own ``model.py`` is, and serves all models
that name the backend; these have nothing but artifacts in their version directories. An environment in an archive
beside it is that of all its models, unless they ask for another.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from nerite.config.model_config import ModelConfig, ModelParameter

SETTING: Final = "backend-directory"
"""The one of ``ModelContext.settings`` that says where the directory is."""
RUNTIME: Final = "model.py"
"""The file, and what a configuration calls ``runtime`` then."""
_ENVIRONMENT: Final = "pb_exec_env_model.py.tar.gz"
_ENVIRONMENT_PARAMETER: Final = "EXECUTION_ENV_PATH"


def code(directory: str, name: str) -> Path | None:
    """Return the file that is the backend ``name``; None where the directory has none."""
    # A name with a slash would lead out of the directory.
    file = Path(directory, name, RUNTIME).absolute()
    return file if directory and name and "/" not in name and file.is_file() else None


def library(directory: str, name: str) -> Path | None:
    """Return the shared library that is Triton's backend ``name``, where there is one."""
    file = Path(directory, name, f"libtriton_{name}.so")
    return file if directory and file.is_file() else None


def names(directory: str) -> list[str]:
    """Return the backends that the directory has."""
    return [file.parent.name for file in Path(directory).glob(f"*/{RUNTIME}")] if directory else []


def filled_in(config: ModelConfig, file: Path) -> ModelConfig:
    """Return the configuration of a model that ``file`` serves, with what follows from that."""
    parameters = config.parameters
    environment = file.with_name(_ENVIRONMENT)
    if _ENVIRONMENT_PARAMETER not in parameters and environment.exists():
        parameters = {**parameters, _ENVIRONMENT_PARAMETER: ModelParameter(string_value=str(environment))}
    return dataclasses.replace(config, runtime=RUNTIME, parameters=parameters)
