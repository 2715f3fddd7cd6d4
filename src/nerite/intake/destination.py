"""Where in a repository a model is to be, and what is there already."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from nerite.config.near import nearest
from nerite.config.versions import find_versions
from nerite.core.errors import AlreadyExists, InvalidArgument, NotFound

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
