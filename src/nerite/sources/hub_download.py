"""Fetches a model of the hub into the cache: what is there is not asked for again, and several files arrive at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import Final, NamedTuple

from nerite.core.errors import Internal, NeriteError, NotFound, Unavailable
from nerite.core.transfer import DownloadProgress
from nerite.sources.hub import (
    DownloadStoppedError,
    Hub,
    HubUnreachableError,
    check_space,
    is_full,
    is_offline,
    no_space,
    unreachable,
)
from nerite.sources.hub_cache import HubCache, cache_root
from nerite.sources.hub_files import HubChoice, HubFile, HubRevision, choose_files
from nerite.sources.name import HubName

_SIDE_BY_SIDE: Final = 4
_TICK: Final = 0.2
"""Seconds between two looks at the progress."""


class DownloadPlan(NamedTuple):
    """What is about to be downloaded."""

    name: HubName
    """The name with the commit."""
    licence: str
    choice: HubChoice
    missing: int
    """Bytes that are not here yet."""


class FetchWatcher:
    """Is told what is fetched, and asked whether to. This one says nothing, and agrees."""

    def told(self, text: str) -> None:
        """Take a line for the user."""

    def agrees(self, plan: DownloadPlan) -> bool:
        """Return whether to download."""
        return True

    def progress(self, progress: DownloadProgress, total: int) -> None:
        """Take the progress, several times a second."""

    def ended(self) -> None:
        """Note that nothing is being downloaded any more."""


class FetchedFiles(NamedTuple):
    """A model of the hub in the cache."""

    path: Path
    """The directory of the revision, or the file that is the model."""
    name: HubName
    """The name with the commit."""
    licence: str = ""


class HubFetcher:
    """Fetches models of the hub."""

    def __init__(
        self, environment: Mapping[str, str], watcher: FetchWatcher, *, offline: bool = False, trusted: bool = False
    ) -> None:
        self._environment = environment
        self.cache = HubCache(cache_root(environment))
        self._watcher = watcher
        self._offline = offline or is_offline(environment)
        self._trusted = trusted

    def fetch(self, name: HubName) -> FetchedFiles:
        """Return a model, downloaded if it is not in the cache. Raises ``NeriteError``; a download can be continued."""
        with self._disk_errors():
            here = self._cached(name)
            # Whoever is trusted now was perhaps not when it was fetched, and has programs that were left out.
            if here is not None and (self._offline or (name.is_pinned and not self._trusted)):
                return here
            if self._offline:
                raise self._not_here(name)
            try:
                hub = Hub(self._environment)
                revision = hub.revision(name)
                pinned = name.at(revision.commit)
                return self._downloaded(hub, name, pinned, revision)
            except HubUnreachableError as reason:
                if here is None:
                    raise unreachable(name, reason) from None
                self._watcher.told(f"The hub cannot be reached ({reason}): {here.name}, fetched before, is used.")
                return here

    def _cached(self, name: HubName) -> FetchedFiles | None:
        """Return the model if it is completely in the cache."""
        commit = self.cache.commit_of(name.repository, name.revision)
        if not commit:
            return None
        noted = self.cache.noted(name.repository, commit, name.file)
        if noted is not None:
            return None if noted.missing else FetchedFiles(noted.model, name.at(commit))
        # Another tool has fetched it, perhaps not all of it.
        path = self.cache.snapshot(name.repository, commit) / name.file
        return FetchedFiles(path, name.at(commit)) if path.exists() and self._offline else None

    def _not_here(self, name: HubName) -> NotFound:
        commit = self.cache.commit_of(name.repository, name.revision)
        noted = self.cache.noted(name.repository, commit, name.file) if commit else None
        what = "not on this machine"
        if noted is not None and noted.missing:
            what = f"only partly on this machine ({', '.join(noted.missing[:3])} missing)"
        return NotFound(
            f"'{name}' is {what}, and downloads are off (--offline or HF_HUB_OFFLINE).\n"
            "    Run the command once with a network, or copy the cache from a machine that has it: "
            f"{self.cache.folder(name.repository)}"
        )

    def _downloaded(self, hub: Hub, name: HubName, pinned: HubName, revision: HubRevision) -> FetchedFiles:
        cache, repository = self.cache, name.repository
        choice = choose_files(revision, name.file, trusted=self._trusted)
        for remark in choice.remarks:
            self._watcher.told(remark)
        absent = self._absent(repository, choice.files)
        if absent:
            plan = DownloadPlan(pinned, revision.licence, choice, self._bytes_left(repository, absent))
            if not self._watcher.agrees(plan):
                raise Unavailable(f"'{name}' was not downloaded.")
            check_space(cache.folder(repository), plan.missing)
            waiting = f"Another process downloads '{repository}': waiting for it."
            with cache.downloading(repository, lambda: self._watcher.told(waiting)):
                # What another process has fetched meanwhile is not absent any more.
                self._download(hub, pinned, self._absent(repository, choice.files))
        folder = cache.complete(repository, revision.commit, name.revision, choice, name.file)
        return FetchedFiles(folder / choice.model, pinned, revision.licence)

    def _absent(self, repository: str, files: Sequence[HubFile]) -> list[HubFile]:
        distinct = {file.identity: file for file in files}
        return [file for file in distinct.values() if not self.cache.has(repository, file)]

    def _bytes_left(self, repository: str, files: Sequence[HubFile]) -> int:
        return sum(file.size - self._bytes_of_part(repository, file) for file in files)

    def _bytes_of_part(self, repository: str, file: HubFile) -> int:
        part = self.cache.part(repository, file)
        size = part.stat().st_size if part.exists() else 0
        return size if size <= file.size else 0

    def _download(self, hub: Hub, name: HubName, files: Sequence[HubFile]) -> None:
        """Download files. Raises the first failure after all downloads have ended."""
        if not files:
            return
        cache, repository = self.cache, name.repository
        total = sum(file.size for file in files)
        kept = sum(self._bytes_of_part(repository, file) for file in files)
        progress = DownloadProgress(f"'{repository}'", len(files), total, time.monotonic(), kept)
        stopped, counting = Event(), Lock()
        failures: list[BaseException] = []

        def arrived(count: int) -> None:
            with counting:
                progress.done += count

        self._watcher.told(progress.start())
        with ThreadPoolExecutor(_SIDE_BY_SIDE, "download") as threads:
            # The largest first: they decide when all have arrived.
            waiting: set[Future[None]] = {
                threads.submit(
                    hub.download,
                    name,
                    file,
                    cache.part(repository, file),
                    cache.blob(repository, file),
                    arrived,
                    stopped,
                )
                for file in sorted(files, key=lambda each: -each.size)
            }
            try:
                while waiting:
                    done, waiting = wait(waiting, _TICK)
                    failures += [error for future in done if (error := future.exception())]
                    if failures:
                        break
                    self._watcher.progress(progress, total)
            finally:
                stopped.set()
                for future in waiting:
                    future.cancel()
                self._watcher.ended()
        if failures:
            raise next((each for each in failures if not isinstance(each, DownloadStoppedError)), failures[0])
        self._watcher.told(progress.end(time.monotonic()))

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turn errors of the disk into ``Internal``."""
        try:
            yield
        except NeriteError:
            raise
        except OSError as error:
            if is_full(error):
                raise no_space(self.cache.root, "the disk is full") from None
            raise Internal(
                f"cannot use the cache {self.cache.root}: {error.strerror or error}.\n"
                "    Make it writable, or set HF_HOME to another directory."
            ) from None
