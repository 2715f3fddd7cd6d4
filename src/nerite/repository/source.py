"""Where models come from: a place with a directory for each."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from nerite.core.errors import Internal


class Repository(Protocol):
    """A place with a directory for each model. Its methods block: they are for the loader's threads."""

    location: str
    """As the flag names it."""

    def models(self) -> list[str]:
        """Return the names of the models, in order. Raises ``Internal`` if the place cannot be read."""

    def fetch(self, name: str) -> Path | None:
        """Return a local directory with the model's files as they are now; None if there is no such model.

        The directory stays until it was released as often as it was returned. Raises ``NeriteError`` if the place
        cannot be read.
        """

    def release(self, folder: Path) -> None:
        """Say that a directory that ``fetch`` returned is not used any more."""

    def close(self) -> None:
        """Give up what is under way, for the server ends. Does not block."""


class LocalRepository:
    """A directory of this machine."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._root = Path(location)

    def models(self) -> list[str]:
        """Return the names of the directories in it, but for hidden ones."""
        self._check()
        return sorted(child.name for child in self._root.iterdir() if child.is_dir() and _named(child.name))

    def fetch(self, name: str) -> Path | None:
        """Return the model's directory, without looking at the others."""
        self._check()
        place = self._root / name
        return place if _named(name) and place.is_dir() else None

    def release(self, folder: Path) -> None:
        """Leave the directory: it is the user's."""

    def close(self) -> None:
        """Do nothing: nothing takes long."""

    def _check(self) -> None:
        if not self._root.is_dir():
            raise Internal(f"failed to stat file {self.location}: no such directory")


def _named(name: str) -> bool:
    return not name.startswith(".")
