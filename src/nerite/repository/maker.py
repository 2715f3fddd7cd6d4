"""From a model's directory to versions that run: read, complete, launch, and try again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from nerite.artifacts import damage
from nerite.backends import registry
from nerite.backends.directory import SETTING
from nerite.backends.interface import ModelContext
from nerite.cache.interface import ResponseCache
from nerite.config.json_form import to_json
from nerite.config.loading import FinishedConfig, PolledModel, Remark, finish_config, poll_model_directory
from nerite.config.mistake import told
from nerite.config.model_config import ModelConfig
from nerite.config.options import RepositoryOptions
from nerite.config.signature import signature_of
from nerite.core.errors import NeriteError
from nerite.core.signature import Signature
from nerite.execution.launcher import Launcher
from nerite.execution.running_version import RunningVersion
from nerite.observability.load_times import stage
from nerite.repository import agents
from nerite.repository.assembly import Assembly
from nerite.repository.delivery import Delivery
from nerite.repository.placement import Placement
from nerite.scheduling.ensemble.graph import Part

_log = logging.getLogger("nerite.repository")
_LEVELS = {"note": _log.info, "warning": _log.warning, "error": _log.error}


class VersionMaker:
    """Makes model versions run, so many at a time as there are slots. Its coroutines are for the loop."""

    def __init__(
        self,
        options: RepositoryOptions,
        settings_of: Callable[[str], Mapping[str, str]],
        launcher: Launcher,
        loader: Executor,
        slots: asyncio.Semaphore,
        cache: ResponseCache | None,
        placement: Placement,
    ) -> None:
        """``settings_of`` has the ``--backend-config`` values of a backend. Each model that is loaded has a slot."""
        self._options = options
        self._settings_of = settings_of
        self._launcher = launcher
        self._loader = loader
        self._slots = slots
        self._cache = cache
        self._placement = placement

    async def read(self, name: str, directory: Path, delivery: Delivery | None, *, renamed: bool) -> PolledModel:
        """Return what is written about a model. What is wrong with it is in the result.

        ``renamed``: that its configuration has another name is not.
        """

        def read() -> PolledModel:
            polled = poll_model_directory(
                directory,
                name=name,
                renamed=renamed,
                config_name=self._options.config_name,
                override=None if delivery is None else delivery.config,
                auto_complete=self._options.auto_complete,
            )
            return agents.consulted(polled)

        polled = await asyncio.get_running_loop().run_in_executor(self._loader, read)
        _tell(polled.remarks)
        return polled

    async def make(self, polled: PolledModel, version: int) -> RunningVersion:
        """Complete the configuration of a version, and make it run. Raises ``NeriteError`` when no retry is left."""
        tries = self._options.load_retries + 1
        async with AsyncExitStack() as slot:
            with stage("waiting"):
                await slot.enter_async_context(self._slots)
            while True:
                tries -= 1
                try:
                    return await self._make(polled, version)
                except NeriteError as error:
                    if not tries:
                        # Its frames have in hand what was loaded so far, weights and files. Nobody reads them any more.
                        error.__context__ = None
                        raise error.with_traceback(None) from None
                    _log.warning(
                        "failed to load '%s' version %d, trying again: %s", polled.name, version, error.message
                    )

    async def assembly(self, polled: PolledModel) -> Assembly:
        """Return what there is to an ensemble. Raises ``NeriteError`` for the first mistake in it."""

        def complete() -> Assembly:
            finished = finish_config(polled, None)
            if finished.mistakes:
                raise finished.mistakes[0].as_error()
            signature = signature_of(finished.config, polled.directory)
            return Assembly(finished.config, signature, polled.versions, polled.text.source)

        return await asyncio.get_running_loop().run_in_executor(self._loader, complete)

    def assemble(
        self, name: str, version: int, config: ModelConfig, signature: Signature, parts: Sequence[Part]
    ) -> RunningVersion:
        """Make a version of an ensemble run, whose models run already."""
        _log.info("loading: %s:%d", name, version)
        return self._behind_cache(self._launcher.assemble(name, version, config, signature, parts))

    async def resize(self, polled: PolledModel, running: RunningVersion) -> None:
        """Give a version that runs the instances that its configuration asks for now. Raises ``NeriteError``."""
        finished = finish_config(polled, None, gpus=self._placement.gpus(polled.config.backend))
        if finished.mistakes:
            raise finished.mistakes[0].as_error()
        groups = finished.config.instance_group
        if groups != running.config.instance_group:
            await self._launcher.resize(running, replace(running.config, instance_group=groups))
            _log.info("'%s' version %d has %d instances now", running.name, running.version, len(running.runners))

    async def _make(self, polled: PolledModel, version: int) -> RunningVersion:
        memo: dict[str, Any] = {}
        with stage("configuration"):
            loop = asyncio.get_running_loop()
            finished = await loop.run_in_executor(self._loader, self._finish, polled, version, memo)
        _tell(finished.remarks)
        if finished.mistakes:
            for line in told(finished.mistakes):
                _log.error("%s", line)
            raise finished.mistakes[0].as_error()
        context = self._context(polled, finished.config, version, memo)
        signature = signature_of(finished.config, polled.directory)
        try:
            return self._behind_cache(await self._launcher.launch(finished.config, context, signature))
        except NeriteError as error:
            folder, filename = context.version_directory, finished.config.default_model_filename
            raise await loop.run_in_executor(self._loader, damage.explained, error, folder, filename) from None

    def _behind_cache(self, running: RunningVersion) -> RunningVersion:
        """Return a version that is answered for by the cache where it wants that."""
        if running.cached and self._cache is not None:
            running.put_before(self._cache)
        elif running.cached:
            _log.warning(
                "model '%s' enables the response cache, and the server has none: its answers are computed each time. "
                "Start the server with --cache-config=local,size=<bytes>",
                running.name,
            )
        return running

    def _finish(self, polled: PolledModel, version: int, memo: dict[str, Any]) -> FinishedConfig:
        def complete(config: ModelConfig, version: int) -> Mapping[str, Any]:
            with damage.looked_at(polled.directory / str(version), config.default_model_filename):
                return self._launcher.complete(config.backend, self._context(polled, config, version, memo))

        place = self._settings_of(polled.config.backend).get(SETTING, "")
        polled = replace(polled, config=registry.filled_in(polled.config, place))
        finished = finish_config(
            polled,
            version,
            complete=complete if self._options.auto_complete else None,
            gpus=self._placement.gpus(polled.config.backend),
        )
        if not finished.mistakes:
            damage.refuse_pointers(polled.directory / str(version), finished.config.default_model_filename)
            self._placement.check_room(finished.config)
        return finished

    def _context(self, polled: PolledModel, config: ModelConfig, version: int, memo: dict[str, Any]) -> ModelContext:
        settings = self._settings_of(config.backend)
        return ModelContext(polled.name, version, polled.directory, to_json(config), settings, memo)


def _tell(remarks: Iterable[Remark]) -> None:
    for remark in remarks:
        _LEVELS[remark.level](remark.text)
