"""Imports the code of models so that several models, versions and reloads coexist in one process.

``1/model.py`` is imported as module ``model`` of a package called ``1``. Triton does the same, so relative imports
between the files of a version work and ``__name__`` is ``1.model``. If a package of that name exists already (from
another model, or from before a reload), a number is appended to the name. The version directory and the model directory
are on ``sys.path``, those of the most recently opened model first. Different models may have helper modules of the same
name, so a module from one model's directory is dropped from ``sys.modules`` when a model with its own copy is imported,
and when its model is closed.

The ``model.py`` of a Python-based backend, which serves models without code, is imported as a top-level module
``model``, with its own directory on the path but not those of its models, as in Triton.

Files in these directories are always compiled from source. Python trusts cached bytecode if time (in seconds) and size
of the source match, which is not enough for a file that is edited and reloaded. It also keeps the server from writing
to a repository.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from types import CodeType, ModuleType, TracebackType
from typing import Final

import nerite
import triton_python_backend_utils
from nerite.core.errors import Internal
from nerite.core.failures import message_of
from triton_python_backend_utils.model import closed, opened

_lock = threading.RLock()
_open: list[ModelModule] = []


class ModelModule:
    """Imported code of one model version; its modules stay importable until ``close``."""

    def __init__(self, directory: Path, file: Path, serves: Path | None = None) -> None:
        """Import ``file`` for the model in ``directory``. Raises what the code raises on import.

        ``serves``: the directory of the version to serve, if ``file`` is a Python-based backend.
        """
        self.file = file
        self.directory = directory
        near = str(file.parent)
        self._directories = (near, str(directory)) if serves is None else (near,)
        self._of = (directory, serves or file.parent)
        with _lock:
            self._package = _free_package_name(file.parent.name if serves is None else file.stem)
            _open.append(self)
            opened(*self._of)
            _arrange_path()
            self._make_room()
            try:
                self.module = self._of_version(near, file.stem) if serves is None else self._alone(file)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Remove the model's modules from ``sys.modules``. Objects that are still referenced stay alive."""
        with _lock:
            _open.remove(self)
            closed(*self._of)
            _arrange_path()
            still_used = {directory for other in _open for directory in other._directories}
            _forget({self._package, *_found_in(set(self._directories) - still_used)})

    def _make_room(self) -> None:
        for directory in self._directories:
            sys.path_importer_cache.pop(directory, None)
        importlib.invalidate_caches()
        everywhere = {directory for model in _open for directory in model._directories}
        own = list(self._directories)
        _forget(name for name in _found_in(everywhere) if PathFinder.find_spec(name, own) is not None)

    def _of_version(self, directory: str, stem: str) -> ModuleType:
        spec = ModuleSpec(self._package, None, is_package=True)
        spec.submodule_search_locations = [directory]
        sys.modules[self._package] = module_from_spec(spec)
        # Not ``importlib.import_module``, which would appear in the model's tracebacks.
        __import__(f"{self._package}.{stem}")
        return sys.modules[f"{self._package}.{stem}"]

    def _alone(self, file: Path) -> ModuleType:
        loader = _AlwaysCompiled(self._package, str(file))
        spec = spec_from_file_location(self._package, file, loader=loader)
        assert spec is not None
        module = sys.modules[self._package] = module_from_spec(spec)
        loader.exec_module(module)
        return module


class _AlwaysCompiled(SourceFileLoader):
    """Source file loader that neither reads nor writes cached bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _finder(directory: str) -> FileFinder:
    """Path hook (``sys.path_hooks``) for the directories of open models."""
    if not any(directory in model._directories for model in _open):
        raise ImportError("not the directory of a model")
    return FileFinder(
        directory,
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (_AlwaysCompiled, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )


sys.path_hooks.insert(0, _finder)


def _free_package_name(wanted: str) -> str:
    name, number = wanted, 2
    while name in sys.modules:
        name, number = f"{wanted}_{number}", number + 1
    return name


_on_path: list[str] = []
"""The directories that ``_arrange_path`` has added to the path, without those that were on it before."""


def _arrange_path() -> None:
    """Put the models' directories at the end of ``sys.path``, those of the most recently opened model first."""
    others = [path for path in sys.path if path not in _on_path]
    ours = dict.fromkeys(directory for model in reversed(_open) for directory in model._directories)
    _on_path[:] = [directory for directory in ours if directory not in others]
    sys.path[:] = others + _on_path


def _found_in(directories: set[str]) -> list[str]:
    """Return the names of top-level modules that models imported directly from these directories."""
    packages = {model._package for model in _open}
    return [
        name
        for name, module in list(sys.modules.items())
        if "." not in name and name not in packages and _is_model_code(module) and _parent(module) in directories
    ]


def _is_model_code(module: ModuleType) -> bool:
    """Return True for a file loaded by ``_AlwaysCompiled``, and for a namespace package."""
    is_directory = getattr(module, "__file__", None) is None and hasattr(module, "__path__")
    return is_directory or isinstance(getattr(module, "__loader__", None), _AlwaysCompiled)


def _parent(module: ModuleType) -> str:
    place = next(iter(getattr(module, "__path__", ())), None) or module.__file__
    return os.path.dirname(str(place))


def _forget(names: Iterable[str]) -> None:
    tops = set(names)
    # Copied to a list because other threads may import at the same time.
    for name in [name for name in list(sys.modules) if name.partition(".")[0] in tops]:
        del sys.modules[name]


# Texts of exceptions raised by models, for callers and operators.
#
# The format is Triton's, which clients and runbooks rely on: type and message, then the frames of the model, innermost
# first. Frames of the server and of the import system are left out.

CAUSES: Final = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions from a model's code that fail the call. Others, such as ``KeyboardInterrupt``, propagate."""

_MAX_FRAMES: Final = 100
_OURS = (f"{nerite.__path__[0]}/", f"{triton_python_backend_utils.__path__[0]}/", "<frozen importlib")


def describe_failure(error: BaseException) -> str:
    """Return type and message of ``error``, with the innermost frames of the model."""
    text = f"{type(error).__name__}: {message_of(error) or '<EMPTY MESSAGE>'}"
    frames = _frames(error.__traceback__)
    if frames:
        text += "\n\nAt:\n" + "".join(f"  {line}\n" for line in reversed(frames))
    return printable(text)


def failure_refusal(error: BaseException, directory: Path) -> Internal:
    """Return the error for a model whose code raised ``error``, with the place in that code.

    It is the innermost one in the model's ``directory``, if there is one: libraries raise for what a model does.
    """
    refusal = Internal(describe_failure(error))
    refusal.place = _place(error, directory)
    return refusal


def _place(error: BaseException, directory: Path) -> tuple[str, int, int] | None:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return error.filename, error.lineno, max(error.offset or 1, 1)
    frames = [frame for frame in walk_tb(error.__traceback__) if not _is_our_code(frame[0].f_code)]
    places = [(frame.f_code.co_filename, line, 1) for frame, line in frames]
    own = [place for place in places if Path(place[0]).is_relative_to(directory)]
    found = own or places
    return found[-1] if found else None


def model_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of ``error`` from the model's first frame on, or None if it has no frame of the model."""
    traceback = error.__traceback__
    while traceback is not None and _is_ours(traceback):
        traceback = traceback.tb_next
    return traceback


def printable(text: str) -> str:
    """Return ``text`` with characters that UTF-8 cannot encode (lone surrogates) escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _frames(traceback: TracebackType | None) -> deque[str]:
    frames: deque[str] = deque(maxlen=_MAX_FRAMES)
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not _is_ours(traceback):
            frames.append(f"{code.co_filename}({traceback.tb_lineno}): {code.co_name}")
        traceback = traceback.tb_next
    return frames


def _is_ours(traceback: TracebackType) -> bool:
    return _is_our_code(traceback.tb_frame.f_code)


def _is_our_code(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS)
