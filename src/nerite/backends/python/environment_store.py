"""Where environments are kept that were made here: each once, for all that want the same, across restarts.

What else takes minutes to make for a model, such as converted files, is kept here, too.

    <folder>/<key>/             an environment; the file ``nerite-origin`` in it is written last, and names its source
    <folder>/<key>.lock         held by who makes it, alone; and by the processes that use it, until they end

What has no origin was left by somebody who did not come to an end, and is made anew. An environment is made in the
place where it stays, because environments know where they are.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nerite.core.errors import InvalidArgument, Unavailable

_log = logging.getLogger("nerite.python")

SETTING: Final = "environment-directory"
"""The one of ``ModelContext.settings`` that says where the folder is."""
_ORIGIN: Final = "nerite-origin"
_LOOK_AGAIN: Final = 0.2
"""Seconds between two tries to lock what somebody else has locked."""

Make = Callable[[Path, int], None]
"""Fills a directory. The number is the descriptor of the lock: a process that inherits it goes on holding that."""


@dataclass(frozen=True)
class Kept:
    """An environment in the folder."""

    directory: Path
    origin: str
    """Of what it was made; empty if it was not finished."""
    used: float
    """When a model that wants it was loaded for the last time, in seconds since 1970."""

    @property
    def size(self) -> int:
        """The bytes of its files. Walks through all of them."""
        files = (Path(root, name) for root, _, names in os.walk(self.directory) for name in names)
        return sum(file.lstat().st_size for file in files)


def folder(setting: str = "") -> Path:
    """Return the folder: the one of the flag, or that in the user's directory of caches."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nerite" / "environments"
    return Path(setting).absolute() if setting else usual


stopped = threading.Event()
"""Set when nothing more is to be made in this process, nor waited for."""
_used: dict[Path, int] = {}
"""Environments that this process uses, and the descriptors of their locks."""


def kept(place: Path, key: str, origin: Path, make: Make, what: str = "an environment") -> Path:
    """Return the directory of the environment ``key``; have ``make`` make it of ``origin`` if it is not there.

    Nobody removes it while this process lives. Waits for whoever else is making it. Raises what ``make`` raises, and
    ``InvalidArgument`` if the disk refuses.
    """
    directory = place / key
    told = False
    try:
        place.mkdir(parents=True, exist_ok=True)
        while not _is_used(directory):
            descriptor = _tried(directory, fcntl.LOCK_EX)
            if descriptor is not None:
                try:
                    if not _origin(directory):
                        _made(directory, origin, make, descriptor, what)
                finally:
                    os.close(descriptor)
                continue
            if not told:
                _log.info("waiting for %s that somebody else is making: %s", what, directory)
                told = True
            if stopped.wait(_LOOK_AGAIN):
                raise Unavailable(f"nobody waits for {what} in {directory}: the server stops")
        os.utime(directory)
    except OSError as error:
        raise InvalidArgument(
            f"cannot keep {what} made of '{origin}' in '{place}': {error.strerror or error}. Name a directory "
            "with enough room in --environment-directory."
        ) from None
    return directory


def found(place: Path, key: str) -> Path | None:
    """Return the directory of the environment ``key``, if it is there."""
    return place / key if _origin(place / key) else None


def listed(place: Path) -> list[Kept]:
    """Return the environments of a folder, the one that was not used for the longest time first."""
    entries = [entry for entry in place.glob("*") if entry.is_dir()]
    found = [Kept(entry, _origin(entry), entry.stat().st_mtime) for entry in entries]
    return sorted(found, key=lambda each: each.used)


def removed(environment: Kept) -> bool:
    """Remove an environment; return False if somebody makes or uses it."""
    directory = environment.directory
    descriptor = _tried(directory, fcntl.LOCK_EX)
    if descriptor is None:
        return False
    try:
        # First of all: half an environment must not look like a whole one.
        (directory / _ORIGIN).unlink(missing_ok=True)
        shutil.rmtree(directory)
        _lock_file(directory).unlink()
    finally:
        os.close(descriptor)
    return True


def _made(directory: Path, origin: Path, make: Make, descriptor: int, what: str) -> None:
    began = time.monotonic()
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir()
        make(directory, descriptor)
        (directory / _ORIGIN).write_text(str(origin))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    _log.info("made %s of '%s' in %.1f s: %s", what, origin, time.monotonic() - began, directory)


def _origin(directory: Path) -> str:
    try:
        return (directory / _ORIGIN).read_text()
    except OSError:
        return ""


def _lock_file(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.lock")


def _is_used(directory: Path) -> bool:
    """Use an environment from now on, if it is there; return whether it is."""
    if not _origin(directory):
        # If we have used it, somebody has removed it by hand. It can be made anew when we let go of it.
        if (descriptor := _used.pop(directory, None)) is not None:
            os.close(descriptor)
        return False
    if directory in _used:
        return True
    descriptor = _tried(directory, fcntl.LOCK_SH)
    if descriptor is not None and not (_origin(directory) and _used.setdefault(directory, descriptor) == descriptor):
        os.close(descriptor)
    return directory in _used


def _tried(directory: Path, how: int) -> int | None:
    """Return the descriptor of the environment's lock, or None if somebody else has it."""
    path = _lock_file(directory)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            # Whoever had it may have removed the file, and a lock on what is gone keeps nobody out.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
