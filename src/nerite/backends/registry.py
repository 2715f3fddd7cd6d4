"""Registry of backends by the name that configurations use.

A name is looked up among the built-in backends, in the backend directory and among the installed packages, in this
order.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from nerite.backends.interface import INTERFACE, Backend, ModelContext, PreparesModels, SelectivelyIsolated
from nerite.backends.machine import without_telemetry
from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument, NotInstalled, Unsupported

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from nerite.config.model_config import ModelConfig

# The backend directory: ``<directory>/<name>/model.py`` is the backend ``<name>``, written in Python.
#
# Triton calls them Python-based backends. The file has the form of a Python model's ``model.py`` and serves all models
# that name the backend; their version directories contain only artifacts. An environment archive next to the file
# applies to all these models, unless they configure another one.

SETTING: Final = "backend-directory"
"""Key of the backend directory in ``ModelContext.settings``."""
RUNTIME: Final = "model.py"
"""File name of such a backend, and the value of ``runtime`` in configurations that use it."""
_ENVIRONMENT: Final = "pb_exec_env_model.py.tar.gz"
ENVIRONMENT_PARAMETER: Final = "EXECUTION_ENV_PATH"


def backend_code(directory: str, name: str) -> Path | None:
    """Return the file of the backend ``name``; None if the directory does not have it."""
    # A name with a slash could leave the directory.
    file = Path(directory, name, RUNTIME).absolute()
    return file if directory and name and "/" not in name and file.is_file() else None


def backend_library(directory: str, name: str) -> Path | None:
    """Return the shared library of Triton's backend ``name``, or None."""
    file = Path(directory, name, f"libtriton_{name}.so")
    return file if directory and file.is_file() else None


def directory_names(directory: str) -> list[str]:
    """Return the names of the backends in the directory."""
    return [file.parent.name for file in Path(directory).glob(f"*/{RUNTIME}")] if directory else []


def fill_in_from_directory(config: ModelConfig, file: Path) -> ModelConfig:
    """Complete the configuration of a model that the backend ``file`` serves: runtime and environment."""
    from nerite.config.model_config import ModelParameter  # workers need no configurations

    parameters = config.parameters
    environment = file.with_name(_ENVIRONMENT)
    if ENVIRONMENT_PARAMETER not in parameters and environment.exists():
        parameters = {**parameters, ENVIRONMENT_PARAMETER: ModelParameter(string_value=str(environment))}
    return dataclasses.replace(config, runtime=RUNTIME, parameters=parameters)


# Backends from Python packages, as entry points of the group ``nerite.backends``.
#
# An entry point refers to a class that implements ``Backend`` of ``interface.py``. Scanning the installed packages is
# slow, so it is done only for names that are unknown otherwise.

GROUP: Final = "nerite.backends"


def package_names() -> list[str]:
    """Return the names of the backends that installed packages offer."""
    return [point.name for point in _points()]


def package_of(name: str) -> str:
    """Return the package that offers the backend ``name``, as pip takes it with its version; "" if there is none."""
    return next((f"{each.dist.name}=={each.dist.version}" for each in _points(name) if each.dist is not None), "")


def package_backend(name: str) -> Backend | None:
    """Create the backend ``name``; return None if no package offers it. Imports the package's module.

    Raises ``Unsupported`` if two packages offer it, it cannot be imported, or it is for another interface version.
    """
    points = _points(name)
    if not points:
        return None
    if len(points) > 1:
        packages = " and ".join(map(_package, points))
        raise Unsupported(f"backend '{name}' is offered by the packages {packages}: uninstall all but one of them")
    (point,) = points
    offered = f"backend '{name}' of the package {_package(point)}"
    try:
        found = point.load()()
    except Exception as error:  # a module may raise anything
        raise NotInstalled(f"{offered} cannot be imported: {type(error).__name__}: {error}") from error
    written_for = getattr(found, "interface", None)
    if written_for != INTERFACE:
        raise Unsupported(
            f"{offered} is written for version {written_for} of the backend interface; this Nerite has version "
            f"{INTERFACE}. Install a version of the package that supports it"
        )
    return cast(Backend, found)


def _points(name: str | None = None) -> list[EntryPoint]:
    from importlib.metadata import entry_points  # slower than all other imports of a worker

    return list(entry_points(group=GROUP) if name is None else entry_points(group=GROUP, name=name))


def _package(point: EntryPoint) -> str:
    return "?" if point.dist is None else f"{point.dist.name} {point.dist.version}"


class BackendEntry(NamedTuple):
    """Class of a built-in backend, and the package that it needs."""

    module: str
    name: str
    """Name of the class in the module."""
    package: str = ""
    """The framework's Python package; empty for a backend that needs none, or checks for it itself."""
    extra: str = ""
    """The extra of Nerite that installs the framework."""


ENTRIES: Final[dict[str, BackendEntry]] = {
    "fil": BackendEntry("nerite.frameworks.trees", "TreesBackend", "treelite", "fil"),
    "litert": BackendEntry("nerite.frameworks.litert", "LiteRtBackend", "ai_edge_litert", "litert"),
    "llm": BackendEntry("nerite.llm.backend", "LlmBackend", extra="llm"),
    "onnxruntime": BackendEntry("nerite.backends.onnxruntime", "OnnxRuntimeBackend", "onnxruntime", "onnx"),
    "openvino": BackendEntry("nerite.frameworks.openvino", "OpenVinoBackend", "openvino", "openvino"),
    "python": BackendEntry("nerite.backends.python", "PythonBackend"),
    "pytorch": BackendEntry("nerite.frameworks.pytorch", "PyTorchBackend", "torch", "torch"),
    "tensorflow": BackendEntry("nerite.frameworks.tensorflow", "TensorFlowBackend", "tensorflow", "tensorflow"),
    "tensorrt": BackendEntry("nerite.frameworks.tensorrt", "TensorRtBackend", "tensorrt", "tensorrt"),
    "tensorrt_llm": BackendEntry("nerite.llm.backend", "TensorRtLlmBackend"),
    "vllm": BackendEntry("nerite.llm.backend", "VllmBackend"),
}

GENERATING: Final = frozenset(name for name, entry in ENTRIES.items() if entry.module == "nerite.llm.backend")
"""Backends whose models have an engine that generates tokens."""
STREAM_INPUT: Final = "stream"
"""Input of their models: only requests that set it get several responses."""
DEVICE_BACKENDS: Final = frozenset(("onnxruntime", "pytorch"))
"""Backends whose instances on a GPU take inputs, and return outputs, in its memory."""


def backend_of(context: ModelContext) -> Backend:
    """Return the backend that a model's configuration names: always the same object for the same backend.

    The first call for a backend imports its module. Raises ``InvalidArgument`` for an unknown backend, ``Unsupported``
    if a package is missing or unsuitable.
    """
    name, runtime = context.config.get("backend", ""), context.config.get("runtime", "")
    place = context.settings.get(SETTING, "")
    if name in ENTRIES:
        if context.environment and _lacks_framework(ENTRIES[name]):
            raise not_in_environment(context.name, ENTRIES[name].package)
        return backend(name)
    if runtime in ("", RUNTIME) and (file := backend_code(place, name)) is not None:
        return _written_in_python(name, file)
    if not runtime and (found := _of_a_package(name)) is not None:
        return found
    raise InvalidArgument(f"{_not_found(context, name, runtime, place)} {_known(context, name, place)}")


@cache
def backend(name: str) -> Backend:
    """Return the built-in backend ``name``: always the same object. The first call imports its module.

    Raises ``Unsupported`` if the framework is not installed.
    """
    entry = ENTRIES[name]
    if _lacks_framework(entry):
        raise NotInstalled(
            f"backend '{name}' needs the Python package '{entry.package}', which is not installed. "
            f"Install it with: pip install 'nerite[{entry.extra}]'"
        )
    return cast(Backend, getattr(importlib.import_module(entry.module), entry.name)())


def import_framework(context: ModelContext) -> None:
    """Import the backend of a model and its framework. Raises as ``backend_of``."""
    backend_of(context)
    entry = ENTRIES.get(context.config.get("backend", ""))
    if entry is not None and entry.package:
        with without_telemetry():
            importlib.import_module(entry.package)


def is_installed(name: str) -> bool:
    """Return whether the framework of the built-in backend ``name`` is installed."""
    return not _lacks_framework(ENTRIES[name])


def _lacks_framework(entry: BackendEntry) -> bool:
    return bool(entry.package) and importlib.util.find_spec(entry.package) is None


def not_in_environment(model: str, package: str) -> NotInstalled:
    """Return the error for a package that is missing in a model's own environment, in whose Python this runs."""
    package = package.replace("_", "-")
    return NotInstalled(
        f"the environment of model '{model}' (EXECUTION_ENV_PATH) lacks the Python package '{package}'. Add it to the "
        f"environment's list of packages, or install it there: {sys.executable} -m pip install {package}"
    )


def is_isolated(found: Backend, context: ModelContext) -> bool:
    """Return whether the instances of a model run in worker processes; the default if its backend does not say.

    May read the model's files. Raises ``NeriteError`` with what is wrong with them.
    """
    if isinstance(found, SelectivelyIsolated):
        return found.isolates(context)
    return getattr(found, "isolated", True)


def prepared(context: ModelContext) -> Path | None:
    """Let the backend prepare a model; return the Python interpreter for its workers, None for the server's.

    May take minutes. Raises as ``backend_of``, and ``NeriteError`` if the preparation fails.
    """
    found = backend_of(context)
    return found.prepare(context) if isinstance(found, PreparesModels) else None


def filled_in(config: ModelConfig, place: str) -> ModelConfig:
    """Complete ``config`` if its backend is in the backend directory ``place``."""
    if config.backend in ENTRIES or config.runtime not in ("", RUNTIME):
        return config
    file = backend_code(place, config.backend)
    return config if file is None else fill_in_from_directory(config, file)


@cache
def _written_in_python(name: str, file: Path) -> Backend:
    from nerite.backends.python import PythonBackend

    return PythonBackend(name, file)


packaged_backends: dict[str, Backend] = {}


def _of_a_package(name: str) -> Backend | None:
    """Return the backend that a package offers. Misses are not cached, as the package may be installed later."""
    if name not in packaged_backends and (found := package_backend(name)) is not None:
        packaged_backends[name] = found
    return packaged_backends.get(name)


def _not_found(context: ModelContext, name: str, runtime: str, place: str) -> str:
    """Return Triton's text for a backend that is not found."""
    if not runtime:
        return (
            f"unable to find backend library for backend '{name}', try specifying runtime on the model configuration."
        )
    if runtime == RUNTIME:
        searched = Path(place, name, runtime)
        return (
            f"unable to find Python backend based backend library '{runtime}' for model '{context.name}', "
            f"searched: '{searched}'."
        )
    searched_in = (context.version_directory, context.directory, Path(place, name))
    places = " ".join(f"'{each}'" for each in searched_in)
    return (
        f"unable to find backend library '{runtime}' for model '{context.name}', searched: {places} . "
        "Nerite cannot run shared libraries: remove 'runtime' from the configuration."
    )


def _known(context: ModelContext, name: str, place: str) -> str:
    """List the available backends, suggest one, and say how to add others."""
    library = backend_library(place, name)
    no_library = "" if library is None else f"'{library}' cannot be used: Nerite cannot run shared libraries. "
    known = sorted({*ENTRIES, *directory_names(place), *package_names()})
    hint = f"Did you mean {meant}? " if (meant := _meant(context, name, known)) else ""
    return (
        f"{no_library}The available backends are: {', '.join(known)}. {hint}Install the package that offers it, or put "
        f"its {RUNTIME} into {Path(place, name)} (see --backend-directory)."
    )


def _meant(context: ModelContext, name: str, known: Collection[str]) -> str:
    """Return the backend that an unknown name may mean, in configuration syntax; empty without a suggestion."""
    from nerite.config.defaults import fitting  # workers need no configurations

    near = "" if name in known else nearest(name, known)
    if near:
        return f'backend: "{near}"'
    version = context.version_directory
    files = {entry.name: entry.is_dir() for entry in version.iterdir()} if version.is_dir() else {}
    return fitting(files)
