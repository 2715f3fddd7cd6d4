"""Lifecycle of every model: load, swap, drain, close; on request, at start-up, or because files changed.

A load never disturbs the versions that serve. New versions are launched next to the old ones; only when all of them
are ready does one step of the loop route requests to them. The old versions then drain and are closed. If anything
fails, the old versions continue unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from nerite.config.loading import PolledModel
from nerite.config.model_config import ModelVersionPolicy
from nerite.config.options import RepositoryOptions
from nerite.config.validate_ensemble import circular_ensembles
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.failures import report, system_error
from nerite.models.running_version import RunningVersion
from nerite.observability.load_times import load_of, log_loaded, stage
from nerite.repository import catalogue, refusals
from nerite.repository.catalogue import Catalogue, LoadedVersion, ModelRecord
from nerite.repository.declared_routes import DeclaredRoutes, with_arms, with_kept
from nerite.repository.ensembles import EnsembleLinker
from nerite.repository.kept_versions import KeptVersions, default_version, remaining_versions
from nerite.repository.loading_round import LoadingRound, Waits
from nerite.repository.repositories import LoadOverrides, RegisteredRepository, Repositories, Repository
from nerite.repository.sleeping_versions import SleepingVersions
from nerite.repository.version_maker import ContentHashes, VersionMaker
from nerite.repository.version_state import Entry, ModelState, VersionState
from nerite.routes.table import RouteTable

_log = logging.getLogger("nerite.repository")
_T = TypeVar("_T")
_TRIAL_PATIENCE: Final = 2.0
"""Seconds that requests of a trial have to end when the trial is over."""


class ModelManager:
    """Loads and unloads the models of the repositories. Coroutines and look-ups are for the loop's thread."""

    def __init__(
        self,
        options: RepositoryOptions,
        repositories: Sequence[Repository],
        maker: VersionMaker,
        loader: Executor,
        on_change: Callable[[], None],
        routes: RouteTable,
    ) -> None:
        """``on_change`` is called whenever the routing of requests may have changed."""
        self._options = options
        self._sources = Repositories(repositories, self._in_loader, namespacing=options.namespacing)
        self._maker = maker
        self._loader = loader
        self._on_change = on_change
        self._catalogue = Catalogue(routes, namespacing=options.namespacing)
        self._routes = DeclaredRoutes(routes, self._catalogue, self._in_loader)
        self._ensembles = EnsembleLinker(self._catalogue, maker, self._swap, self._withdraw, routes)
        self.sleeping = SleepingVersions(self._catalogue, self._ensembles.dependents, self._route, self._close_soon)
        self._waits: Waits = {}
        self._hashes = ContentHashes()
        self._kept: dict[str, KeptVersions] = {}
        """By the model's name, because they outlive its record."""
        self._background: set[asyncio.Task[None]] = set()

    @property
    def records(self) -> Catalogue:
        """Every model that was ever loaded or tried, or can be loaded on demand, by namespace and name."""
        return self._catalogue

    def running(self) -> list[RunningVersion]:
        """Return all versions that take requests."""
        return [running for record in self._catalogue for running in record.running.values()]

    def changed(self) -> None:
        """Tell whoever depends on them that records have changed."""
        self._on_change()

    @property
    def unread(self) -> bool:
        """True if a repository given by a flag has never been read successfully."""
        return self._sources.unread

    def find(self, name: str, version: str, namespace: str = "") -> RunningVersion:
        """Return the version that serves a request for ``name``.

        Raises ``NotFound`` or ``Unavailable`` with Triton's texts.
        """
        return self._catalogue.find(name, version, namespace)

    async def poll(self) -> dict[tuple[str, str], catalogue.ModelFingerprint]:
        """Return the fingerprint of every model by namespace and name; the previous one if its files cannot be read."""

        def before(namespace: str, name: str) -> catalogue.ModelFingerprint | None:
            record = self._catalogue.record(namespace, name)
            return record.seen if record is not None else None

        return await self._sources.poll(before)

    def meant(self, name: str) -> ModelRecord:
        """Resolve a model's name as a request uses it. Raises Triton's errors."""
        return self._catalogue.meant(name)

    async def offered(self) -> dict[str, list[str]]:
        """Return the names of models by namespace, once for each repository. Raises ``Internal``: one is unreadable."""
        return await self._sources.offered()

    async def index(self, *, ready_only: bool) -> list[Entry]:
        """Return every model of the repositories with the state of its versions."""
        return catalogue.index_entries(await self.offered(), self._catalogue, ready_only=ready_only)

    async def load_all(self, names: Iterable[str]) -> list[tuple[str, NeriteError]]:
        """Load models concurrently; return the failures."""
        loading, names = LoadingRound(self._load_named, self._waits), list(names)
        outcomes = await asyncio.gather(*map(loading.load, names), return_exceptions=True)
        self._finish_round(loading, names)
        failures = []
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, NeriteError):
                outcome = report("loop", outcome, f"in the load of model '{name}'")
            if isinstance(outcome, NeriteError):
                failures.append((name, outcome))
            elif outcome is not None:
                raise outcome
        return failures

    async def load(self, name: str, delivery: LoadOverrides | None = None) -> None:
        """Load or reload all models of that name from their files, or with the overrides of a load request.

        The models of an ensemble are loaded with it. Raises ``NeriteError``; the versions that serve then continue.
        """
        loading = LoadingRound(self._load_named, self._waits)
        try:
            await loading.load(name, delivery)
        except NeriteError as error:
            raise error.without_frames() from None  # the frames refer to the files in the request
        finally:
            self._finish_round(loading, (name,))
            loading.forget()

    def _finish_round(self, loading: LoadingRound, requested: Iterable[str]) -> None:
        """Mark the requested models, and update the ensembles that depend on any model of the round."""
        for name in requested:
            for record in self._catalogue.all_named(name):
                record.asked = record.asked or bool(record.running)
        self._ensembles.revise(loading.names)

    async def _load_named(self, name: str, delivery: LoadOverrides | None, loading: LoadingRound) -> None:
        load = object()
        with load_of(name):
            try:
                with stage("fetch"):
                    found = await self._fetch(name, delivery, load)
                await self._load_found(name, found, delivery, loading)
            finally:
                await self._sources.leave(load)

    async def _fetch(self, name: str, delivery: LoadOverrides | None, load: object) -> Mapping[str, Path]:
        """Return the model's directory by namespace, and record ``load`` as their user."""
        if delivery is None or not delivery.files:
            return await self._sources.fetch(name, load)
        namespaces = [record.namespace for record in self._catalogue.all_named(name)] or [""]
        return dict.fromkeys(namespaces, await self._sources.unpack(name, delivery, load))

    async def _load_found(
        self, name: str, found: Mapping[str, Path], delivery: LoadOverrides | None, loading: LoadingRound
    ) -> None:
        if not found:
            raise refusals.not_polled(name)
        loads = [self._load_one(namespace, name, folder, delivery, loading) for namespace, folder in found.items()]
        for outcome in await asyncio.gather(*loads, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _load_one(
        self, namespace: str, name: str, folder: Path, delivery: LoadOverrides | None, loading: LoadingRound
    ) -> None:
        record = self._catalogue.open(namespace, name)
        async with record.lock:
            await self._load(record, folder, delivery, loading)

    async def _load(
        self, record: ModelRecord, folder: Path, delivery: LoadOverrides | None, loading: LoadingRound
    ) -> None:
        route = await self._routes.read(record, folder)
        if route is not None:
            seen = await self._fingerprint(record, folder)
            if not seen.versions and seen.config is None:
                record.seen = seen
                await self._routes.load(record, route.route, loading)
                return
        loaded = await self._read(record, folder, delivery)
        record.seen = loaded.seen
        polled = with_arms(record, with_kept(record, self._kept.get(record.name), loaded.polled), route)
        loaded = replace(loaded, polled=polled)
        if polled.config.ensemble_scheduling is not None:
            await self._load_ensemble(record, loaded, loading)
            self._routes.follow(record, route)
            return
        unchanged = record.unchanged(loaded)
        made = await self._launch(record, polled, unchanged)
        for running in made.values():
            self._sources.folders.use(folder, running)
        record.loaded = loaded
        record.assembly = None
        self._swap(record, {**unchanged, **made})
        self._routes.follow(record, route)
        self._in_background(self._hash(record, loaded, made))

    async def _read(self, record: ModelRecord, folder: Path, delivery: LoadOverrides | None) -> LoadedVersion:
        """Read a model's files. Raises ``NeriteError`` for the first mistake in them."""
        seen = await self._fingerprint(record, folder)
        renamed = self._sources.register.gives(record.name)
        with stage("configuration"):
            polled = await self._maker.read(record.name, folder, delivery, renamed=renamed)
        if polled.mistakes:
            record.seen = seen
            raise refusals.unreadable(record, polled)
        return LoadedVersion(polled, seen, brought=delivery is not None and bool(delivery.files))

    async def _fingerprint(self, record: ModelRecord, folder: Path) -> catalogue.ModelFingerprint:
        try:
            return await self._in_loader(catalogue.model_fingerprint, folder)
        except OSError as error:
            raise refusals.not_polled(record.name, system_error(error)) from None

    def routes_changed(self) -> None:
        """Update the ensembles that have steps on routes."""
        self._ensembles.revise(self._routes.names)

    async def _load_ensemble(self, record: ModelRecord, loaded: LoadedVersion, loading: LoadingRound) -> None:
        """Load the models that an ensemble needs, and build it from them."""
        assembly = await self._maker.assembly(loaded.polled)
        with stage("its models"):
            await loading.load_parts(record.name, assembly.models)
        before = loading.circle(record.name)
        mistakes = assembly.source.place([circular_ensembles(record.name, before)]) if before else []
        self._ensembles.put_together(record, assembly, mistakes)
        record.loaded = loaded
        self._in_background(self._hash(record, loaded, record.running))

    async def _launch(
        self, record: ModelRecord, polled: PolledModel, unchanged: Mapping[int, RunningVersion]
    ) -> dict[int, RunningVersion]:
        """Make the versions that are not ``unchanged`` concurrently, and resize those that are: all or none.

        When a model starts with kept versions, all but its default version may fail.
        """
        versions = [version for version in polled.versions if version not in unchanged]
        for version in versions:
            record.states[version] = VersionState(ModelState.LOADING)
            _log.info("loading: %s:%d", record.name, version)
        outcomes = await asyncio.gather(
            *(self._maker.make(polled, version, record.note_progress) for version in versions), return_exceptions=True
        )
        made = {v: o for v, o in zip(versions, outcomes, strict=True) if isinstance(o, RunningVersion)}
        failures: dict[int, NeriteError] = {}
        for version, outcome in zip(versions, outcomes, strict=True):
            if isinstance(outcome, Exception):
                if not isinstance(outcome, NeriteError | OSError):  # a bug in the server
                    _log.error("making '%s' version %d failed", record.name, version, exc_info=outcome)
                failures[version] = refusals.refusal(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        for version, running in unchanged.items() if not failures else ():
            try:
                await self._maker.resize(polled, running)
            except NeriteError as error:
                failures[version] = error.without_frames()
        kept = self._kept.get(record.name)
        if failures and kept is not None and kept.default in made and not record.running:
            refusals.failed(record, failures)  # logs and records them
        elif failures:
            for running in made.values():
                self._in_background(self._close(None, running))
            for version in made:
                record.states[version] = record.unloaded()
            for version in record.running:
                record.states[version] = VersionState(ModelState.READY)
            raise refusals.failed(record, failures)
        return made

    def _swap(self, record: ModelRecord, running: dict[int, RunningVersion]) -> list[asyncio.Task[None]]:
        """Route requests to the new versions; return the tasks that drain the old ones."""
        old = record.running
        self._route(record, running)
        log_loaded(record.name)
        self.sleeping.drop(record)
        replaced = {version: previous for version, previous in old.items() if running.get(version) is not previous}
        for version in replaced.keys() - running.keys():
            record.states[version] = VersionState(ModelState.UNLOADING)
        return [self._close_soon(record, previous) for previous in replaced.values()]

    def _route(self, record: ModelRecord, running: dict[int, RunningVersion]) -> None:
        record.running = running
        record.latest = default_version(self._kept.get(record.name), running)
        record.unreadable = ""
        record.going = False
        record.states.pop(-1, None)
        for version in running:
            record.states[version] = VersionState(ModelState.READY)
        self._on_change()

    async def _hash(self, record: ModelRecord, loaded: LoadedVersion, made: Mapping[int, RunningVersion]) -> None:
        """Compute the content hash of new versions; the time is proportional to the size of their files."""
        for version, running in made.items():
            content = await self._in_loader(self._hashes.of_version, loaded, version)
            if content and record.running.get(version) is running:
                running.content = content

    # Versions that are kept

    def kept(self, name: str) -> KeptVersions | None:
        """Return the versions of a model that are kept; None if the version policy alone decides."""
        return self._kept.get(name)

    def keep_when_loaded(self, name: str, versions: Iterable[int], default: int) -> None:
        """Keep versions of a model from its next load on: for a server that starts again during a rollout.

        If other versions than ``default`` then fail to load, the model is served without them.
        """
        self._kept[name] = KeptVersions(frozenset((*versions, default)), default)

    async def keep_versions(self, name: str, versions: Iterable[int], default: int | None = None) -> None:
        """Load ``versions`` beside those that run, and keep all of them until ``release_versions``.

        Requests that name no version go to ``default``, which is the version they go to now if it is not given.
        Versions that run are neither reloaded nor interrupted. Raises ``NeriteError``; nothing has changed then.
        """
        record = self._catalogue.meant(name)
        async with record.lock:
            record.find("")
            before = self._kept.get(name)
            kept = before or KeptVersions(frozenset(), record.latest)
            kept = kept.with_versions((*record.running, *versions))
            if default is not None:
                kept = kept.with_versions((default,))._replace(default=default)
            optional, record.optional = record.optional, kept.optional
            self._kept[name] = kept
            try:
                await self._load_beside(record, sorted(kept.versions - record.running.keys()))
            except BaseException:  # re-raised below
                del self._kept[name]
                if before is not None:
                    self._kept[name] = before
                record.optional |= optional
                raise
        self._ensembles.revise((name,))

    async def release_versions(self, name: str, without: Collection[int] = ()) -> None:
        """Let the version policy choose again among the versions that run; the others are drained and unloaded.

        Versions in ``without`` are unloaded even if the policy selects them; they stay unloaded until the next load
        of the model. Raises ``InvalidArgument`` if no version would remain.
        """
        kept = self._kept.get(name)
        if kept is None:
            return
        for record in self._catalogue.all_named(name):
            async with record.lock:
                await self._release(record, kept, without)
        self._kept.pop(name, None)
        self._ensembles.revise((name,))

    @contextlib.asynccontextmanager
    async def trial(self, name: str, version: int) -> AsyncIterator[RunningVersion]:
        """Load a version that clients cannot reach, and unload it afterwards, even if it is stuck.

        What serves, polls and the repository index take no notice of it. Raises ``NeriteError`` if it cannot be loaded.
        """
        record = self._catalogue.meant(name)
        load = object()
        try:
            folder = (await self._sources.fetch(name, load)).get(record.namespace)
            if folder is None:
                raise refusals.not_polled(name)
            polled = (await self._read(record, folder, None)).polled
            if version not in polled.existing:
                raise refusals.no_version_to_load(name, version, polled)
            if polled.config.ensemble_scheduling is not None:
                raise refusals.no_trial_of_ensemble(name, version)
            running = await self._maker.make(replace(polled, versions=(version,)), version)
            self._sources.folders.use(folder, running)
        finally:
            await self._sources.leave(load)
        try:
            yield running
        finally:
            running.abandon(refusals.stopping())
            self._in_background(self._close(None, running, _TRIAL_PATIENCE))

    async def _load_beside(self, record: ModelRecord, versions: Sequence[int]) -> None:
        """Load further versions of a model that runs, and route requests to them."""
        if not versions:
            self._swap(record, record.running)
            return
        load = object()
        with load_of(record.name):
            try:
                with stage("fetch"):
                    folder = (await self._sources.fetch(record.name, load)).get(record.namespace)
                if folder is None:
                    raise refusals.not_polled(record.name)
                loaded = await self._read(record, folder, None)
                for version in versions:
                    if version not in loaded.polled.existing:
                        raise refusals.no_version_to_load(record.name, version, loaded.polled)
                if record.assembly is not None:
                    every = tuple(sorted((*record.running, *versions)))
                    self._ensembles.put_together(record, replace(record.assembly, versions=every), [])
                    return
                made = await self._launch(record, replace(loaded.polled, versions=tuple(versions)), {})
                for running in made.values():
                    self._sources.folders.use(folder, running)
                assert record.loaded is not None
                record.loaded = record.loaded.with_versions(made, loaded)
                self._swap(record, {**record.running, **made})
                self._in_background(self._hash(record, loaded, made))
            finally:
                await self._sources.leave(load)

    async def _release(self, record: ModelRecord, kept: KeptVersions, without: Collection[int]) -> None:
        remaining = remaining_versions(await self._version_policy(record), record.running, without, record.name)
        if record.running and not remaining:
            raise InvalidArgument(f"no version of model '{record.name}' would remain loaded")
        self._kept.pop(record.name, None)
        record.optional = frozenset()
        for version in kept.versions - record.running.keys():
            record.states[version] = record.unloaded()
        if remaining:
            if record.assembly is not None:
                record.assembly = replace(record.assembly, versions=remaining)
            self._swap(record, {version: record.running[version] for version in remaining})

    async def _version_policy(self, record: ModelRecord) -> ModelVersionPolicy:
        """Return the version policy in a model's files, or the one it was loaded with if they cannot be read."""
        loaded = record.loaded
        policy = loaded.polled.config.version_policy if loaded is not None else None
        load = object()
        try:
            folder = (await self._sources.fetch(record.name, load)).get(record.namespace)
            if folder is not None and loaded is not None and not loaded.brought:
                policy = (await self._read(record, folder, None)).polled.config.version_policy
        except NeriteError as error:
            _log.warning("version policy of '%s' cannot be read again: %s", record.name, error.message)
        finally:
            await self._sources.leave(load)
        return policy or ModelVersionPolicy(latest=ModelVersionPolicy.Latest(num_versions=1))

    async def register(self, repository: RegisteredRepository, name: str) -> None:
        """Add a repository and load a model of it: both or neither. Raises ``NeriteError``."""
        self._sources.register.add(repository)
        try:
            await self.load(name)
        except BaseException:  # re-raised below
            await self.unregister(repository)
            raise

    async def unregister(self, repository: RegisteredRepository) -> None:
        """Unload the models of a repository and remove it, with models of it that never ran.

        Returns when all its versions are closed.
        """
        closing: list[asyncio.Task[None]] = []
        for record in self.records:
            if record.loaded is not None and repository.holds(record.loaded.polled.directory):
                closing += await self.unload_one(record)
            elif repository.gives(record.name) and not record.running:
                self._catalogue.forget(record)
        if closing:
            await asyncio.wait(closing)
        self._sources.register.remove(repository)

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload all models of that name, gracefully; does not wait for them to drain. Unknown names are ignored.

        With ``dependents``, models that were loaded only for an ensemble are unloaded with it.
        """
        for record in self._catalogue.all_named(name):
            await self.unload_one(record, dependents=dependents)

    async def unload_one(
        self, record: ModelRecord, *, dependents: bool = False, unless: Callable[[], bool] = lambda: False
    ) -> list[asyncio.Task[None]]:
        """Unload a model once no load of it, or of an ensemble that needs it, is in progress; do nothing ``unless``.

        Ensembles that need it are withdrawn at once; the model stays until they have drained. Returns the tasks that
        drain the model and those ensembles.
        """
        while ensemble := self._loading_with(record.name):
            for each in self._catalogue.all_named(ensemble):
                async with each.lock:  # held for the duration of the load
                    pass
        async with record.lock:
            if unless():
                return []
            spare = self._ensembles.spare_without(record) if dependents else []
            self._mark_unloading(record)
            closing = self._ensembles.revise((record.name,))
            if closing:
                closing.append(self._in_background(self._unload_after(record, tuple(closing))))
            else:
                closing = self._unload_now(record)
        for part in spare:
            self._mark_unloading(part)
            closing.append(self._in_background(self._unload_after(part, tuple(closing))))
        return closing

    def _loading_with(self, name: str) -> str:
        """Return an ensemble being loaded that needs this model, directly or through another; empty if none does."""
        needed = [name]
        for each in needed:
            if ensemble := next((ensemble for ensemble, parts in self._waits.items() if each in parts), ""):
                return ensemble
            needed += [other.name for other in self._ensembles.dependents(each) if other.name not in needed]
        return ""

    def _mark_unloading(self, record: ModelRecord) -> None:
        """Mark a model to be unloaded, unless it is loaded again before that."""
        record.asked = False
        record.assembly = None
        self._routes.follow(record, None)
        if -1 in record.states and record.states[-1].state is ModelState.READY:
            record.states[-1] = record.unloaded()
        record.going = bool(record.running)
        for version in record.running:
            record.states[version] = VersionState(ModelState.UNLOADING)

    async def _unload_after(self, record: ModelRecord, earlier: Sequence[asyncio.Task[None]]) -> None:
        if earlier:
            await asyncio.wait(earlier)
        async with record.lock:
            closing = self._unload_now(record) if record.going else []
        if closing:
            await asyncio.wait(closing)

    def _unload_now(self, record: ModelRecord) -> list[asyncio.Task[None]]:
        record.seen = record.loaded = None
        return [*self._withdraw(record), *self.sleeping.drop(record)]

    def _withdraw(self, record: ModelRecord) -> list[asyncio.Task[None]]:
        """Stop routing requests to a model; return the tasks that drain its versions."""
        old, record.running = record.running, {}
        record.latest = -1
        record.going = False
        self._on_change()
        for version in old:
            record.states[version] = VersionState(ModelState.UNLOADING)
        return [self._close_soon(record, running) for running in old.values()]

    def _close_soon(self, record: ModelRecord, running: RunningVersion) -> asyncio.Task[None]:
        return self._in_background(self._close(record, running))

    async def _close(self, record: ModelRecord | None, running: RunningVersion, patience: float | None = None) -> None:
        """Close a version when it is drained, or after ``patience`` seconds."""
        drained, closed = asyncio.Event(), asyncio.Event()
        running.drain(drained.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await drained.wait()
        running.close(closed.set)
        await closed.wait()
        await self._sources.leave(running)
        if record is None:
            return
        state = record.states.get(running.version)
        if state is not None and running.version not in record.running and state.state is not ModelState.LOADING:
            record.states[running.version] = record.unloaded()
        _log.info("successfully unloaded '%s' version %d", running.name, running.version)

    async def close(self) -> None:
        """Close all running versions and wait for them. Queued requests are rejected."""
        self._hashes.stop()
        for record in self.records:
            running, record.running = record.running, {}
            record.latest = -1
            for version in running.values():
                version.abandon(refusals.stopping())
                self._close_soon(record, version)
            self.sleeping.drop(record)
        self._on_change()
        while self._background:
            await asyncio.wait(self._background)

    async def _in_loader(self, call: Callable[..., _T], *arguments: object) -> _T:
        """Run a blocking call on the loader's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._loader, call, *arguments)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
