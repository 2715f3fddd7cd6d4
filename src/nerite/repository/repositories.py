"""Model repositories, the directories that models are fetched to, and the files that a load request may override.

Repositories in object stores are in ``repository.remote``.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import posixpath
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from nerite.core.errors import AlreadyExists, Internal, InvalidArgument, NeriteError
from nerite.core.failures import system_error
from nerite.core.text import name_error, quoted_text
from nerite.repository import catalogue, refusals

_log = logging.getLogger("nerite.repository")
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""Errors of the operating system for a file that does not exist, or cannot exist."""


class Repository(Protocol):
    """Storage with one directory per model. Its methods block: call them on the loader's threads."""

    location: str
    """The location as the flag names it."""

    def models(self) -> list[str]:
        """Return the sorted names of the models. Raises ``Internal`` if the repository cannot be read."""

    def fetch(self, name: str) -> Path | None:
        """Return a local directory with the model's current files, or None if the model does not exist.

        The directory is reference-counted: it stays until it has been released as often as it was returned. Raises
        ``NeriteError`` if the repository cannot be read.
        """

    def release(self, folder: Path) -> None:
        """Drop one reference to a directory that ``fetch`` returned."""

    def close(self) -> None:
        """Abort operations in progress because the server shuts down. Does not block."""


class LocalRepository:
    """Repository in a directory of this machine."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._root = Path(location)
        self._device: int | None = None
        """Device number of the file system; None until models have been seen in the directory."""
        self._invalid_names: set[str] = set()
        """Directories whose names are not valid model names and have been logged."""

    def models(self) -> list[str]:
        """Return the names of its directories, except hidden ones and invalid names."""
        with self._readable():
            names = {child.name for child in self._root.iterdir() if child.is_dir() and is_model_name(child.name)}
            device = self._root.stat().st_dev
        if names:
            self._device = device
        elif self._device not in (None, device):
            raise Internal(f"{self.location} is empty and on a different file system than before: was it unmounted?")
        invalid = {name for name in names if name_error(name) is not None}
        for name in sorted(invalid - self._invalid_names):
            _log.warning(
                "directory '%s' in '%s' is not a model: its name is not valid UTF-8, or has control characters",
                quoted_text(name),
                quoted_text(self.location),
            )
        self._invalid_names = invalid
        return sorted(names - invalid)

    def fetch(self, name: str) -> Path | None:
        """Return the model's directory without reading the other directories."""
        with self._readable():
            if not stat.S_ISDIR(self._root.stat().st_mode):
                raise NotADirectoryError
            place = self._root / name
            try:
                return place if is_model_name(name) and stat.S_ISDIR(place.stat().st_mode) else None
            except ValueError:  # not a possible file name
                return None
            except OSError as error:
                if error.errno in _ABSENT:
                    return None
                raise

    def release(self, folder: Path) -> None:
        """Do nothing: the directory belongs to the user."""

    def close(self) -> None:
        """Do nothing: no operation takes long."""

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn errors of the operating system into ``Internal``."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise Internal(f"failed to stat file {self.location}: no such directory") from None
        except OSError as error:
            raise Internal(f"failed to read {self.location}: {system_error(error)}") from None


def is_model_name(name: str) -> bool:
    """Return whether a directory may be a model: its name must not be a path and must not be hidden."""
    return bool(name) and not name.startswith(".") and "/" not in name


class RegisteredRepository(LocalRepository):
    """Directory registered while the server runs; its models may have other names than their directories."""

    def __init__(self, location: str, names: Mapping[str, str]) -> None:
        """``names`` maps directories to model names."""
        super().__init__(location)
        self.names = names

    def models(self) -> list[str]:
        """Return the names of the models; none if the directory is gone, so that other repositories are unaffected."""
        if not os.path.isdir(self.location):
            return []
        return sorted(self.names.get(folder, folder) for folder in super().models())

    def fetch(self, name: str) -> Path | None:
        """Return a model's directory. A mapped name may contain a slash, as SageMaker's do."""
        if not name or (name in self.names and not self.gives(name)):
            return None
        folders = {known: folder for folder, known in self.names.items()}
        return super().fetch(folders.get(name, name)) if os.path.isdir(self.location) else None

    def gives(self, name: str) -> bool:
        """Return whether this repository maps a model to this name, which may differ from the name in its files."""
        return name in self.names.values()

    def holds(self, directory: Path) -> bool:
        """Return whether a model's directory is in this repository."""
        return directory.parent == Path(self.location)


class RepositoryRegister:
    """Registered repositories: each location once, and no mapped name twice."""

    def __init__(self) -> None:
        self._repositories: dict[str, RegisteredRepository] = {}

    def __iter__(self) -> Iterator[RegisteredRepository]:
        return iter(tuple(self._repositories.values()))

    def add(self, repository: RegisteredRepository) -> None:
        """Add a repository. Raises ``AlreadyExists`` with Triton's texts."""
        if repository.location in self._repositories:
            raise AlreadyExists(f"model repository '{repository.location}' has already been registered")
        for name in repository.names.values():
            if self.gives(name):
                raise AlreadyExists(f"failed to register '{name}', there is a conflicting mapping for '{name}'")
        self._repositories[repository.location] = repository

    def gives(self, name: str) -> bool:
        """Return whether a registered repository maps a model to this name."""
        return any(repository.gives(name) for repository in self)

    def remove(self, repository: RegisteredRepository) -> None:
        """Remove a repository."""
        del self._repositories[repository.location]


GiveBack: TypeAlias = Callable[[], None]
"""Releases a directory that is no longer used. Blocks."""


class FoldersInUse:
    """Tracks which loads and versions use the directories that models were fetched or unpacked to.

    Each directory is released when its last user leaves. For the loop's thread only.
    """

    def __init__(self) -> None:
        self._users: dict[Path, list[object]] = {}
        self._give_back: dict[Path, list[GiveBack]] = {}

    def take(self, folder: Path, user: object, give_back: GiveBack) -> None:
        """Record that ``user`` uses a directory, and how to release it.

        It is released when its last user leaves. If it was taken more than once, the surplus is released earlier.
        """
        self._give_back.setdefault(folder, []).append(give_back)
        self.use(folder, user)

    def use(self, folder: Path, user: object) -> None:
        """Record one more user of a directory that has been taken."""
        self._users.setdefault(folder, []).append(user)

    def leave(self, user: object) -> list[GiveBack]:
        """Remove a user; return the releases that are now due."""
        due: list[GiveBack] = []
        for folder in [folder for folder, users in self._users.items() if user in users]:
            users, releases = self._users[folder], self._give_back[folder]
            users.remove(user)
            # One reference keeps the directory for all remaining users.
            kept = 1 if users else 0
            due += releases[kept:]
            del releases[kept:]
            if not users:
                del self._users[folder], self._give_back[folder]
        return due


_T = TypeVar("_T")


class Blocking(Protocol):
    """Runs a blocking call in a thread, off the event loop."""

    def __call__(self, call: Callable[..., _T], *arguments: object) -> Coroutine[Any, Any, _T]:
        """Return the result of ``call``."""


class Repositories:
    """Repositories given by flags, and those registered later. For the loop's thread only."""

    def __init__(self, fixed: Sequence[Repository], blocking: Blocking, *, namespacing: bool) -> None:
        self.register = RepositoryRegister()
        self.folders = FoldersInUse()
        """The fetched directories and their users."""
        self._fixed = fixed
        self._blocking = blocking
        self._namespacing = namespacing
        self._names: WeakKeyDictionary[Repository, list[str]] = WeakKeyDictionary()
        """The models of each repository as of the last successful read."""

    @property
    def _repositories(self) -> list[Repository]:
        return [*self._fixed, *self.register]

    @property
    def unread(self) -> bool:
        """True if a repository given by a flag has never been read successfully."""
        return any(repository not in self._names for repository in self._fixed)

    async def offered(self) -> dict[str, list[str]]:
        """Return the names of the models in each namespace; a name in several repositories appears once for each.

        Raises ``Internal`` if a repository cannot be read.
        """

        def read() -> dict[str, list[str]]:
            offered: dict[str, list[str]] = {}
            for repository in self._repositories:
                names = self._names[repository] = repository.models()
                offered.setdefault(self._namespace(repository), []).extend(names)
            return offered

        return await self._blocking(read)

    async def poll(
        self, before: Callable[[str, str], catalogue.ModelFingerprint | None]
    ) -> dict[tuple[str, str], catalogue.ModelFingerprint]:
        """Return the fingerprint of every model by namespace and name.

        Where a model or its whole repository cannot be read now, ``before`` supplies the previous fingerprint.
        """
        found: dict[tuple[str, str], catalogue.ModelFingerprint] = {}

        async def poll(repository: Repository, name: str, *, readable: bool) -> None:
            namespace = self._namespace(repository)
            try:
                seen = await self._blocking(_fingerprint, repository, name) if readable else before(namespace, name)
            except NeriteError as error:
                _log.error("failed to poll model '%s': %s", name, error.message)
                seen = before(namespace, name)
            if seen is not None:
                found[namespace, name] = seen

        for repository in self._repositories:
            readable = True
            try:
                self._names[repository] = await self._blocking(repository.models)
            except NeriteError as error:
                _log.error("failed to poll the model repository: %s", error.message)
                readable = False
            # Concurrently, because a remote store has a high latency.
            names = self._names.get(repository, ())
            await asyncio.gather(*(poll(repository, name, readable=readable) for name in names))
        return dict(sorted(found.items()))

    async def fetch(self, name: str, user: object) -> dict[str, Path]:
        """Return the model's directory in each namespace that has it, and record ``user`` as their user.

        Raises ``Internal`` if the location is ambiguous. An unreadable repository blocks the models that it had when
        it was last read, and those that no other repository has.
        """
        found = []
        unread = ""
        for repository in self._repositories:
            try:
                folder = await self._blocking(repository.fetch, name)
            except NeriteError as error:
                if name in self._names.get(repository, (name,)):
                    raise refusals.not_polled(name, error.message) from None
                unread = error.message
                continue
            if folder is not None:
                self.folders.take(folder, user, partial(repository.release, folder))
                found.append((repository, folder))
        if unread and not found:
            raise refusals.not_polled(name, unread)
        if len(found) > 1 and not self._namespacing:
            raise refusals.in_several(name, [repository.location for repository, _ in found])
        return {self._namespace(repository): folder for repository, folder in found}

    async def unpack(self, name: str, delivery: LoadOverrides, user: object) -> Path:
        """Write the files of a request to load a model to a directory of their own, whose user is ``user``.

        Raises ``NeriteError``.
        """
        try:
            return await self._unpacked(delivery, user)
        except OSError as error:
            why = f"The files of the load request cannot be written: {system_error(error, tempfile.gettempdir())}."
            raise refusals.not_polled(name, f"{why} Set TMPDIR to use another directory.") from None

    async def _unpacked(self, delivery: LoadOverrides, user: object) -> Path:
        folder: Path = await self._blocking(new_override_folder)
        # Taken before it exists, so that however the load ends the directory is removed with its last user.
        self.folders.take(folder, user, partial(shutil.rmtree, folder, ignore_errors=True))
        await self._blocking(write_files, delivery, folder)
        return folder

    async def leave(self, user: object) -> None:
        """Release the directories whose last user was ``user``."""
        for give_back in self.folders.leave(user):
            await self._blocking(give_back)

    def _namespace(self, repository: Repository) -> str:
        return repository.location if self._namespacing else ""


def _fingerprint(repository: Repository, name: str) -> catalogue.ModelFingerprint | None:
    """Return a model's fingerprint, or None if the model does not exist. Blocks, and raises as ``fetch`` does."""
    folder = repository.fetch(name)
    if folder is None:
        return None
    try:
        return catalogue.model_fingerprint(folder)
    except OSError as error:
        raise Internal(system_error(error)) from None
    finally:
        repository.release(folder)


# Overrides in a load request: a configuration, and files that replace those of the repository.

_FILE: Final = "file:"
_MAX_FILE_NAME: Final = 255
"""Maximum length of a file name in bytes on common file systems."""


@dataclass(frozen=True, eq=False)
class LoadOverrides:
    """Overrides of a load request: a configuration in JSON, and files by their path in the model's directory."""

    config: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    """If not empty, these are all the files that the model has."""

    @classmethod
    def of(cls, parameters: Mapping[str, str | bytes]) -> LoadOverrides | None:
        """Parse the parameters of a load request; None if it has none. Raises Triton's errors."""
        if not parameters:
            return None
        files = {}
        for key, value in parameters.items():
            if key.startswith(_FILE):
                assert isinstance(value, bytes)
                files[_path(key)] = value
        for path in files:
            for parent in map(str, PurePosixPath(path).parents):
                if parent in files:
                    raise InvalidArgument(
                        f"Invalid file parameter '{_FILE}{path}': '{_FILE}{parent}' is a file and not a directory."
                    )
        config = parameters.get("config")
        if config is None:
            raise InvalidArgument(
                "Load parameter 'config' must be specified for model file override\n"
                "    Send the model's configuration, as JSON, in load parameter 'config'; '{}' to have it completed."
            )
        assert isinstance(config, str)
        return cls(config, files)


def check_file_names(parameters: Iterable[str]) -> None:
    """Raise ``InvalidArgument`` for a path with a name longer than file systems allow. Such a name crashes Triton."""
    for key in parameters:
        if key.startswith(_FILE) and any(len(part.encode()) > _MAX_FILE_NAME for part in key[len(_FILE) :].split("/")):
            raise InvalidArgument(
                f"Invalid file parameter '{key}': a name in its path is longer than {_MAX_FILE_NAME} bytes, which "
                "file systems do not support. Send the file under a shorter name."
            )


def new_override_folder() -> Path:
    """Return a unique path for a directory with the files of a load request. The directory does not exist yet."""
    return Path(tempfile.gettempdir(), f"nerite-model-{secrets.token_hex(8)}")


def write_files(delivery: LoadOverrides, folder: Path) -> None:
    """Create ``folder`` and write the files to it. Blocks.

    Raises ``OSError``; the directory may then remain with some of the files.
    """
    folder.mkdir(mode=0o700)
    for path, data in delivery.files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def _path(key: str) -> str:
    """Return the path that ``file:<path>`` names. Raises ``InvalidArgument`` if it leaves the model's directory."""
    # A leading slash also means the model's directory, as in Triton.
    path = posixpath.normpath(key.removeprefix(_FILE).lstrip("/"))
    if path.startswith("../") or path in (".", "..") or "\0" in path:
        raise InvalidArgument(
            f"Invalid file parameter '{key}' with normalized path '{path}' must stay within model directory."
        )
    return path
