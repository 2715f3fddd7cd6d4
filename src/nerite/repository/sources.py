"""Where models come from: every repository there is, the models in it, and the directory that each was fetched to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from nerite.core.errors import Internal, NeriteError
from nerite.core.failure_text import system_error
from nerite.repository import fingerprint, refusals
from nerite.repository.folders import FoldersInUse
from nerite.repository.registered import Register
from nerite.repository.source import Repository

_log = logging.getLogger("nerite.repository")
_T = TypeVar("_T")


class Blocking(Protocol):
    """Makes a call that blocks, elsewhere than on the loop."""

    def __call__(self, call: Callable[..., _T], *arguments: object) -> Coroutine[Any, Any, _T]:
        """Return what ``call`` returns."""


class Sources:
    """The repositories of the flags, and those that are registered later. For the loop's thread."""

    def __init__(self, fixed: Sequence[Repository], blocking: Blocking, *, namespacing: bool) -> None:
        self.register = Register()
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
        self, before: Callable[[str, str], fingerprint.ModelFingerprint | None]
    ) -> dict[tuple[str, str], fingerprint.ModelFingerprint]:
        """Return how the files of every model look, by namespace and name.

        A model whose files cannot be had now looks as it did ``before``; so do all of a repository that cannot be read.
        """
        found: dict[tuple[str, str], fingerprint.ModelFingerprint] = {}

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


def _look(repository: Repository, name: str) -> fingerprint.ModelFingerprint | None:
    """Return how the files of a model look; None if there is no such model. Blocks, and raises as ``fetch`` does."""
    folder = repository.fetch(name)
    if folder is None:
        return None
    try:
        return fingerprint.of_model(folder)
    except OSError as error:
        raise Internal(system_error(error)) from None
    finally:
        repository.release(folder)
