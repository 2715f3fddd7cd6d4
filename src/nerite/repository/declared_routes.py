"""Routes that files in the directories of models declare, and the versions that are loaded for routes and rollouts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nerite.config.loading import PolledModel
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.failures import system_error
from nerite.observability.load_times import stage
from nerite.repository import refusals
from nerite.repository.catalogue import Catalogue, ModelRecord
from nerite.repository.kept_versions import KeptVersions
from nerite.repository.loading_round import LoadingRound
from nerite.repository.version_state import ModelState, VersionState
from nerite.routes.route_file import RouteFile, read_route_file, versions_of
from nerite.routes.table import RouteTable
from nerite.scheduling.weighted_route import RouteArm, WeightedRoute

_log = logging.getLogger("nerite.repository")


class DeclaredRoutes:
    """Reads the routes of models with their files, and puts them into the table. For the loop's thread."""

    def __init__(self, table: RouteTable, catalogue: Catalogue, in_loader: Callable[..., Awaitable[Any]]) -> None:
        """``in_loader`` runs a blocking call on another thread."""
        self._table = table
        self._catalogue = catalogue
        self._in_loader = in_loader

    @property
    def names(self) -> set[str]:
        """The names of all routes, declared in files or not."""
        return {route.name for route in self._table}

    async def read(self, record: ModelRecord, folder: Path) -> RouteFile | None:
        """Return the route in a model's directory, if it has one. Raises ``NeriteError`` for a mistake in it."""
        try:
            found: RouteFile | None = await self._in_loader(read_route_file, folder)
            if found is not None:
                self._table.check(found.route)
        except InvalidArgument as error:
            raise refusals.no_route(record, error.message) from None
        except OSError as error:
            raise refusals.no_route(record, system_error(error, folder)) from None
        return found

    async def load(self, record: ModelRecord, route: WeightedRoute, loading: LoadingRound) -> None:
        """Load the models behind a name that only a route has. Those that cannot be loaded get no requests."""
        models = dict.fromkeys(arm.model for arm in route.targets)
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
        self.follow(record, RouteFile(route, ()))

    def follow(self, record: ModelRecord, route: RouteFile | None) -> None:
        """Apply the route in a model's directory, or that it has none any more."""
        if route is not None:
            record.routed = True
            self._table.put(route.route)
        elif record.routed:
            record.routed = False
            self._table.remove(record.name)

    def _runs(self, arm: RouteArm) -> bool:
        try:
            return self._catalogue.find(arm.model, arm.version) is not None
        except NeriteError:
            return False


def with_arms(record: ModelRecord, polled: PolledModel, route: RouteFile | None) -> PolledModel:
    """Add the versions that a route names to those that are loaded. Raises ``NeriteError`` for missing ones."""
    if route is None:
        return polled
    try:
        arms = versions_of(route, record.name, polled.existing)
    except InvalidArgument as error:
        raise refusals.no_route(record, error.message) from None
    return replace(polled, versions=tuple(sorted(arms.union(polled.versions))))


def with_kept(record: ModelRecord, kept: KeptVersions | None, polled: PolledModel) -> PolledModel:
    """Add the kept versions to those that are loaded. Raises ``NeriteError`` if one runs that has no files now."""
    record.optional = kept.optional if kept is not None else frozenset()
    if kept is None:
        return polled
    for version in kept.absent(polled):
        absence = refusals.kept_version_absent(record.name, polled.directory / str(version))
        if version in record.running:
            raise absence
    return replace(polled, versions=kept.add_to(polled))
