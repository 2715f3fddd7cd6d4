"""Where in a repository a model is to be, and what is there already."""

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
from nerite.config.text_printer import to_text
from nerite.core import tensor as dtypes
from nerite.core.errors import AlreadyExists, Internal, InvalidArgument, NotFound

DEFAULT: Final = "models"
"""The repository where none is named."""
_VARIABLE: Final = "NERITE_MODEL_REPOSITORY"
_UNFIT: Final = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST: Final = 128


@dataclass(frozen=True)
class Destination:
    """The place of one version of a model."""

    repository: Path
    name: str
    version: int
    replaces: Literal["", "version", "model"] = ""
    """What is there, and has to go."""
    joins: bool = False
    """The model is there: what is added is a version, and the configuration is the one that there is."""

    @property
    def directory(self) -> Path:
        """The model's directory."""
        return self.repository / self.name


def repository_at(text: str, environment: Mapping[str, str]) -> Path:
    """Return the repository that is named, or meant. Raises ``InvalidArgument`` for one that is no directory."""
    named = text or environment.get(_VARIABLE, "").partition("\n")[0] or DEFAULT
    if "://" in named:
        remedy = "Work on a directory, and copy that to where it belongs."
        raise InvalidArgument(f"{named} is in an object store, which this command does not reach.\n    {remedy}")
    path = Path(named)
    if path.exists() and not path.is_dir():
        raise InvalidArgument(f"{path} is no directory.\n    Name the directory that has a directory for each model.")
    return path


def fit_name(suggested: str) -> str:
    """Return a name that a model's directory, a URL and a metric can have."""
    return _UNFIT.sub("_", suggested).strip("_-")[:_LONGEST] or "model"


def check_name(name: str) -> str:
    """Return a name that was asked for. Raises ``InvalidArgument`` if it cannot be a directory's."""
    if not name or name.startswith(".") or "/" in name or os.sep in name or "\0" in name:
        raise InvalidArgument(f"'{name}' cannot be the name of a model.\n    Try --name {fit_name(name)}")
    return name


def versions_of(directory: Path) -> tuple[int, ...]:
    """Return the versions that a model's directory has, ascending."""
    if not directory.is_dir():
        return ()
    return find_versions(child.name for child in directory.iterdir() if child.is_dir()).numbers


def destination(repository: Path, name: str, version: int | None, *, force: bool) -> Destination:
    """Return where a new model or version goes. Raises ``AlreadyExists`` if something is there that nobody gave up.

    ``force`` gives up the version that is named; without one, the whole model.
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
            f"the model '{name}' is in {repository} already{f', with {what}' if existing else ''}.\n"
            f"    --version {following} adds another version, --name another model, --force replaces it."
        )
    if version in existing and not force:
        raise AlreadyExists(
            f"version {version} of the model '{name}' is in {repository} already.\n"
            f"    --version {max(existing) + 1} adds another one, --force replaces it."
        )
    return Destination(repository, name, version, "version" if version in existing else "", joins=True)


def existing_model(repository: Path, name: str) -> Path:
    """Return a model's directory. Raises ``NotFound``, with the name that may be meant."""
    directory = repository / name
    if name and directory.is_dir() and not name.startswith(".") and "/" not in name:
        return directory
    if not repository.is_dir():
        raise NotFound(f"there is no repository {repository}.\n    Name it with --repository.")
    names = sorted(child.name for child in repository.iterdir() if child.is_dir() and not child.name.startswith("."))
    meant = nearest(name, names)
    remedy = f"Did you mean '{meant}'?" if meant else f"The models in it: {', '.join(names) or 'none'}."
    raise NotFound(f"there is no model '{name}' in {repository}.\n    {remedy}")


# Taking a model, or one of its versions, out of a repository.


def to_remove(repository: Path, name: str, version: int | None) -> Path:
    """Return the directory of a model or a version. Raises ``NotFound``; ``InvalidArgument`` for the only version."""
    directory = existing_model(repository, name)
    if version is None:
        return directory
    existing = versions_of(directory)
    if version not in existing:
        has = ", ".join(map(str, existing)) or "none"
        raise NotFound(f"there is no version {version} of the model '{name}'.\n    Its versions: {has}.")
    if existing == (version,):
        raise InvalidArgument(
            f"version {version} is the only one of the model '{name}', and a model without versions cannot be loaded.\n"
            f"    Remove the model: nerite rm {name}"
        )
    return directory / str(version)


def remove_model(repository: Path, directory: Path) -> None:
    """Remove a directory of a repository: at once for whoever looks there, whatever happens afterwards."""
    try:
        aside = Path(tempfile.mkdtemp(prefix=".removing-", dir=repository))
        try:
            os.rename(directory, aside / directory.name)
        finally:
            shutil.rmtree(aside)
    except OSError as error:
        raise Internal(f"{directory} cannot be removed: {error.strerror}.\n    Make it writable.") from None


# Two directories that change places, so that at no time one of them is missing.

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories of one disk: at once where the system can, else as quickly as it can."""
    if not _at_once(one, other):
        with tempfile.TemporaryDirectory(prefix=".exchange-", dir=one.parent) as between:
            aside = Path(between) / "aside"
            os.rename(other, aside)
            try:
                os.rename(one, other)
            except OSError:
                os.rename(aside, other)
                raise
            os.rename(aside, one)


def _at_once(one: Path, other: Path) -> bool:
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


# A configuration's tensors, from shapes as people and metadata write them: with the batch in front.

_MAX_BATCH: Final = 4
"""To begin with; what is measured may raise it."""


def declared(
    config: ModelConfig, inputs: Sequence[TensorDescription], outputs: Sequence[TensorDescription]
) -> ModelConfig:
    """Return ``config`` with these inputs and outputs. Where all begin with a free size, that is the batch."""
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
        # A configuration cannot say that there is nothing but the batch: it says 1, and that the model wants less.
        entry["reshape"] = ModelTensorReshape()
    return entry


# A config.pbtxt to read: each part with a line that says what it is.

_DIMS: Final = "-1 is any size"
_EXPLAINED: Final = {
    "platform": "The format of the model's file.",
    "backend": "What runs the model.",
    "runtime": "The program that runs it.",
    "max_batch_size": "The largest batch. Tensors have the batch as one more dimension in front of their dims.",
    "input": f"What a request brings; {_DIMS}.",
    "output": f"What it gets; {_DIMS}.",
    "batch_input": "Inputs that the server makes for each batch.",
    "batch_output": "How outputs of a batch are divided.",
    "dynamic_batching": "Requests that come while the model is busy run together as the next batch.",
    "sequence_batching": "Requests of one sequence go to one instance, in their order.",
    "ensemble_scheduling": "The models that it is made of.",
    "instance_group": "Copies of the model, which run at the same time.",
    "default_model_filename": "The model's file, in the directory of each version.",
    "parameters": "What the backend is told.",
    "model_transaction_policy": "Whether a request has any number of responses.",
    "response_cache": "Whether answers are kept, and given again to equal requests.",
}
_NO_BATCHES: Final = "No batches: the dims below are all there are."


def written_config(config: ModelConfig, origin: str, reasons: Mapping[str, str] | None = None) -> str:
    """Return the text of a config.pbtxt; ``origin`` says where the model came from, ``reasons`` why a field is so."""
    parts = [
        f"# {origin}\n"
        "# Each line may be changed. What is left out is filled in when the model is loaded;\n"
        "# `nerite check` says whether all is right.\n"
    ]
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        text = to_text(dataclasses.replace(ModelConfig(), **{field.name: value}))
        if field.name == "max_batch_size" and not value and config.input:
            text = "max_batch_size: 0\n"
            parts.append(f"# {_NO_BATCHES}\n{text}")
        elif text:
            said = (_EXPLAINED.get(field.name), (reasons or {}).get(field.name))
            parts.append("".join(f"# {line}\n" for line in said if line) + text)
    return "\n".join(parts)


def add_repository(
    parser: argparse._ActionsContainer,
    name: str = "--repository",
    metavar: str = "DIRECTORY",
    nargs: Literal["?"] | None = None,
) -> None:
    """Add the argument ``name``, which ``repository_of`` reads."""
    where = f"the model repository (default: $NERITE_MODEL_REPOSITORY, else {DEFAULT})"
    parser.add_argument(name, metavar=metavar, nargs=nargs, default="", help=where)


def repository_of(options: argparse.Namespace) -> Path:
    """Return the repository that is named, or meant. Raises ``InvalidArgument`` for one that is no directory."""
    return repository_at(options.repository, os.environ)
