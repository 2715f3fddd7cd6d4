"""Importing a model's code, so that several models, versions and reloads live in one process.

Theory of operation. ``1/model.py`` is imported as module ``model`` of a package called ``1``. Triton does the same, so
relative imports between the files of a version work and ``__name__`` is ``1.model``. Where that package exists already
(another model, or the same one before a reload) it gets a number behind its name. Version directory and model directory
are on ``sys.path``, those of the latest model first. Helper modules of different models have the same names;
so one that was found in a model's directory makes room when another model that has its own is imported, and leaves
with its model.

A ``model.py`` that is a backend, and serves models which have none, is a module ``model`` beside the others, with its
own directory on the path and not those of its models, as in Triton.

Files in these two directories are always compiled from source. Python trusts compiled code whose source has the same
second and size, which is not enough for a file that is edited and reloaded; and nothing is written into a repository.
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
    """The code of one model version, importable and imported until ``close``."""

    def __init__(self, directory: Path, file: Path, serves: Path | None = None) -> None:
        """Import ``file`` for the model in ``directory``. Raises what the code raises while it is imported.

        ``serves``: it is a backend, and this the directory of the version that it serves.
        """
        self.file = file
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
        """Take the modules of the model out of the process. Objects of theirs that somebody holds live on."""
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
        # Not ``importlib.import_module``, which would show up in the model's tracebacks.
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
    """Loads a source file without reading or writing compiled code."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _finder(directory: str) -> FileFinder:
    """Serve ``sys.path_hooks`` for the directories of the models that are open."""
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
"""The directories that ``_arrange_path`` has put on the path; others may have been there before."""


def _arrange_path() -> None:
    """Put the models' directories at the end of ``sys.path``, those of the latest model first."""
    others = [path for path in sys.path if path not in _on_path]
    ours = dict.fromkeys(directory for model in reversed(_open) for directory in model._directories)
    _on_path[:] = [directory for directory in ours if directory not in others]
    sys.path[:] = others + _on_path


def _found_in(directories: set[str]) -> list[str]:
    """Return the names of the modules that a model imported from one of these directories, not from below it."""
    packages = {model._package for model in _open}
    return [
        name
        for name, module in list(sys.modules.items())
        if "." not in name and name not in packages and _is_of_a_model(module) and _home(module) in directories
    ]


def _is_of_a_model(module: ModuleType) -> bool:
    """Return True for a file that we loaded, and for a directory without ``__init__.py``."""
    is_directory = getattr(module, "__file__", None) is None and hasattr(module, "__path__")
    return is_directory or isinstance(getattr(module, "__loader__", None), _AlwaysCompiled)


def _home(module: ModuleType) -> str:
    place = next(iter(getattr(module, "__path__", ())), None) or module.__file__
    return os.path.dirname(str(place))


def _forget(names: Iterable[str]) -> None:
    tops = set(names)
    # A list first: other threads import meanwhile.
    for name in [name for name in list(sys.modules) if name.partition(".")[0] in tops]:
        del sys.modules[name]


# What a model raised, as the text that callers and operators read.
#
# The form is that of Triton, which clients and runbooks know: type and message, then the frames of the model,
# innermost first. Frames of this server and of the import system are left out; they say nothing about the model.

CAUSES: Final = (Exception, SystemExit, asyncio.CancelledError)
"""What a model's code may raise to fail a call. The rest (Ctrl-C) is no business of the model."""

_MOST_FRAMES: Final = 100
_OURS = (f"{nerite.__path__[0]}/", f"{triton_python_backend_utils.__path__[0]}/", "<frozen importlib")


def describe_failure(error: BaseException) -> str:
    """Return type, message and the innermost frames of ``error``."""
    text = f"{type(error).__name__}: {message_of(error) or '<EMPTY MESSAGE>'}"
    frames = _frames(error.__traceback__)
    if frames:
        text += "\n\nAt:\n" + "".join(f"  {line}\n" for line in reversed(frames))
    return printable(text)


def failure_refusal(error: BaseException) -> Internal:
    """Return what is told of a model whose code raised ``error``, with the place in that code."""
    told = Internal(describe_failure(error))
    told.place = _place(error)
    return told


def _place(error: BaseException) -> tuple[str, int, int] | None:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return error.filename, error.lineno, max(error.offset or 1, 1)
    frames = [frame for frame in walk_tb(error.__traceback__) if not _is_our_code(frame[0].f_code)]
    return (frames[-1][0].f_code.co_filename, frames[-1][1], 1) if frames else None


def model_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of ``error`` from the model's first frame on, or None if the model has none in it."""
    traceback = error.__traceback__
    while traceback is not None and _is_ours(traceback):
        traceback = traceback.tb_next
    return traceback


def printable(text: str) -> str:
    """Return ``text`` with what cannot be encoded as UTF-8 (lone surrogates) escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _frames(traceback: TracebackType | None) -> deque[str]:
    frames: deque[str] = deque(maxlen=_MOST_FRAMES)
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
