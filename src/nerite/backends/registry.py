"""The backends there are, by the name that a configuration gives them."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Final, NamedTuple, cast

from nerite.backends.interface import Backend
from nerite.core.errors import InvalidArgument, Unsupported


class Entry(NamedTuple):
    """Where a backend is, and what has to be installed for it."""

    module: str
    name: str
    """Of the class in the module."""
    package: str = ""
    """The framework's Python package; empty for a backend that needs nothing else."""
    extra: str = ""
    """The extra of ours that brings the framework."""


ENTRIES: Final[dict[str, Entry]] = {
    "onnxruntime": Entry("nerite.backends.onnxruntime", "OnnxRuntimeBackend", "onnxruntime", "onnx"),
    "python": Entry("nerite.backends.python", "PythonBackend"),
}


@cache
def backend(name: str) -> Backend:
    """Return the backend called ``name``: always the same object. Its module is imported by the first call.

    Raises ``InvalidArgument`` for a name that we do not know, ``Unsupported`` where the framework is not installed.
    """
    entry = ENTRIES.get(name)
    if entry is None:
        raise InvalidArgument(
            f"unable to find backend library for backend '{name}', try specifying runtime on the model "
            f"configuration. The backends there are: {', '.join(sorted(ENTRIES))}."
        )
    if entry.package and importlib.util.find_spec(entry.package) is None:
        raise Unsupported(
            f"backend '{name}' needs the Python package '{entry.package}', which is not installed. "
            f"Install it with: pip install 'nerite[{entry.extra}]'"
        )
    return cast(Backend, getattr(importlib.import_module(entry.module), entry.name)())
