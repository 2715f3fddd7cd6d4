"""The life of every model: load beside, swap, drain, close; by hand, at start-up, or because files changed.

A load never disturbs what is serving. New versions are made next to the old ones; only when all of them are ready do
requests go there, in one step of the loop; the old ones finish what they have, and are closed. If anything fails, the
old versions go on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from nerite.backends.interface import ModelContext
from nerite.config.json_form import to_json
from nerite.config.loading import FinishedConfig, PolledModel, finish_config, poll_model_directory
from nerite.config.model_config import ModelConfig
from nerite.config.options import RepositoryOptions
from nerite.config.signature import signature_of
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotFound, Unavailable
from nerite.execution.launcher import Launcher
from nerite.execution.running_version import RunningVersion
from nerite.repository import fingerprint
from nerite.repository.model_record import ModelRecord, State, VersionState

_log = logging.getLogger("nerite.repository")
_REMARKS = {"note": _log.info, "warning": _log.warning, "error": _log.error}

SETTLE_SECONDS = 1.0
"""How long a directory must not have changed before it is loaded: a copy may be under way."""


class ModelManager:
    """Knows every model of the repositories. Coroutines and look-ups are for the loop's thread."""

    def __init__(
        self,
        options: RepositoryOptions,
        settings_of: Callable[[str], Mapping[str, str]],
        launcher: Launcher,
        loader: Executor,
        on_change: Callable[[], None],
    ) -> None:
        """``on_change`` is called whenever requests may have to go elsewhere than before."""
        self._options = options
        self._settings_of = settings_of
        self._launcher = launcher
        self._loader = loader
        self._on_change = on_change
        self._records: dict[str, ModelRecord] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(max(options.load_threads, 1))

    @property
    def records(self) -> Iterable[ModelRecord]:
        """Every model that was ever loaded or tried, by name."""
        return [self._records[name] for name in sorted(self._records)]

    def find(self, name: str, version: str) -> RunningVersion:
        """Return where a request for ``name`` goes. Raises ``NotFound`` or ``Unavailable`` with Triton's texts."""
        record = self._records.get(name)
        if record is None or not record.known:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return record.find(version)

    def record(self, name: str) -> ModelRecord | None:
        """Return what is known of a model."""
        return self._records.get(name)

    def directories(self) -> dict[str, list[Path]]:
        """Return the directories of each model, by name. More than one is a mistake that the load reports."""
        found: dict[str, list[Path]] = {}
        for root in self._roots():
            for child in sorted(root.iterdir()):
                if child.is_dir() and not child.name.startswith("."):
                    found.setdefault(child.name, []).append(child)
        return found

    def _directories_of(self, name: str) -> list[Path]:
        """Return what ``directories`` has for one model, without looking at the others."""
        places = [root / name for root in self._roots()]
        return [] if name.startswith(".") else [place for place in places if place.is_dir()]

    def _roots(self) -> list[Path]:
        """Return the repositories. Raises ``Internal`` for one that is not there."""
        for repository in self._options.paths:
            if not Path(repository).is_dir():
                raise Internal(f"failed to stat file {repository}: no such directory")
        return [Path(repository) for repository in self._options.paths]

    async def load_all(self, names: Iterable[str]) -> list[tuple[str, NeriteError]]:
        """Load models side by side; return the failures."""

        async def one(name: str) -> tuple[str, NeriteError] | None:
            try:
                await self.load(name)
            except NeriteError as error:
                return name, error
            return None

        return [failure for failure in await asyncio.gather(*map(one, names)) if failure is not None]

    async def load(self, name: str) -> None:
        """Bring a model to what its files say now. Raises ``NeriteError``; what was serving goes on then."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            await self._load(name)

    async def _load(self, name: str) -> None:
        run = asyncio.get_running_loop().run_in_executor
        directories = await run(self._loader, self._directories_of, name)
        if not directories:
            raise Internal(f"failed to load '{name}', failed to poll from model repository")
        record = self._records.setdefault(name, ModelRecord(name))
        if len(directories) > 1:
            record.states = {-1: VersionState(State.UNAVAILABLE, "model appears in two or more repositories")}
            raise Internal(f"failed to load '{name}', model appears in two or more repositories")
        seen = record.seen = await run(self._loader, fingerprint.of_model, directories[0])
        polled = await run(self._loader, self._read, directories[0])
        for remark in polled.remarks:
            _REMARKS[remark.level](remark.text)
        if polled.mistakes:
            raise self._unreadable(record, polled)
        kept = _unchanged(record, polled, seen)
        made = await self._launch(record, polled, [version for version in polled.versions if version not in kept])
        record.loaded = (polled, seen)
        self._swap(record, {**kept, **made})

    def _unreadable(self, record: ModelRecord, polled: PolledModel) -> NeriteError:
        """Note what is wrong with a model that was not even tried, and return the refusal of its load."""
        for mistake in polled.mistakes:
            _log.error("%s", mistake)
        first = polled.mistakes[0]
        if not polled.versions and first.message.startswith("at least one version"):
            record.states.setdefault(-1, VersionState(State.UNAVAILABLE, first.message))
            return InvalidArgument(f"load failed for model '{record.name}': {first.message}\n")
        record.unreadable = str(first)
        return Internal(f"failed to load '{record.name}', failed to poll from model repository\n{first}")

    def _read(self, directory: Path) -> PolledModel:
        return poll_model_directory(
            directory, config_name=self._options.config_name, auto_complete=self._options.auto_complete
        )

    async def _launch(
        self, record: ModelRecord, polled: PolledModel, versions: Iterable[int]
    ) -> dict[int, RunningVersion]:
        """Make the versions that are not running yet, side by side: all of them or none."""
        versions = list(versions)
        for version in versions:
            record.states[version] = VersionState(State.LOADING)
            _log.info("loading: %s:%d", record.name, version)

        async def one(version: int) -> RunningVersion:
            async with self._slots:
                return await self._attempt(polled, version)

        outcomes = await asyncio.gather(*map(one, versions), return_exceptions=True)
        made = {v: o for v, o in zip(versions, outcomes, strict=True) if isinstance(o, RunningVersion)}
        failures: dict[int, NeriteError] = {}
        for version, outcome in zip(versions, outcomes, strict=True):
            if isinstance(outcome, NeriteError):
                failures[version] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        if failures:
            for running in made.values():
                self._retire(None, running)
            for version in made:
                record.states[version] = VersionState(State.UNAVAILABLE, "unloaded")
            for version in record.running:
                record.states[version] = VersionState(State.READY)
            raise self._failed(record, failures)
        return made

    async def _attempt(self, polled: PolledModel, version: int) -> RunningVersion:
        tries = self._options.load_retries + 1
        while True:
            tries -= 1
            try:
                return await self._make(polled, version)
            except NeriteError as error:
                if not tries:
                    raise
                _log.warning("failed to load '%s' version %d, trying again: %s", polled.name, version, error.message)

    async def _make(self, polled: PolledModel, version: int) -> RunningVersion:
        """Complete the configuration of a version, and make it run."""
        run = asyncio.get_running_loop().run_in_executor
        memo: dict[str, Any] = {}
        finished = await run(self._loader, self._finish, polled, version, memo)
        for remark in finished.remarks:
            _REMARKS[remark.level](remark.text)
        if finished.mistakes:
            for mistake in finished.mistakes:
                _log.error("%s", mistake)
            raise finished.mistakes[0].as_error()
        context = self._context(polled, finished.config, version, memo)
        return await self._launcher.launch(finished.config, context, signature_of(finished.config, polled.directory))

    def _finish(self, polled: PolledModel, version: int, memo: dict[str, Any]) -> FinishedConfig:
        def complete(config: ModelConfig, version: int) -> Mapping[str, Any]:
            return self._launcher.complete(config.backend, self._context(polled, config, version, memo))

        return finish_config(polled, version, complete=complete if self._options.auto_complete else None)

    def _context(self, polled: PolledModel, config: ModelConfig, version: int, memo: dict[str, Any]) -> ModelContext:
        settings = self._settings_of(config.backend)
        return ModelContext(polled.name, version, polled.directory, to_json(config), settings, memo)

    def _swap(self, record: ModelRecord, running: dict[int, RunningVersion]) -> None:
        """Send requests to the new versions from now on, and let the old ones finish."""
        old = record.running
        record.running = running
        record.latest = max(running)
        record.unreadable = ""
        record.states.pop(-1, None)
        for version in running:
            record.states[version] = VersionState(State.READY)
        self._on_change()
        _log.info("successfully loaded '%s'", record.name)
        for version, previous in old.items():
            if running.get(version) is not previous:
                if version not in running:
                    record.states[version] = VersionState(State.UNLOADING)
                self._retire(record, previous)

    async def unload(self, name: str) -> None:
        """Stop serving a model. Returns at once; what it has to do is finished first. An unknown name is fine."""
        record = self._records.get(name)
        if record is None:
            return
        old, record.running = record.running, {}
        record.latest = -1
        record.seen = record.loaded = None
        self._on_change()
        for version, running in old.items():
            record.states[version] = VersionState(State.UNLOADING)
            self._retire(record, running)

    def _retire(self, record: ModelRecord | None, running: RunningVersion) -> None:
        """Close a version when it has answered what it holds."""
        task = asyncio.get_running_loop().create_task(self._close(record, running))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, record: ModelRecord | None, running: RunningVersion) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running.drain(lambda: running.close(lambda: done.set_result(None)))
        await done
        if record is None:
            return
        state = record.states.get(running.version)
        if state is not None and running.version not in record.running and state.state is not State.LOADING:
            record.states[running.version] = VersionState(State.UNAVAILABLE, "unloaded")
        _log.info("successfully unloaded '%s' version %d", running.name, running.version)

    def _failed(self, record: ModelRecord, failures: Mapping[int, NeriteError]) -> NeriteError:
        """Note why versions could not be loaded, and return the refusal of the load; what runs keeps its state."""
        reasons = ""
        for version, error in sorted(failures.items()):
            reason = f"{_status(error)}: {error.message}"
            reasons += f"version {version} is at {State.UNAVAILABLE.value} state: {reason};\n"
            _log.error("failed to load '%s' version %d: %s", record.name, version, reason)
            if version not in record.running:
                record.states[version] = VersionState(State.UNAVAILABLE, reason)
        return InvalidArgument(f"load failed for model '{record.name}': {reasons}")

    async def poll(self) -> None:
        """Watch the repositories, and load, reload and unload what changed. Runs until it is cancelled."""
        waiting: dict[str, fingerprint.ModelFingerprint] = {}
        run = asyncio.get_running_loop().run_in_executor
        while True:
            await asyncio.sleep(SETTLE_SECONDS if waiting else self._options.poll_secs)
            try:
                waiting = await self._poll_once(waiting, run)
            except NeriteError as error:
                _log.error("failed to poll the model repository: %s", error.message)

    async def _poll_once(
        self, waiting: dict[str, fingerprint.ModelFingerprint], run: Callable[..., Any]
    ) -> dict[str, fingerprint.ModelFingerprint]:
        """Look once; return the models that have changed, but perhaps not completely."""
        directories = await run(self._loader, self.directories)
        still: dict[str, fingerprint.ModelFingerprint] = {}
        for name, paths in directories.items():
            seen = await run(self._loader, fingerprint.of_model, paths[0])
            record = self._records.get(name)
            if record is not None and record.seen == seen:
                continue
            if waiting.get(name) != seen or _newest(seen) > time.time_ns() - SETTLE_SECONDS * 1e9:
                still[name] = seen
                continue
            for failed, error in await self.load_all([name]):
                _log.error("failed to reload '%s': %s", failed, error.message)
        for record in self.records:
            if record.name not in directories and record.running:
                await self.unload(record.name)
        return still

    async def close(self) -> None:
        """Close everything that runs, and wait for it. Requests that still wait are refused."""
        for record in self.records:
            running, record.running = record.running, {}
            record.latest = -1
            for version in running.values():
                version.abandon(
                    Unavailable("Server is stopping, scheduler for model has stopped accepting new inference requests")
                )
                self._retire(record, version)
        self._on_change()
        while self._closing:
            await asyncio.wait(self._closing)


def _newest(seen: fingerprint.ModelFingerprint) -> int:
    """Return when the youngest file was changed."""
    config = [seen.config] if seen.config is not None else []
    entries = [*config, *seen.shared, *(entry for version in seen.versions.values() for entry in version)]
    return max((time_ns for _, _, time_ns in entries), default=0)


def _status(error: NeriteError) -> str:
    """Return the kind of an error as Triton spells it in reasons."""
    return {
        "INVALID_ARG": "Invalid argument",
        "NOT_FOUND": "Not found",
        "INTERNAL": "Internal",
        "UNAVAILABLE": "Unavailable",
        "UNSUPPORTED": "Unsupported",
        "ALREADY_EXISTS": "Already exists",
        "CANCELLED": "Cancelled",
    }.get(error.code, "Unknown")


def _unchanged(
    record: ModelRecord, polled: PolledModel, seen: fingerprint.ModelFingerprint
) -> dict[int, RunningVersion]:
    """Return the running versions that need no reload: same files, same configuration but for which versions."""
    if record.loaded is None:
        return {}
    before, looked = record.loaded
    if looked.shared != seen.shared:
        return {}
    if replace(before.config, version_policy=None) != replace(polled.config, version_policy=None):
        return {}
    return {
        version: running
        for version in polled.versions
        if (running := record.running.get(version)) is not None
        and looked.versions.get(version) == seen.versions.get(version)
    }
