"""Taking a model, or one of its versions, out of a repository."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from nerite.core.errors import Internal, InvalidArgument, NotFound
from nerite.intake.destination import existing_model, versions_of


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


def remove(repository: Path, directory: Path) -> None:
    """Remove a directory of a repository: at once for whoever looks there, whatever happens afterwards."""
    try:
        aside = Path(tempfile.mkdtemp(prefix=".removing-", dir=repository))
        try:
            os.rename(directory, aside / directory.name)
        finally:
            shutil.rmtree(aside)
    except OSError as error:
        raise Internal(f"{directory} cannot be removed: {error.strerror}.\n    Make it writable.") from None
