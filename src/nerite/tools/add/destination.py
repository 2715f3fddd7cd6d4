"""Destination of a new model in a repository, removal and exchange of directories, and the generated config.pbtxt."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from nerite.client import TensorDescription
from nerite.config.loading import find_versions
from nerite.config.mistake import nearest
from nerite.config.model_config import ModelConfig, ModelInput, ModelOutput, ModelTensorReshape
from nerite.config.text import to_text
from nerite.core import tensor as dtypes
from nerite.core.errors import AlreadyExists, Internal, InvalidArgument, NotFound

DEFAULT: Final = "models"
"""Repository to use if none is specified."""
_VARIABLE: Final = "NERITE_MODEL_REPOSITORY"
_UNSAFE_CHARACTERS: Final = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_NAME_LENGTH: Final = 128


@dataclass(frozen=True)
class Destination:
    """Where a new model or version goes, and what it replaces there."""

    repository: Path
    name: str
    version: int
    replaces: Literal["", "version", "model"] = ""
    """What exists at the destination and will be replaced."""
    joins: bool = False
    """The model exists; the new version uses its configuration."""

    @property
    def directory(self) -> Path:
        """Directory of the model."""
        return self.repository / self.name


def repository_at(text: str, environment: Mapping[str, str]) -> Path:
    """Return the specified or else the default repository. Raises ``InvalidArgument`` if it is not a directory."""
    named = text or environment.get(_VARIABLE, "").partition("\n")[0] or DEFAULT
    if "://" in named:
        remedy = "Work on a local directory, and upload it afterwards."
        raise InvalidArgument(f"{named} is in an object store, which this command does not support.\n    {remedy}")
    path = Path(named)
    if named.startswith(("hf:", "mlflow:")) and not path.exists():
        remedy = f"Add the model to a repository: nerite add {named}"
        raise InvalidArgument(f"{named} is the name of a model, not a repository.\n    {remedy}")
    if path.exists() and not path.is_dir():
        remedy = "Specify the directory that contains one directory per model."
        raise InvalidArgument(f"{path} is not a directory.\n    {remedy}")
    return path


def fit_name(suggested: str) -> str:
    """Return the suggested name, changed so that directories, URLs and metrics can contain it."""
    return _UNSAFE_CHARACTERS.sub("_", suggested).strip("_-")[:_MAX_NAME_LENGTH] or "model"


def check_name(name: str) -> str:
    """Return the requested name. Raises ``InvalidArgument`` if it cannot be the name of a model's directory."""
    if not name or name.startswith(".") or "/" in name or os.sep in name or "\0" in name:
        raise InvalidArgument(f"'{name}' is not a valid model name.\n    Try --name {fit_name(name)}")
    return name


def versions_of(directory: Path) -> tuple[int, ...]:
    """Return the versions in a model's directory in ascending order."""
    if not directory.is_dir():
        return ()
    return find_versions(child.name for child in directory.iterdir() if child.is_dir()).numbers


def destination(repository: Path, name: str, version: int | None, *, force: bool) -> Destination:
    """Return where a new model or version goes. Raises ``AlreadyExists`` if the destination exists, unless forced.

    ``force`` allows replacing the given version, or the whole model if no version is given.
    """
    directory = repository / name
    if not directory.exists():
        return Destination(repository, name, version or 1)
    existing = versions_of(directory)
    if version is None:
        if force:
            return Destination(repository, name, 1, replaces="model")
        following = max(existing, default=0) + 1
        what = f"version {existing[0]}" if len(existing) == 1 else f"versions {', '.join(map(str, existing))}"
        raise AlreadyExists(
            f"the model '{name}' already exists in {repository}{f', with {what}' if existing else ''}.\n"
            f"    Add a version with --version {following}, another model with --name, or replace it with --force."
        )
    if version in existing and not force:
        raise AlreadyExists(
            f"version {version} of the model '{name}' already exists in {repository}.\n"
            f"    Add another version with --version {max(existing) + 1}, or replace it with --force."
        )
    return Destination(repository, name, version, "version" if version in existing else "", joins=True)


def existing_model(repository: Path, name: str) -> Path:
    """Return a model's directory. Raises ``NotFound``, with the closest name as a suggestion."""
    directory = repository / name
    if name and directory.is_dir() and not name.startswith(".") and "/" not in name:
        return directory
    if not repository.is_dir():
        raise NotFound(f"the repository {repository} does not exist.\n    Specify it with --model-repository.")
    names = sorted(child.name for child in repository.iterdir() if child.is_dir() and not child.name.startswith("."))
    meant = nearest(name, names)
    remedy = f"Did you mean '{meant}'?" if meant else f"Models in it: {', '.join(names) or 'none'}."
    raise NotFound(f"no model '{name}' in {repository}.\n    {remedy}")


# Removal of a model or one of its versions from a repository.


def to_remove(repository: Path, name: str, version: int | None) -> Path:
    """Return the directory of a model or version to remove.

    Raises ``NotFound`` if it does not exist, ``InvalidArgument`` if it is the only version.
    """
    directory = existing_model(repository, name)
    if version is None:
        return directory
    existing = versions_of(directory)
    if version not in existing:
        has = ", ".join(map(str, existing)) or "none"
        raise NotFound(f"the model '{name}' has no version {version}.\n    Its versions: {has}.")
    if existing == (version,):
        raise InvalidArgument(
            f"version {version} is the only one of the model '{name}', and a model without versions cannot be loaded.\n"
            f"    Remove the model: nerite rm {name}"
        )
    return directory / str(version)


def remove_model(repository: Path, directory: Path) -> None:
    """Remove a directory from a repository: hide it atomically by renaming it, then delete it."""
    try:
        aside = Path(tempfile.mkdtemp(prefix=".removing-", dir=repository))
        try:
            os.rename(directory, aside / directory.name)
        finally:
            shutil.rmtree(aside)
    except OSError as error:
        raise Internal(f"cannot remove {directory}: {error.strerror}.\n    Make it writable.") from None


# Exchange of two directories, atomically where the system supports it.

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories on one disk: atomically with renameat2 on Linux, else by three renames."""
    if not exchanged_atomically(one, other):
        with tempfile.TemporaryDirectory(prefix=".exchange-", dir=one.parent) as between:
            aside = Path(between) / "aside"
            os.rename(other, aside)
            try:
                os.rename(one, other)
            except OSError:
                os.rename(aside, other)
                raise
            os.rename(aside, one)


def exchanged_atomically(one: Path, other: Path) -> bool:
    """Exchange two directories with renameat2; return False if the system or the file system does not have it."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


# Inputs and outputs of a configuration, from shapes that include the batch dimension.

_MAX_BATCH: Final = 4
"""Initial max_batch_size; measurements may raise it."""


def declared(
    config: ModelConfig, inputs: Sequence[TensorDescription], outputs: Sequence[TensorDescription]
) -> ModelConfig:
    """Return ``config`` with these inputs and outputs. A variable first dimension of all of them is the batch."""
    batching = all(tensor.shape[:1] == (-1,) for tensor in (*inputs, *outputs))
    return dataclasses.replace(
        config,
        max_batch_size=_MAX_BATCH if batching else 0,
        input=tuple(ModelInput(**_entry(tensor, batching)) for tensor in inputs),
        output=tuple(ModelOutput(**_entry(tensor, batching)) for tensor in outputs),
    )


def _entry(tensor: TensorDescription, batching: bool) -> dict[str, Any]:
    dims = tensor.shape[1:] if batching else tensor.shape
    entry: dict[str, Any] = {
        "name": tensor.name,
        "data_type": dtypes.BY_NAME[tensor.datatype].config_name,
        "dims": dims or (1,),
    }
    if not dims:
        # A configuration cannot have empty dims: it has [1], and reshapes to [] for the model.
        entry["reshape"] = ModelTensorReshape()
    return entry


# The text of a generated config.pbtxt, with a comment for each part.

_DIMS: Final = "-1 is a dimension of any size"
_EXPLAINED: Final = {
    "platform": "Format of the model file.",
    "backend": "Backend that runs the model.",
    "runtime": "Program that runs the backend.",
    "max_batch_size": "Largest batch. Tensors have the batch as an additional dimension in front of their dims.",
    "input": f"Inputs of a request; {_DIMS}.",
    "output": f"Outputs of a response; {_DIMS}.",
    "batch_input": "Inputs that the server creates for each batch.",
    "batch_output": "How the outputs of a batch are split.",
    "dynamic_batching": "Requests that arrive while the model is busy run together as the next batch.",
    "sequence_batching": "Requests of one sequence go to one instance, in order.",
    "ensemble_scheduling": "Models that the ensemble consists of.",
    "instance_group": "Copies of the model that run in parallel.",
    "default_model_filename": "Model file in the directory of each version.",
    "parameters": "Parameters of the backend.",
    "model_transaction_policy": "A decoupled model may send any number of responses to a request.",
    "response_cache": "Caches responses, to answer repeated requests without the model.",
}
_NO_BATCHES: Final = "No batching: the dims below are the complete shapes."


def written_config(config: ModelConfig, origin: str, reasons: Mapping[str, str] | None = None) -> str:
    """Return the text of a config.pbtxt with comments: the model's ``origin``, and ``reasons`` for some fields."""
    parts = [
        f"# {origin}\n"
        "# You may edit every line. Omitted settings are completed when the model is loaded;\n"
        "# `nerite check` validates the file.\n"
    ]
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        text = to_text(dataclasses.replace(ModelConfig(), **{field.name: value}))
        if field.name == "max_batch_size" and not value and config.input:
            text = "max_batch_size: 0\n"
            parts.append(f"# {_NO_BATCHES}\n{text}")
        elif text:
            comments = (_EXPLAINED.get(field.name), (reasons or {}).get(field.name))
            parts.append("".join(f"# {line}\n" for line in comments if line) + text)
    return "\n".join(parts)


def add_repository(parser: argparse._ActionsContainer, *, also_argument: bool = False) -> None:
    """Add the option that names the repository, as in all commands; ``repository_of`` reads it.

    ``also_argument``: the command is about repositories alone, so that it also takes one without an option.
    """
    where = f"model repository (default: $NERITE_MODEL_REPOSITORY, or else {DEFAULT})"
    if also_argument:
        parser.add_argument("place", metavar="REPOSITORY", nargs="?", default="", help=where)
        where = "the same"
    parser.add_argument("--model-repository", metavar="DIRECTORY", dest="repository", default="", help=where)


def repository_of(options: argparse.Namespace) -> Path:
    """Return the repository that the options specify. Raises ``InvalidArgument`` if it is not a directory."""
    place = getattr(options, "place", "")
    if place and options.repository:
        remedy = f"Specify either {place} or --model-repository {options.repository}."
        raise InvalidArgument(f"two repositories are given, and this command takes one.\n    {remedy}")
    return repository_at(place or options.repository, os.environ)


def add_repositories(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add the arguments for any number of repositories, which ``repositories_of`` reads."""
    parser.add_argument("places", metavar="REPOSITORY", nargs="*", help=meaning)
    parser.add_argument(
        "--model-repository", metavar="DIRECTORY", action="append", default=[], help="the same; may be repeated"
    )


def repositories_of(options: argparse.Namespace) -> list[str]:
    """Return the repositories that the options specify."""
    return [*options.places, *options.model_repository]
