"""Where models come from: every repository there is, the models in it, and the directory that each was fetched to."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import posixpath
import secrets
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
from nerite.core.text import quoted_text, text_error
from nerite.repository import catalogue, refusals

# Where models come from: a place with a directory for each.

_log = logging.getLogger("nerite.repository")
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""What the system says of a file that is not there, or cannot be."""


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
        self._device: int | None = None
        """The file system that it is on, once there were models."""
        self._unfit: set[str] = set()
        """Directories whose names cannot be those of models, and which the log knows of."""

    def models(self) -> list[str]:
        """Return the names of the directories in it, but for hidden ones, and those that are no text."""
        with self._readable():
            names = {child.name for child in self._root.iterdir() if child.is_dir() and is_model_name(child.name)}
            device = self._root.stat().st_dev
        if names:
            self._device = device
        elif self._device not in (None, device):
            raise Internal(f"{self.location} is empty, and on another file system than before: was it unmounted?")
        unfit = {name for name in names if text_error(name) is not None}
        for name in sorted(unfit - self._unfit):
            _log.warning(
                "the directory '%s' in '%s' is no model: its name is not valid UTF-8",
                quoted_text(name),
                quoted_text(self.location),
            )
        self._unfit = unfit
        return sorted(names - unfit)

    def fetch(self, name: str) -> Path | None:
        """Return the model's directory, without looking at the others."""
        with self._readable():
            if not stat.S_ISDIR(self._root.stat().st_mode):
                raise NotADirectoryError
            place = self._root / name
            try:
                return place if is_model_name(name) and stat.S_ISDIR(place.stat().st_mode) else None
            except ValueError:  # no file can have such a name
                return None
            except OSError as error:
                if error.errno in _ABSENT:
                    return None
                raise

    def release(self, folder: Path) -> None:
        """Leave the directory: it is the user's."""

    def close(self) -> None:
        """Do nothing: nothing takes long."""

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Raise ``Internal`` for what the system refuses."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise Internal(f"failed to stat file {self.location}: no such directory") from None
        except OSError as error:
            raise Internal(f"failed to read {self.location}: {system_error(error)}") from None


def is_model_name(name: str) -> bool:
    """Say whether a directory of a repository may be a model: a name is no path, and hidden ones are left alone."""
    return bool(name) and not name.startswith(".") and "/" not in name


# Repositories that come and go while the server runs.


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


class RepositoryRegister:
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


# Which directories are in use, and by whom: what nobody uses any more is given back.

GiveBack: TypeAlias = Callable[[], None]
"""What to do when a directory is not used any more. Blocks."""


class FoldersInUse:
    """Knows the directories that models were fetched to, or unpacked in. For the loop's thread."""

    def __init__(self) -> None:
        self._users: dict[Path, list[object]] = {}
        self._give_back: dict[Path, list[GiveBack]] = {}

    def take(self, folder: Path, user: object, give_back: GiveBack) -> None:
        """Note that ``user`` got a directory, and what is to be done in return.

        It is done when nobody uses the directory any more; sooner if it was taken more than once.
        """
        self._give_back.setdefault(folder, []).append(give_back)
        self.use(folder, user)

    def use(self, folder: Path, user: object) -> None:
        """Note one more user of a directory that somebody has."""
        self._users.setdefault(folder, []).append(user)

    def leave(self, user: object) -> list[GiveBack]:
        """Note that a user is done; return what is to be done in return."""
        due: list[GiveBack] = []
        for folder in [folder for folder, users in self._users.items() if user in users]:
            users, owed = self._users[folder], self._give_back[folder]
            users.remove(user)
            # One is enough to keep a directory for all who use it.
            kept = 1 if users else 0
            due += owed[kept:]
            del owed[kept:]
            if not users:
                del self._users[folder], self._give_back[folder]
        return due


_T = TypeVar("_T")


class Blocking(Protocol):
    """Makes a call that blocks, elsewhere than on the loop."""

    def __call__(self, call: Callable[..., _T], *arguments: object) -> Coroutine[Any, Any, _T]:
        """Return what ``call`` returns."""


class Repositories:
    """The repositories of the flags, and those that are registered later. For the loop's thread."""

    def __init__(self, fixed: Sequence[Repository], blocking: Blocking, *, namespacing: bool) -> None:
        self.register = RepositoryRegister()
        self.folders = FoldersInUse()
        """What was fetched, and who uses it."""
        self._fixed = fixed
        self._blocking = blocking
        self._namespacing = namespacing
        self._names: WeakKeyDictionary[Repository, list[str]] = WeakKeyDictionary()
        """The models of each repository, as of the last time that it could be read."""

    @property
    def _repositories(self) -> list[Repository]:
        return [*self._fixed, *self.register]

    @property
    def unread(self) -> bool:
        """There is a repository of the flags that could not be read yet."""
        return any(repository not in self._names for repository in self._fixed)

    async def offered(self) -> dict[str, list[str]]:
        """Return the names of the models in each namespace, one more time for each place that has one.

        Raises ``Internal`` for a repository that cannot be read.
        """

        def look() -> dict[str, list[str]]:
            offered: dict[str, list[str]] = {}
            for repository in self._repositories:
                names = self._names[repository] = repository.models()
                offered.setdefault(self._namespace(repository), []).extend(names)
            return offered

        return await self._blocking(look)

    async def look(
        self, before: Callable[[str, str], catalogue.ModelFingerprint | None]
    ) -> dict[tuple[str, str], catalogue.ModelFingerprint]:
        """Return how the files of every model look, by namespace and name.

        A model whose files cannot be had now looks as it did ``before``; so do all of a repository that cannot be read.
        """
        found: dict[tuple[str, str], catalogue.ModelFingerprint] = {}

        async def look(repository: Repository, name: str, *, readable: bool) -> None:
            namespace = self._namespace(repository)
            try:
                seen = await self._blocking(_look, repository, name) if readable else before(namespace, name)
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
            # Side by side, because a distant store takes its time to answer.
            names = self._names.get(repository, ())
            await asyncio.gather(*(look(repository, name, readable=readable) for name in names))
        return dict(sorted(found.items()))

    async def fetch(self, name: str, user: object) -> dict[str, Path]:
        """Return where a model is in each namespace that has it, for ``user`` to use.

        Raises ``Internal`` where that is not clear. A repository that cannot be read stands in the way of the models
        that it had when it could be, and of those that no other has.
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

    async def leave(self, user: object) -> None:
        """Give back the directories that nobody but ``user`` used."""
        for give_back in self.folders.leave(user):
            await self._blocking(give_back)

    def _namespace(self, repository: Repository) -> str:
        return repository.location if self._namespacing else ""


def _look(repository: Repository, name: str) -> catalogue.ModelFingerprint | None:
    """Return how the files of a model look; None if there is no such model. Blocks, and raises as ``fetch`` does."""
    folder = repository.fetch(name)
    if folder is None:
        return None
    try:
        return catalogue.model_fingerprint(folder)
    except OSError as error:
        raise Internal(system_error(error)) from None
    finally:
        repository.release(folder)


# What a load request may bring along: a configuration, and files in place of the repository's.

_FILE: Final = "file:"
_MAX_FILE_NAME: Final = 255
"""Bytes that file systems take."""


@dataclass(frozen=True, eq=False)
class LoadOverrides:
    """A configuration in JSON, and files by their path in the model's directory."""

    config: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    """If there are any, they are all the files that the model has."""

    @classmethod
    def of(cls, parameters: Mapping[str, str | bytes]) -> LoadOverrides | None:
        """Return what the parameters of a load bring, None for nothing. Raises Triton's refusals."""
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
    """Raise ``InvalidArgument`` for a parameter whose path no file can have. One that is too long ends Triton."""
    for key in parameters:
        if key.startswith(_FILE) and any(len(part.encode()) > _MAX_FILE_NAME for part in key[len(_FILE) :].split("/")):
            raise InvalidArgument(
                f"Invalid file parameter '{key}': a name in its path is longer than {_MAX_FILE_NAME} bytes, which no "
                "file system takes. Send the file under a shorter name."
            )


def new_override_folder() -> Path:
    """Return the path of a directory for the files of a delivery. It does not exist, and nobody else has the path."""
    return Path(tempfile.gettempdir(), f"nerite-model-{secrets.token_hex(8)}")


def write_files(delivery: LoadOverrides, folder: Path) -> None:
    """Make ``folder`` and write the files to it. Blocks.

    Raises ``OSError``, and may leave the directory with a part of the files then.
    """
    folder.mkdir(mode=0o700)
    for path, data in delivery.files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def _path(key: str) -> str:
    """Return the path that ``file:<path>`` names.

    Raises ``InvalidArgument`` if it leads out of the directory.
    """
    # In the model's directory also where it begins with a slash, as Triton has it.
    path = posixpath.normpath(key.removeprefix(_FILE).lstrip("/"))
    if path.startswith("../") or path in (".", "..") or "\0" in path:
        raise InvalidArgument(
            f"Invalid file parameter '{key}' with normalized path '{path}' must stay within model directory."
        )
    return path
