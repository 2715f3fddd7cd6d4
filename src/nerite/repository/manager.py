"""Lifecycle of every model: load, swap, drain, close; on request, at start-up, or because files changed.

A load never disturbs the versions that serve. New versions are launched next to the old ones; only when all of them
are ready does one step of the loop route requests to them. The old versions then drain and are closed. If anything
fails, the old versions continue unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nerite.config.loading import PolledModel
from nerite.config.options import RepositoryOptions
from nerite.config.validate_ensemble import circular_ensembles
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.failures import system_error
from nerite.models.running_version import RunningVersion
from nerite.observability.load_times import load_of, log_loaded, stage
from nerite.repository import catalogue, refusals
from nerite.repository.catalogue import Catalogue, LoadedVersion, ModelRecord, ModelState, VersionState
from nerite.repository.ensembles import EnsembleLinker
from nerite.repository.repositories import (
    LoadOverrides,
    RegisteredRepository,
    Repositories,
    Repository,
    new_override_folder,
    write_files,
)
from nerite.repository.version_maker import ContentHashes, VersionMaker
from nerite.routes.route_file import RouteFile, read_route_file, versions_of
from nerite.routes.table import RouteTable
from nerite.scheduling.weighted_route import RouteArm, WeightedRoute

Waits = dict[str, set[str]]
"""Ensembles by name, with the models that they wait for, in all rounds in progress."""


class LoadingRound:
    """One round of loads: each model is loaded at most once, and no load waits for itself. For the loop's thread."""

    def __init__(
        self, bring: Callable[[str, LoadOverrides | None, LoadingRound], Awaitable[None]], waits: Waits
    ) -> None:
        """``bring`` loads a model, and raises ``NeriteError``."""
        self._bring = bring
        self._waits = waits
        self._tasks: dict[str, asyncio.Future[None]] = {}
        self._cycles: dict[str, str] = {}
        """Models on a cycle, each with the ensemble before it."""

    @property
    def names(self) -> Iterable[str]:
        """The models that this round has loaded or tried to load."""
        return self._tasks.keys()

    async def load(self, name: str, delivery: LoadOverrides | None = None) -> None:
        """Load a model, or wait for its load in this round. Raises as ``bring`` does."""
        await self._task(name, delivery)

    def forget(self) -> None:
        """Drop the results of the loads: the frames of an error refer to this round."""
        self._tasks.clear()

    async def load_parts(self, ensemble: str, parts: Iterable[str]) -> None:
        """Load the models of an ensemble's steps concurrently. Failures are not raised; the ensemble finds them later.

        Models whose load waits for the ensemble itself are left out, and the cycle is recorded.
        """
        waits = self._waits[ensemble] = set()
        tasks = []
        for part in parts:
            chain = self._wait_chain(part, ensemble)
            if chain:
                for before, each in zip((ensemble, *chain), chain, strict=False):
                    self._cycles[each] = before
            else:
                waits.add(part)
                tasks.append(self._task(part, None))
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._waits.pop(ensemble, None)

    def circle(self, ensemble: str) -> str:
        """Return the last ensemble on the cycle through ``ensemble``; empty if it is not on a cycle."""
        return self._cycles.get(ensemble, "")

    def _task(self, name: str, delivery: LoadOverrides | None) -> asyncio.Future[None]:
        if name not in self._tasks:
            self._tasks[name] = asyncio.ensure_future(self._bring(name, delivery, self))
        return self._tasks[name]

    def _wait_chain(self, start: str, end: str) -> list[str]:
        """Return the chain of models through which ``start`` waits for ``end``, both included; else nothing."""
        if start == end:
            return [start]
        for each in self._waits.get(start, ()):
            chain = self._wait_chain(each, end)
            if chain:
                return [start, *chain]
        return []


_log = logging.getLogger("nerite.repository")
_T = TypeVar("_T")


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
        self._routes = routes
        self._catalogue = Catalogue(routes, namespacing=options.namespacing)
        self._ensembles = EnsembleLinker(self._catalogue, maker, self._swap, self._withdraw, routes)
        self._waits: Waits = {}
        self._hashes = ContentHashes()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def records(self) -> Iterable[ModelRecord]:
        """Every model that was ever loaded or tried, by namespace and name."""
        return self._catalogue

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
        """Return the names of the models in each namespace; a name in several repositories appears once for each.

        Raises ``Internal`` if a repository cannot be read.
        """
        return await self._sources.offered()

    async def index(self, *, ready_only: bool) -> list[catalogue.Entry]:
        """Return every model of the repositories with the state of its versions."""
        return catalogue.index_entries(await self.offered(), self._catalogue, ready_only=ready_only)

    async def load_all(self, names: Iterable[str]) -> list[tuple[str, NeriteError]]:
        """Load models concurrently; return the failures."""
        names = list(names)
        loading = LoadingRound(self._load_named, self._waits)
        outcomes = await asyncio.gather(*map(loading.load, names), return_exceptions=True)
        self._finish_round(loading, names)
        failures = []
        for name, outcome in zip(names, outcomes, strict=True):
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
        folder = Path()
        try:
            folder = await self._in_loader(new_override_folder)
            # Taken before it exists, so that however the load ends the directory is removed with its last user.
            self._sources.folders.take(folder, load, partial(shutil.rmtree, folder, ignore_errors=True))
            await self._in_loader(write_files, delivery, folder)
        except OSError as error:
            why = f"The files of the load request cannot be written: {system_error(error, folder)}."
            raise refusals.not_polled(name, f"{why} Set TMPDIR to use another directory.") from None
        namespaces = [record.namespace for record in self._catalogue.all_named(name)] or [""]
        return dict.fromkeys(namespaces, folder)

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
        try:
            seen = await self._in_loader(catalogue.model_fingerprint, folder)
        except OSError as error:
            raise refusals.not_polled(record.name, system_error(error)) from None
        record.seen = seen
        route = await self._read_route(record, folder)
        if route is not None and not seen.versions and seen.config is None:
            await self._load_route(record, route.route, loading)
            return
        renamed = self._sources.register.gives(record.name)
        with stage("configuration"):
            polled = await self._maker.read(record.name, folder, delivery, renamed=renamed)
        if polled.mistakes:
            raise refusals.unreadable(record, polled)
        if route is not None:
            polled = self._with_arms(record, polled, route)
        loaded = LoadedVersion(polled, seen, brought=delivery is not None and bool(delivery.files))
        if polled.config.ensemble_scheduling is not None:
            await self._load_ensemble(record, loaded, loading)
            self._follow_route(record, route)
            return
        kept = record.unchanged(loaded)
        made = await self._launch(record, polled, kept)
        for running in made.values():
            self._sources.folders.use(folder, running)
        record.loaded = loaded
        record.assembly = None
        self._swap(record, {**kept, **made})
        self._follow_route(record, route)
        self._in_background(self._hash(record, loaded, made))

    async def _read_route(self, record: ModelRecord, folder: Path) -> RouteFile | None:
        """Return the route in a model's directory, if it has one. Raises ``NeriteError`` for a mistake in it."""
        try:
            route = await self._in_loader(read_route_file, folder)
            if route is not None:
                self._routes.check(route.route)
            return route
        except InvalidArgument as error:
            raise refusals.no_route(record, error.message) from None
        except OSError as error:
            raise refusals.no_route(record, system_error(error, folder)) from None

    async def _load_route(self, record: ModelRecord, route: WeightedRoute, loading: LoadingRound) -> None:
        """Load the models behind a name that only a route has. Those that cannot be loaded get no requests."""
        shadow = route.shadow
        models = dict.fromkeys(arm.model for arm in (*route.arms, *([] if shadow is None else [shadow.arm])))
        with stage("its models"):
            await loading.load_parts(record.name, models)
        ready = [arm for arm in route.arms if self._runs(arm)]
        if not any(arm.weight for arm in ready):
            raise refusals.no_route(record, f"none of its arms is ready: {', '.join(models)}")
        for arm in route.arms:
            if arm not in ready:
                _log.warning(
                    "route '%s': arm '%s' is not ready and gets no requests until it is", route.name, arm.label
                )
        shares = ", ".join(f"{arm.label} {arm.weight:g}" for arm in route.arms)
        record.states = {-1: VersionState(ModelState.READY, f"route: {shares}")}
        record.unreadable = ""
        self._follow_route(record, RouteFile(route, ()))

    def _runs(self, arm: RouteArm) -> bool:
        try:
            return self._catalogue.find(arm.model, arm.version) is not None
        except NeriteError:
            return False

    def _with_arms(self, record: ModelRecord, polled: PolledModel, route: RouteFile) -> PolledModel:
        """Add the versions that a route names to those that are loaded. Raises ``NeriteError`` for missing ones."""
        try:
            arms = versions_of(route, record.name, polled.existing)
        except InvalidArgument as error:
            raise refusals.no_route(record, error.message) from None
        return replace(polled, versions=tuple(sorted(arms.union(polled.versions))))

    def _follow_route(self, record: ModelRecord, route: RouteFile | None) -> None:
        """Apply the route in a model's directory, or that it has none any more."""
        if route is not None:
            record.routed = True
            self._routes.put(route.route)
        elif record.routed:
            record.routed = False
            self._routes.remove(record.name)

    def routes_changed(self) -> None:
        """Update the ensembles that have steps on routes."""
        self._ensembles.revise({route.name for route in self._routes})

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
        self, record: ModelRecord, polled: PolledModel, kept: Mapping[int, RunningVersion]
    ) -> dict[int, RunningVersion]:
        """Make the versions that are not ``kept`` concurrently, and resize those that are: all or none."""
        versions = [version for version in polled.versions if version not in kept]
        for version in versions:
            record.states[version] = VersionState(ModelState.LOADING)
            _log.info("loading: %s:%d", record.name, version)
        outcomes = await asyncio.gather(
            *(self._maker.make(polled, version) for version in versions), return_exceptions=True
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
        for version, running in kept.items() if not failures else ():
            try:
                await self._maker.resize(polled, running)
            except NeriteError as error:
                failures[version] = error.without_frames()
        if failures:
            for running in made.values():
                self._retire(None, running)
            for version in made:
                record.states[version] = VersionState(ModelState.UNAVAILABLE, "unloaded")
            for version in record.running:
                record.states[version] = VersionState(ModelState.READY)
            raise refusals.failed(record, failures)
        return made

    def _swap(self, record: ModelRecord, running: dict[int, RunningVersion]) -> list[asyncio.Task[None]]:
        """Route requests to the new versions; return the tasks that drain the old ones."""
        old = record.running
        record.running = running
        record.latest = max(running)
        record.unreadable = ""
        record.going = False
        record.states.pop(-1, None)
        for version in running:
            record.states[version] = VersionState(ModelState.READY)
        self._on_change()
        log_loaded(record.name)
        replaced = {version: previous for version, previous in old.items() if running.get(version) is not previous}
        for version in replaced.keys() - running.keys():
            record.states[version] = VersionState(ModelState.UNLOADING)
        return [self._retire(record, previous) for previous in replaced.values()]

    async def _hash(self, record: ModelRecord, loaded: LoadedVersion, made: Mapping[int, RunningVersion]) -> None:
        """Compute the content hash of new versions; the time is proportional to the size of their files."""
        for version, running in made.items():
            content = await self._in_loader(self._hashes.of_version, loaded, version)
            if content and record.running.get(version) is running:
                running.content = content

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

    async def unload_one(self, record: ModelRecord, *, dependents: bool = False) -> list[asyncio.Task[None]]:
        """Unload a model once no load of it, or of an ensemble that needs it, is in progress.

        Ensembles that need it are withdrawn at once; the model stays until they have drained. Returns the tasks that
        drain the model and those ensembles.
        """
        while ensemble := self._loading_with(record.name):
            for each in self._catalogue.all_named(ensemble):
                async with each.lock:  # held for the duration of the load
                    pass
        async with record.lock:
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
        self._follow_route(record, None)
        if -1 in record.states and record.states[-1].state is ModelState.READY:
            record.states[-1] = VersionState(ModelState.UNAVAILABLE, "unloaded")
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
        return self._withdraw(record)

    def _withdraw(self, record: ModelRecord) -> list[asyncio.Task[None]]:
        """Stop routing requests to a model; return the tasks that drain its versions."""
        old, record.running = record.running, {}
        record.latest = -1
        record.going = False
        self._on_change()
        for version in old:
            record.states[version] = VersionState(ModelState.UNLOADING)
        return [self._retire(record, running) for running in old.values()]

    def _retire(self, record: ModelRecord | None, running: RunningVersion) -> asyncio.Task[None]:
        """Drain a version in the background, then close it."""
        return self._in_background(self._close(record, running))

    async def _close(self, record: ModelRecord | None, running: RunningVersion) -> None:
        done = asyncio.Event()
        running.drain(lambda: running.close(done.set))
        await done.wait()
        await self._sources.leave(running)
        if record is None:
            return
        state = record.states.get(running.version)
        if state is not None and running.version not in record.running and state.state is not ModelState.LOADING:
            record.states[running.version] = VersionState(ModelState.UNAVAILABLE, "unloaded")
        _log.info("successfully unloaded '%s' version %d", running.name, running.version)

    async def close(self) -> None:
        """Close all running versions and wait for them. Queued requests are rejected."""
        self._hashes.stop()
        for record in self.records:
            running, record.running = record.running, {}
            record.latest = -1
            for version in running.values():
                version.abandon(refusals.stopping())
                self._retire(record, version)
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
