"""Repositories that come and go while the server runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from nerite.core.errors import AlreadyExists
from nerite.repository.source import LocalRepository


class RegisteredRepository(LocalRepository):
    """A directory some of whose models are known by other names than those of their folders."""

    def __init__(self, location: str, names: Mapping[str, str]) -> None:
        """``names`` are by folder."""
        super().__init__(location)
        self.names = names

    def models(self) -> list[str]:
        """Return the names of the models; none if the directory is gone: nobody else has to suffer from that."""
        if not os.path.isdir(self.location):
            return []
        return sorted(self.names.get(folder, folder) for folder in super().models())

    def fetch(self, name: str) -> Path | None:
        """Return a model's directory. A name that was given may have a slash in it, as SageMaker's have."""
        if not name or (name in self.names and not self.gives(name)):
            return None
        folders = {known: folder for folder, known in self.names.items()}
        return super().fetch(folders.get(name, name)) if os.path.isdir(self.location) else None

    def gives(self, name: str) -> bool:
        """Return whether a model has this name here, and perhaps another one in its files."""
        return name in self.names.values()

    def holds(self, directory: Path) -> bool:
        """Return whether a directory of a model is in this repository."""
        return directory.parent == Path(self.location)


class Register:
    """The repositories that are registered, each once, and no two with a model of the same given name."""

    def __init__(self) -> None:
        self._repositories: dict[str, RegisteredRepository] = {}

    def __iter__(self) -> Iterator[RegisteredRepository]:
        return iter(tuple(self._repositories.values()))

    def add(self, repository: RegisteredRepository) -> None:
        """Take in a repository. Raises ``AlreadyExists`` with Triton's texts."""
        if repository.location in self._repositories:
            raise AlreadyExists(f"model repository '{repository.location}' has already been registered")
        for name in repository.names.values():
            if self.gives(name):
                raise AlreadyExists(f"failed to register '{name}', there is a conflicting mapping for '{name}'")
        self._repositories[repository.location] = repository

    def gives(self, name: str) -> bool:
        """Return whether a repository gives a model this name."""
        return any(repository.gives(name) for repository in self)

    def remove(self, repository: RegisteredRepository) -> None:
        """Forget a repository."""
        del self._repositories[repository.location]
