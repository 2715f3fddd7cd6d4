"""What is plainly wrong with the files of a model version, for refusals that say only what a framework made of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

from nerite.artifacts import graph_kinds
from nerite.artifacts.artifact import Candidate, Unusable
from nerite.core.errors import Internal, NeriteError

_MOST: Final = 1000
"""Files that are looked at."""


@contextmanager
def looked_at(folder: Path, filename: str) -> Iterator[None]:
    """``refuse_pointers``, and have a refusal in the ``with`` block ``explained``."""
    refuse_pointers(folder, filename)
    try:
        yield
    except NeriteError as error:
        raise explained(error, folder, filename) from error.__cause__


def refuse_pointers(folder: Path, filename: str) -> None:
    """Raise ``Internal`` if the model of the version in ``folder``, or what goes with it, is a pointer of Git LFS.

    ``filename`` is that of the model; empty if its backend chooses.
    """
    for file in _parts(folder / filename) if filename else ():
        if (pointer := pointer_in(file)) is not None:
            raise refused_pointer(pointer)


def explained(error: NeriteError, folder: Path, filename: str) -> NeriteError:
    """Return a refusal that goes on to say what is plainly wrong with the files of the version in ``folder``."""
    note = _explanation(folder, folder / filename if filename else None)
    return error.prefixed("", f". {note}") if note else error


def pointer_in(path: Path) -> Path | None:
    """Return a file that is a pointer of Git LFS: ``path``, or one below it; None if there is none."""
    files = sorted(islice(path.rglob("*"), _MOST)) if path.is_dir() else [path]
    return next((file for file in files if file.is_file() and Candidate(file).is_pointer), None)


def refused_pointer(file: Path) -> Internal:
    """Return the refusal of a model that has a pointer of Git LFS in the place of a file."""
    return Internal(_named(file))


def _parts(model: Path) -> list[Path]:
    """Return a model's file, and those that are called like it: of ``model.xml`` also ``model.bin``."""
    if model.suffix == ".py" or not model.parent.is_dir():
        return [model]
    return sorted(file for file in model.parent.iterdir() if file.name.startswith(f"{model.stem}."))


def _named(pointer: Path) -> str:
    return (
        f"'{pointer}' is a pointer of Git LFS, not the file that it stands for. Fetch that, in its repository: git lfs "
        f"pull --include '{pointer.name}'"
    )


def _explanation(folder: Path, model: Path | None) -> str:
    """Return what is wrong, and what to do; empty where nothing is plainly wrong."""
    try:
        if model is not None and not model.exists():
            return _elsewhere(folder, model)
        if (pointer := pointer_in(folder)) is not None:
            return _named(pointer)
        if model is not None:
            file = Candidate(inner if (inner := model / model.name).is_file() else model)
            file.check()
            if file.suffix == ".onnx":
                graph_kinds.recognise_onnx(file)
    except Unusable as error:
        return error.message.replace("\n    ", ". ")
    except OSError:  # what cannot be read is told by who had to read it
        pass
    return ""


def _elsewhere(folder: Path, model: Path) -> str:
    """Return what to do about a missing model where there is a file of its kind under another name."""
    like = [file.name for file in folder.iterdir() if file.suffix == model.suffix] if folder.is_dir() else []
    if len(like) != 1:
        return ""
    return f"There is '{like[0]}': rename it to {model.name}, or write default_model_filename: \"{like[0]}\""
