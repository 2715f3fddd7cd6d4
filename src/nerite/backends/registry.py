"""The backends there are, by the name that a configuration gives them.

A name is looked for among our own, in the backend directory (``directory.py``), and among the installed packages
(``packages.py``), in this order.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, cast

from nerite.backends import directory, packages
from nerite.backends.interface import Backend, Discerning, ModelContext, Preparing
from nerite.config.backend_choice import fitting
from nerite.config.model_config import ModelConfig
from nerite.config.near import nearest
from nerite.core.errors import InvalidArgument, NotHere


class Entry(NamedTuple):
    """Where a backend of ours is, and what has to be installed for it."""

    module: str
    name: str
    """Of the class in the module."""
    package: str = ""
    """The framework's Python package; empty for a backend that needs nothing else, or sees to it itself."""
    extra: str = ""
    """The extra of ours that brings the framework."""


ENTRIES: Final[dict[str, Entry]] = {
    "fil": Entry("nerite.backends.trees", "TreesBackend", "treelite", "fil"),
    "litert": Entry("nerite.backends.litert", "LiteRtBackend", "ai_edge_litert", "litert"),
    "llm": Entry("nerite.backends.llm", "LlmBackend", extra="llm"),
    "onnxruntime": Entry("nerite.backends.onnxruntime", "OnnxRuntimeBackend", "onnxruntime", "onnx"),
    "openvino": Entry("nerite.backends.openvino", "OpenVinoBackend", "openvino", "openvino"),
    "python": Entry("nerite.backends.python", "PythonBackend"),
    "pytorch": Entry("nerite.backends.pytorch", "PyTorchBackend", "torch", "torch"),
    "tensorflow": Entry("nerite.backends.tensorflow", "TensorFlowBackend", "tensorflow", "tensorflow"),
    "tensorrt": Entry("nerite.backends.tensorrt", "TensorRtBackend", "tensorrt", "tensorrt"),
    "tensorrt_llm": Entry("nerite.backends.llm", "TensorRtLlmBackend"),
    "vllm": Entry("nerite.backends.llm", "VllmBackend"),
}

GENERATING: Final = frozenset(name for name, entry in ENTRIES.items() if entry.module == "nerite.backends.llm")
"""Those whose models have an engine that generates tokens."""


def backend_of(context: ModelContext) -> Backend:
    """Return the backend that a model's configuration names: always the same object for the same backend.

    The first call for a backend imports its module. Raises ``InvalidArgument`` for one that nobody has, ``Unsupported``
    where a package is missing or wrong.
    """
    name, runtime = context.config.get("backend", ""), context.config.get("runtime", "")
    place = context.settings.get(directory.SETTING, "")
    if name in ENTRIES:
        if context.environment and _lacks_framework(ENTRIES[name]):
            raise not_in_environment(context.name, ENTRIES[name].package)
        return backend(name)
    if runtime in ("", directory.RUNTIME) and (file := directory.code(place, name)) is not None:
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


def _lacks_framework(entry: Entry) -> bool:
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
    if config.backend in ENTRIES or config.runtime not in ("", directory.RUNTIME):
        return config
    file = directory.code(place, config.backend)
    return config if file is None else directory.filled_in(config, file)


@cache
def _written_in_python(name: str, file: Path) -> Backend:
    from nerite.backends.python import PythonBackend

    return PythonBackend(name, file)


_packaged: dict[str, Backend] = {}


def _of_a_package(name: str) -> Backend | None:
    """Return the backend that a package offers. One that is not there now may be installed a moment later."""
    if name not in _packaged and (found := packages.backend(name)) is not None:
        _packaged[name] = found
    return _packaged.get(name)


def _not_found(context: ModelContext, name: str, runtime: str, place: str) -> str:
    """Return Triton's words for a backend that is not there."""
    if not runtime:
        return (
            f"unable to find backend library for backend '{name}', try specifying runtime on the model configuration."
        )
    if runtime == directory.RUNTIME:
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
    library = directory.library(place, name)
    no_library = "" if library is None else f"'{library}' is no help: Nerite runs no shared libraries. "
    known = sorted({*ENTRIES, *directory.names(place), *packages.names()})
    hint = f"Did you mean {meant}? " if (meant := _meant(context, name, known)) else ""
    return (
        f"{no_library}The backends there are: {', '.join(known)}. {hint}Install the package that offers it, or put its "
        f"{directory.RUNTIME} into {Path(place, name)} (see --backend-directory)."
    )


def _meant(context: ModelContext, name: str, known: Collection[str]) -> str:
    """Return the backend that may be meant by an unknown one, as it is written; empty if nothing tells."""
    near = "" if name in known else nearest(name, known)
    if near:
        return f'backend: "{near}"'
    version = context.version_directory
    files = {entry.name: entry.is_dir() for entry in version.iterdir()} if version.is_dir() else {}
    return fitting(files)
