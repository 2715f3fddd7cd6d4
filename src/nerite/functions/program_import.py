"""Finds functions by ``FILE.py:NAME`` or ``MODULE:NAME``, and imports the programs that define them.

A program usually ends with ``nerite.serve(…)``. While a worker imports it, that call ends the import: everything that
the model needs was defined before it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from nerite.core.errors import InvalidArgument, NotFound
from nerite.functions.function_source import FunctionSource
from nerite.functions.model_function import ModelFunction, functions_in

_importing = threading.local()


class EndOfImport(BaseException):
    """Raised by ``nerite.serve`` in a program that a worker imports, to end the import."""


def is_importing() -> bool:
    """Return whether this thread imports a program for its functions."""
    return getattr(_importing, "depth", 0) > 0


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Have ``nerite.serve`` end the import of a program in this block."""
    _importing.depth = getattr(_importing, "depth", 0) + 1
    try:
        yield
    finally:
        _importing.depth -= 1


def import_program(source: FunctionSource) -> ModuleType:
    """Import the file or module of a source. Raises ``NotFound``, and what the program raises."""
    with importing(), contextlib.suppress(EndOfImport):
        if not source.is_file:
            return _import_module(source.place)
        if not source.path.is_file():
            raise NotFound(f"there is no file {source.place}")
        name = source.path.stem
        folder = str(source.path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(name, source.path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        with contextlib.suppress(EndOfImport):
            spec.loader.exec_module(module)
        return module
    return sys.modules[source.place]


def _import_module(name: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise NotFound(f"there is no module '{name}' on Python's path, and no file {name}.py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    assert found.loader is not None
    with contextlib.suppress(EndOfImport):
        found.loader.exec_module(module)
    return module


def located(source: FunctionSource, module: ModuleType) -> FunctionSource:
    """Return the file of a module that is one file, so that workers find it wherever they start."""
    file = getattr(module, "__file__", None)
    if source.is_file or file is None or "." in source.place or os.path.basename(file) == "__init__.py":
        return source
    return source._replace(place=str(Path(file).absolute()))


def functions_of(source: FunctionSource, module: ModuleType) -> list[tuple[str, ModelFunction[..., Any]]]:
    """Return the functions of a program that a source names, by their variables. Raises ``InvalidArgument``."""
    known = dict(functions_in(vars(module)))
    if source.name:
        if source.name not in known:
            what = (
                "is not a model: decorate it with @nerite.model" if hasattr(module, source.name) else "does not exist"
            )
            raise InvalidArgument(
                f"'{source.name}' in {source.place} {what}. Models in it: {', '.join(known) or 'none'}"
            )
        return [(source.name, known[source.name])]
    if not known:
        raise InvalidArgument(f"{source.place} has no function that is decorated with @nerite.model")
    return list(known.items())


def source_of(function: ModelFunction[..., Any]) -> FunctionSource | None:
    """Return where a worker can import a function from; None if it can only run in this process.

    That is so for functions that other functions define, for notebooks and for the interactive interpreter.
    """
    target = function.target
    module = sys.modules.get(target.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or not str(file).endswith(".py") or not os.path.isfile(file):
        return None
    variable = next((name for name, each in functions_in(vars(module)) if each is function), None)
    if variable is None:
        return None
    if target.__module__ == "__main__" or "." not in target.__module__:
        return FunctionSource(str(Path(file).absolute()), variable)
    return FunctionSource(target.__module__, variable)
