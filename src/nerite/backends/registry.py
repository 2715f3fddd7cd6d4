"""The backends there are, by the name that a configuration gives them.

A name is looked for among our own, in the backend directory (``directory.py``), and among the installed packages
(``packages.py``), in this order.
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

from nerite.backends.interface import INTERFACE, Backend, Discerning, ModelContext, Preparing
from nerite.config.defaults import fitting
from nerite.config.mistake import nearest
from nerite.config.model_config import ModelConfig, ModelParameter
from nerite.core.errors import InvalidArgument, NotHere, Unsupported

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# The backend directory: ``<directory>/<name>/model.py`` is the backend called ``<name>``, written in Python.
#
# Triton calls them python-based backends. The file is what a Python model's own ``model.py`` is, and serves all
# models that name the backend; these have nothing but artifacts in their version directories. An environment in an
# archive beside it is that of all its models, unless they ask for another.

SETTING: Final = "backend-directory"
"""The one of ``ModelContext.settings`` that says where the directory is."""
RUNTIME: Final = "model.py"
"""The file, and what a configuration calls ``runtime`` then."""
_ENVIRONMENT: Final = "pb_exec_env_model.py.tar.gz"
_ENVIRONMENT_PARAMETER: Final = "EXECUTION_ENV_PATH"


def backend_code(directory: str, name: str) -> Path | None:
    """Return the file that is the backend ``name``; None where the directory has none."""
    # A name with a slash would lead out of the directory.
    file = Path(directory, name, RUNTIME).absolute()
    return file if directory and name and "/" not in name and file.is_file() else None


def backend_library(directory: str, name: str) -> Path | None:
    """Return the shared library that is Triton's backend ``name``, where there is one."""
    file = Path(directory, name, f"libtriton_{name}.so")
    return file if directory and file.is_file() else None


def directory_names(directory: str) -> list[str]:
    """Return the backends that the directory has."""
    return [file.parent.name for file in Path(directory).glob(f"*/{RUNTIME}")] if directory else []


def fill_in_from_directory(config: ModelConfig, file: Path) -> ModelConfig:
    """Return the configuration of a model that ``file`` serves, with what follows from that."""
    parameters = config.parameters
    environment = file.with_name(_ENVIRONMENT)
    if _ENVIRONMENT_PARAMETER not in parameters and environment.exists():
        parameters = {**parameters, _ENVIRONMENT_PARAMETER: ModelParameter(string_value=str(environment))}
    return dataclasses.replace(config, runtime=RUNTIME, parameters=parameters)


# Backends from Python packages: any package may offer some, as entry points of the group ``nerite.backends``.
#
# An entry point leads to a class like ``Backend`` of ``interface.py``. Reading what is installed takes a moment, so
# it is done only for names that nobody else knows.

GROUP: Final = "nerite.backends"


def package_names() -> list[str]:
    """Return the backends that installed packages offer."""
    return [point.name for point in _points()]


def package_backend(name: str) -> Backend | None:
    """Make the backend ``name``; return None where no package offers it. Imports the package's module.

    Raises ``Unsupported`` where two packages offer it, it cannot be imported, or is for another interface.
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
    except Exception as error:  # whatever its module raises is what is wrong with it
        raise NotHere(f"{offered} cannot be imported: {type(error).__name__}: {error}") from error
    written_for = getattr(found, "interface", None)
    if written_for != INTERFACE:
        raise Unsupported(
            f"{offered} is written for version {written_for} of the interface of backends; this Nerite has version "
            f"{INTERFACE}. Install a version of the package for it"
        )
    return cast(Backend, found)


def _points(name: str | None = None) -> list[EntryPoint]:
    from importlib.metadata import entry_points  # takes longer than all the rest that a worker imports

    return list(entry_points(group=GROUP) if name is None else entry_points(group=GROUP, name=name))


def _package(point: EntryPoint) -> str:
    return "?" if point.dist is None else f"{point.dist.name} {point.dist.version}"


class BackendEntry(NamedTuple):
    """Where a backend of ours is, and what has to be installed for it."""

    module: str
    name: str
    """Of the class in the module."""
    package: str = ""
    """The framework's Python package; empty for a backend that needs nothing else, or sees to it itself."""
    extra: str = ""
    """The extra of ours that brings the framework."""


ENTRIES: Final[dict[str, BackendEntry]] = {
    "fil": BackendEntry("nerite.frameworks.trees", "TreesBackend", "treelite", "fil"),
    "litert": BackendEntry("nerite.frameworks.litert", "LiteRtBackend", "ai_edge_litert", "litert"),
    "llm": BackendEntry("nerite.llm", "LlmBackend", extra="llm"),
    "onnxruntime": BackendEntry("nerite.backends.onnxruntime", "OnnxRuntimeBackend", "onnxruntime", "onnx"),
    "openvino": BackendEntry("nerite.frameworks.openvino", "OpenVinoBackend", "openvino", "openvino"),
    "python": BackendEntry("nerite.backends.python", "PythonBackend"),
    "pytorch": BackendEntry("nerite.frameworks.pytorch", "PyTorchBackend", "torch", "torch"),
    "tensorflow": BackendEntry("nerite.frameworks.tensorflow", "TensorFlowBackend", "tensorflow", "tensorflow"),
    "tensorrt": BackendEntry("nerite.frameworks.tensorrt", "TensorRtBackend", "tensorrt", "tensorrt"),
    "tensorrt_llm": BackendEntry("nerite.llm", "TensorRtLlmBackend"),
    "vllm": BackendEntry("nerite.llm", "VllmBackend"),
}

GENERATING: Final = frozenset(name for name, entry in ENTRIES.items() if entry.module == "nerite.llm")
"""Those whose models have an engine that generates tokens."""


def backend_of(context: ModelContext) -> Backend:
    """Return the backend that a model's configuration names: always the same object for the same backend.

    The first call for a backend imports its module. Raises ``InvalidArgument`` for one that nobody has, ``Unsupported``
    where a package is missing or wrong.
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
    """Return the backend of ours called ``name``: always the same object. Its module is imported by the first call.

    Raises ``Unsupported`` where the framework is not installed.
    """
    entry = ENTRIES[name]
    if _lacks_framework(entry):
        raise NotHere(
            f"backend '{name}' needs the Python package '{entry.package}', which is not installed. "
            f"Install it with: pip install 'nerite[{entry.extra}]'"
        )
    return cast(Backend, getattr(importlib.import_module(entry.module), entry.name)())


def is_installed(name: str) -> bool:
    """Return whether the framework of the backend of ours called ``name`` is there."""
    return not _lacks_framework(ENTRIES[name])


def _lacks_framework(entry: BackendEntry) -> bool:
    return bool(entry.package) and importlib.util.find_spec(entry.package) is None


def not_in_environment(model: str, package: str) -> NotHere:
    """Return what to say in the Python of a model's own environment."""
    package = package.replace("_", "-")
    return NotHere(
        f"the environment of model '{model}' (EXECUTION_ENV_PATH) lacks the Python package '{package}'. Add it to the "
        f"list that the environment is made of, or install it there: {sys.executable} -m pip install {package}"
    )


def is_isolated(found: Backend, context: ModelContext) -> bool:
    """Return whether the instances of a model run in worker processes; they do where its backend does not say.

    May look at the model's files. Raises ``NeriteError`` with what is wrong with them.
    """
    if isinstance(found, Discerning):
        return found.isolates(context)
    return getattr(found, "isolated", True)


def prepared(context: ModelContext) -> Path | None:
    """Have made what a model's workers need, as its backend knows; return their Python, None for the server's.

    May take minutes. Raises as ``backend_of``, and ``NeriteError`` where it cannot be made.
    """
    found = backend_of(context)
    return found.prepare(context) if isinstance(found, Preparing) else None


def filled_in(config: ModelConfig, place: str) -> ModelConfig:
    """Return ``config`` with what follows from a backend in the backend directory ``place``, if it is one."""
    if config.backend in ENTRIES or config.runtime not in ("", RUNTIME):
        return config
    file = backend_code(place, config.backend)
    return config if file is None else fill_in_from_directory(config, file)


@cache
def _written_in_python(name: str, file: Path) -> Backend:
    from nerite.backends.python import PythonBackend

    return PythonBackend(name, file)


_packaged: dict[str, Backend] = {}


def _of_a_package(name: str) -> Backend | None:
    """Return the backend that a package offers. One that is not there now may be installed a moment later."""
    if name not in _packaged and (found := package_backend(name)) is not None:
        _packaged[name] = found
    return _packaged.get(name)


def _not_found(context: ModelContext, name: str, runtime: str, place: str) -> str:
    """Return Triton's words for a backend that is not there."""
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
        "Nerite runs no shared libraries: take 'runtime' out of the configuration."
    )


def _known(context: ModelContext, name: str, place: str) -> str:
    """Return what there is instead, which of it may be meant, and how more come."""
    library = backend_library(place, name)
    no_library = "" if library is None else f"'{library}' is no help: Nerite runs no shared libraries. "
    known = sorted({*ENTRIES, *directory_names(place), *package_names()})
    hint = f"Did you mean {meant}? " if (meant := _meant(context, name, known)) else ""
    return (
        f"{no_library}The backends there are: {', '.join(known)}. {hint}Install the package that offers it, or put its "
        f"{RUNTIME} into {Path(place, name)} (see --backend-directory)."
    )


def _meant(context: ModelContext, name: str, known: Collection[str]) -> str:
    """Return the backend that may be meant by an unknown one, as it is written; empty if nothing tells."""
    near = "" if name in known else nearest(name, known)
    if near:
        return f'backend: "{near}"'
    version = context.version_directory
    files = {entry.name: entry.is_dir() for entry in version.iterdir()} if version.is_dir() else {}
    return fitting(files)
