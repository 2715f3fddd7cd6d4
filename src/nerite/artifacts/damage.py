"""Detects obvious damage in the files of a model version, and adds it to errors that only quote the framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

from nerite.artifacts import graph_kinds
from nerite.artifacts.artifact import Candidate, Unusable
from nerite.core.errors import Internal, NeriteError

_MAX_COUNT: Final = 1000
"""Maximum number of files that are examined."""


@contextmanager
def damage_explained(folder: Path, filename: str) -> Iterator[None]:
    """Call ``refuse_pointers``, and pass errors of the ``with`` block through ``explained``."""
    refuse_pointers(folder, filename)
    try:
        yield
    except NeriteError as error:
        raise explained(error, folder, filename) from error.__cause__


def refuse_pointers(folder: Path, filename: str) -> None:
    """Raise ``Internal`` if the model file of the version in ``folder``, or a companion file, is a Git LFS pointer.

    ``filename`` is the name of the model file; empty if the backend chooses it.
    """
    for file in _parts(folder / filename) if filename else ():
        if (pointer := pointer_in(file)) is not None:
            raise Internal(pointer_text(pointer))


def explained(error: NeriteError, folder: Path, filename: str) -> NeriteError:
    """Return the error, extended by any obvious damage to the files of the version in ``folder``."""
    note = _explanation(folder, folder / filename if filename else None)
    return error.prefixed("", f". {note}") if note else error


def pointer_in(path: Path) -> Path | None:
    """Return the first Git LFS pointer among ``path`` and the files below it, or None."""
    files = sorted(islice(path.rglob("*"), _MAX_COUNT)) if path.is_dir() else [path]
    return next((file for file in files if file.is_file() and Candidate(file).is_pointer), None)


def _parts(model: Path) -> list[Path]:
    """Return a model file and its companions, which have the same stem: ``model.bin`` belongs to ``model.xml``."""
    if model.suffix == ".py" or not model.parent.is_dir():
        return [model]
    return sorted(file for file in model.parent.iterdir() if file.name.startswith(f"{model.stem}."))


def pointer_text(pointer: Path) -> str:
    """Return the text of the error for a Git LFS pointer in place of a file."""
    return (
        f"'{pointer}' is a Git LFS pointer, not the file itself. Fetch the file, in its Git repository: git lfs "
        f"pull --include '{pointer.name}'"
    )


def _explanation(folder: Path, model: Path | None) -> str:
    """Return what is damaged, with a remedy; "" if there is no obvious damage."""
    try:
        if model is not None and not model.exists():
            return _renamed(folder, model)
        if (pointer := pointer_in(folder)) is not None:
            return pointer_text(pointer)
        if model is not None:
            file = Candidate(inner if (inner := model / model.name).is_file() else model)
            file.check()
            if file.suffix == ".onnx":
                graph_kinds.recognise_onnx(file)
    except Unusable as error:
        return error.message.replace("\n    ", ". ")
    except OSError:  # the code that had to read the file reports it
        pass
    return ""


def _renamed(folder: Path, model: Path) -> str:
    """Return a remedy for a missing model file if the folder has exactly one file of its kind under another name."""
    like = [file.name for file in folder.iterdir() if file.suffix == model.suffix] if folder.is_dir() else []
    if len(like) != 1:
        return ""
    return f"Found '{like[0]}' instead: rename it to {model.name}, or set default_model_filename: \"{like[0]}\""
