"""Where models come from: a place with a directory for each."""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from nerite.core.errors import Internal
from nerite.core.failure_text import system_error
from nerite.core.text import mistake_in, shown

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
        unfit = {name for name in names if mistake_in(name) is not None}
        for name in sorted(unfit - self._unfit):
            _log.warning(
                "the directory '%s' in '%s' is no model: its name is not valid UTF-8", shown(name), shown(self.location)
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
