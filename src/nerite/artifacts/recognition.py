"""Recognises the model in a file or directory, and explains obvious damage in the files of a model version."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final

from nerite.artifacts import directory_kinds, gguf_kind, graph_kinds, torch_kinds, torchserve_kind, tree_kinds
from nerite.artifacts.artifact import Artifact, Candidate, Unusable
from nerite.artifacts.readers import LoggedModel, logged_model
from nerite.config.loading import CONFIG_FILE
from nerite.core.errors import Internal, NeriteError

_KINDS: Final = (
    directory_kinds.recognise_triton_model,
    graph_kinds.recognise_tensorrt,
    graph_kinds.recognise_saved_model,
    directory_kinds.recognise_openvino_language_model,
    directory_kinds.recognise_openvino_pipeline,
    directory_kinds.recognise_hugging_face,
    directory_kinds.recognise_python_model,
    directory_kinds.recognise_foreign,
    gguf_kind.recognise_gguf,
    torchserve_kind.recognise_torchserve,
    torch_kinds.recognise_torchscript,
    torch_kinds.recognise_exported_program,
    torch_kinds.recognise_torch_checkpoint,
    directory_kinds.recognise_nemo,
    tree_kinds.recognise_scikit_learn,
    tree_kinds.recognise_xgboost,
    tree_kinds.recognise_lightgbm,
    graph_kinds.recognise_litert,
    graph_kinds.recognise_openvino,
    graph_kinds.recognise_paddle,
    torch_kinds.recognise_safetensors,
    tree_kinds.recognise_treelite,
    graph_kinds.recognise_onnx,
)
"""Recognisers of formats with unambiguous signs come first; ONNX files have no magic number and are tried last."""
_KNOWN: Final = (
    "ONNX, TorchScript and torch.export, safetensors, OpenVINO, PaddlePaddle, SavedModel, LiteRT, XGBoost, LightGBM, "
    "treelite, scikit-learn, Hugging Face, GGUF, TensorRT, MLflow, TorchServe, model.py, a directory of a Triton "
    "repository"
)


def recognise(candidate: Candidate) -> Artifact:
    """Return the model in a file or directory, as the first recogniser that knows its kind describes it.

    Raises ``Unusable``, with a remedy, if it cannot be served.
    """
    candidate.check()
    logged = logged_model(candidate)
    if logged is not None:
        return _as_logged(recognise(candidate.at(logged.place)), candidate, logged)
    found = _recognised(candidate)
    if found is not None:
        return found
    if candidate.is_directory:
        return _only_model_in(candidate)
    raise Unusable(candidate.path, "not a known kind of model", f"Known kinds: {_KNOWN}.")


def _as_logged(artifact: Artifact, candidate: Candidate, logged: LoggedModel) -> Artifact:
    """Return a model that MLflow has logged, with the name and configuration that it was logged with."""
    beside = dict(artifact.beside)
    if logged.config is not None:
        beside[CONFIG_FILE] = logged.config
    return dataclasses.replace(
        artifact,
        kind=f"{artifact.kind}, logged by MLflow",
        name=candidate.name,
        beside=beside,
        finished=artifact.finished or logged.config is not None,
    )


def _recognised(candidate: Candidate) -> Artifact | None:
    return next((found for recogniser in _KINDS if (found := recogniser(candidate)) is not None), None)


def _only_model_in(directory: Candidate) -> Artifact:
    """Return the only model in a directory that is not itself a model."""
    found: list[Artifact] = []
    refusals: list[Unusable] = []
    for child in sorted(directory.path.iterdir()):
        if child.name.startswith("."):
            continue
        try:
            candidate = directory.at(child)
            candidate.check()
            artifact = _recognised(candidate)
        except Unusable as error:
            refusals.append(error)
            continue
        if artifact is not None and artifact.source not in [other.source for other in found]:
            found.append(artifact)
    if len(found) == 1:
        return found[0]
    if not found and refusals:
        raise refusals[0]
    names = ", ".join(artifact.source.name for artifact in found)
    if found:
        raise Unusable(directory.path, f"the directory contains several models: {names}", "Specify one of them.")
    raise Unusable(directory.path, "the directory contains no known kind of model", f"Known kinds: {_KNOWN}.")


# Damage: added to errors of a load that only quote the framework.

_MAX_COUNT: Final = 1000
"""Maximum number of files that are examined."""


@contextmanager
def damage_explained(folder: Path, filename: str) -> Iterator[None]:
    """Call ``refuse_unusable_files``, and pass errors of the ``with`` block through ``with_damage_noted``."""
    refuse_unusable_files(folder, filename)
    try:
        yield
    except NeriteError as error:
        raise with_damage_noted(error, folder, filename) from error.__cause__


def refuse_unusable_files(folder: Path, filename: str) -> None:
    """Raise ``Internal`` if the version in ``folder`` has a pipe or a device, or a Git LFS pointer as its model file.

    Opening a pipe would block until another process writes. ``filename`` is the name of the model file; empty if the
    backend chooses it.
    """
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with suppress(OSError):
                mode = os.stat(path).st_mode
                if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                    raise Internal(
                        f"'{path}' is a pipe or a device, not a file: models have files and directories only"
                    )
    for file in _parts(folder / filename) if filename else ():
        if (pointer := pointer_in(file)) is not None:
            raise Internal(pointer_text(pointer))


def with_damage_noted(error: NeriteError, folder: Path, filename: str) -> NeriteError:
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
