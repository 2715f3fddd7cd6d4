"""A server that stands by: everything that loading its models needs is done, but no model is loaded.

Frameworks are imported, environments of models are made, the process that starts workers runs, and the files of the
models are in memory, as far as the operating system keeps them there. ``Standby.wake`` loads the models.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from nerite.core.errors import NeriteError
from nerite.repository.repositories import LocalRepository, Repository

_log = logging.getLogger("nerite.repository")
_CHUNK: Final = 8 << 20

PrepareModel = Callable[[str, Path], Collection[str]]
"""Prepares the load of a model in a directory; returns the names of the models that it needs. Blocks."""


class Standby:
    """Whether the server has been asked to load its models, and whether it has. Only for the event loop's thread."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._ended = asyncio.Event()

    async def wake(self) -> None:
        """Have the models loaded; return when they are. Repeated calls wait for the same load."""
        self._asked.set()
        await self._ended.wait()

    async def until_asked(self) -> None:
        """Wait until ``wake`` is called."""
        await self._asked.wait()

    def ended(self) -> None:
        """Note that the models are loaded."""
        self._ended.set()


def prepare_models(
    repositories: Sequence[Repository], wanted: Collection[str] | None, prepare: PrepareModel
) -> list[str]:
    """Prepare the load of models, and return their names. ``wanted`` None: all of them. Blocks.

    A model that cannot be prepared is logged, and fails when it is loaded. Object stores are left alone: their models
    are fetched when they are loaded.
    """
    done: list[str] = []
    for repository in repositories:
        if not isinstance(repository, LocalRepository):
            _log.warning("models of '%s' are not read ahead: they are fetched at the wake-up", repository.location)
            continue
        names = list(repository.models() if wanted is None else wanted)
        for name in names:  # it grows by the models that others need
            try:
                folder = repository.fetch(name)
                if folder is None:
                    continue
                names += [needed for needed in prepare(name, folder) if needed not in names]
                read_ahead(folder)
            except (NeriteError, OSError) as error:
                _log.warning("model '%s' cannot be prepared: %s", name, error)
                continue
            done.append(name)
    return done


def read_ahead(folder: Path) -> int:
    """Read all files of a directory, so that they are in the page cache; return their size. Raises ``OSError``."""
    size = 0
    buffer = bytearray(_CHUNK)
    for place, _, files in os.walk(folder):
        for path in filter(os.path.isfile, (os.path.join(place, name) for name in files)):
            with open(path, "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    size += count
    return size
