"""Turns a model's directory into running versions: reads and completes its configuration, launches, retries.

Also GPU placement, the ``checksum`` repository agent and content hashes, which are parts of a load.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from nerite.artifacts.recognition import damage_explained, refuse_unusable_files, with_damage_noted
from nerite.backends import gpu_builds, registry
from nerite.backends.interface import ModelContext
from nerite.backends.registry import SETTING
from nerite.config.defaults import Gpus, normalise_instances
from nerite.config.json_form import to_json
from nerite.config.loading import FinishedConfig, PolledModel, Remark, finish_config, poll_model_directory
from nerite.config.mistake import FieldPath, Mistake, mistake_text
from nerite.config.model_config import ModelConfig, ModelRepositoryAgents
from nerite.config.options import RepositoryOptions
from nerite.config.signature import signature_of
from nerite.config.text import to_text
from nerite.config.validate import check_instances
from nerite.core.errors import Internal, NeriteError, Unavailable, Unsupported
from nerite.core.memory import OwnMemory, memory_of
from nerite.core.signature import Signature
from nerite.models.launcher import Launcher
from nerite.models.running_version import RunningVersion
from nerite.observability.gpus import Gpu, GpuLibrary
from nerite.observability.load_times import stage
from nerite.repository import catalogue
from nerite.repository.catalogue import EnsembleDefinition, FileEntry, LoadedVersion
from nerite.repository.memory_use import LoadGrowth, files_size
from nerite.repository.repositories import LoadOverrides
from nerite.scheduling.ensemble import StepModel


class GpuPlacement:
    """Decides which GPUs models may use, and whether a GPU has memory left for one more model. Thread-safe."""

    def __init__(
        self, library: GpuLibrary, gpus: Sequence[Gpu], minimum: float, limits: Mapping[int, float] | None = None
    ) -> None:
        """``gpus`` have at least the compute capability ``minimum``.

        ``limits`` maps GPU numbers to the fraction of memory in use above which no model is loaded.
        """
        self._library = library
        self._gpus = {gpu.number: gpu for gpu in gpus}
        self._machine = gpu_builds.machine_with(library, gpus)
        self._minimum = minimum
        self._limits = limits or {}

    def gpus(self, config: ModelConfig) -> Gpus:
        """Return the GPUs that a model may use, and why the framework that this Python has for it cannot use them."""
        found = Gpus(tuple(self._gpus), self._minimum)
        misfit = gpu_builds.backend_misfit(config.backend, self._machine) if self._gpus else None
        if misfit is None:
            return found
        if registry.ENVIRONMENT_PARAMETER in config.parameters:  # which may have another build
            return found._replace(preferred=config.backend in gpu_builds.ON_GPUS_ALONE)
        return found._replace(preferred=misfit.required, misfit=misfit.text, remedy=misfit.remedy)

    def check_room(self, config: ModelConfig) -> None:
        """Raise ``Unavailable`` if a GPU of the model exceeds its memory limit."""
        for number in sorted(_wanted(config) & self._limits.keys() & self._gpus.keys()):
            memory = self._library.memory(self._gpus[number])
            if memory is not None and memory.used > memory.total * self._limits[number]:
                raise Unavailable(
                    f"can not create model '{config.name}': memory limit set for GPU {number} has exceeded, model "
                    f"loading is rejected. {memory.used:,} of its {memory.total:,} bytes are used, and "
                    f"--model-load-gpu-limit allows {self._limits[number]:.0%}: unload a model, or raise the limit"
                )


def _wanted(config: ModelConfig) -> set[int]:
    groups: Iterable[Iterable[int]] = (group.gpus for group in config.instance_group if group.kind == "KIND_GPU")
    return {number for group in groups for number in group}


# Repository agents, which check a model before it is loaded. ``checksum`` is the only one supported:
#
#     model_repository_agents {
#       agents [ { name: "checksum", parameters { key: "MD5:1/model.onnx", value: "d726…" } } ]
#     }
#
# Triton's is a shared library with the same texts; other agent libraries cannot be loaded here.

CHECKSUM = "checksum"


def consult_agents(polled: PolledModel) -> PolledModel:
    """Return the model with the mistakes that its agents found added. Blocks while files are read."""
    mistakes = agent_mistakes(polled)
    return dataclasses.replace(polled, mistakes=(*polled.mistakes, *mistakes)) if mistakes else polled


def agent_mistakes(polled: PolledModel) -> list[Mistake]:
    """Return the mistakes that the agents of a model find. Blocks while files are read. Never raises."""
    chosen = polled.config.model_repository_agents
    found: list[Mistake] = []
    for index, agent in enumerate(chosen.agents if chosen is not None else ()):
        place: FieldPath = ("model_repository_agents", "agents", index)
        if agent.name == CHECKSUM:
            found += _check_sums(agent, polled.directory, place)
        else:
            found.append(_unknown(agent.name, place))
    return polled.text.source.place(found)


def _unknown(name: str, place: FieldPath) -> Mistake:
    message = f"unable to find 'libtritonrepoagent_{name}.so' for repo agent '{name}'"
    remedy = f"Remove it, or use the only supported agent, '{CHECKSUM}'. Agent libraries cannot be loaded."
    return Mistake(message=message, path=(*place, "name"), remedy=remedy, error=Internal)


def _check_sums(agent: ModelRepositoryAgents.Agent, directory: Path, place: FieldPath) -> Iterator[Mistake]:
    """Compare each file that the parameters name with its checksum."""
    for key, expected in agent.parameters.items():
        path: FieldPath = (*place, "parameters", key)
        algorithm, colon, name = key.partition(":")
        remedy = 'Write it as in: parameters { key: "MD5:1/model.onnx", value: "d726e132f91f16ebee703d96f6f73cb1" }'
        if not colon:
            yield Mistake(message=f"failed to parse key: {key}", path=path, remedy=remedy)
            continue
        if algorithm.lower() != "md5":
            message = f"Unsupported checksum algorithm: {algorithm}"
            yield Mistake(message=message, path=path, remedy=remedy, error=Unsupported)
            continue
        try:
            if (directory / name).is_fifo() or (directory / name).is_char_device():  # which have no end
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            with open(directory / name, "rb") as file:
                got = hashlib.file_digest(file, _md5).hexdigest()
        except OSError as error:
            message = f"failed to open text file for read {name}: {error.strerror}"
            yield Mistake(message=message, path=path, remedy="Name a file relative to the model's directory.")
            continue
        if got != expected.lower():
            message = f"Mismatched MD5 hash for file {name}, expect: {expected}, got: {got}"
            remedy = "Restore the original file, or set the checksum of the current one."
            yield Mistake(message=message, path=path, remedy=remedy)


def _md5() -> hashlib._Hash:
    # It detects accidents, not attacks, so it may also be used where policy forbids MD5 for security.
    return hashlib.md5(usedforsecurity=False)


_log = logging.getLogger("nerite.repository")
_LEVELS = {"note": _log.info, "warning": _log.warning, "error": _log.error}


class VersionMaker:
    """Creates running model versions, concurrency limited by slots. Its coroutines are for the loop."""

    def __init__(
        self,
        options: RepositoryOptions,
        settings_of: Callable[[str], Mapping[str, str]],
        launcher: Launcher,
        loader: Executor,
        slots: asyncio.Semaphore,
        placement: GpuPlacement,
    ) -> None:
        """``settings_of`` returns a backend's ``--backend-config`` values. A load holds one of the ``slots``."""
        self._options = options
        self._settings_of = settings_of
        self._launcher = launcher
        self._loader = loader
        self._slots = slots
        self._placement = placement
        self._growth = LoadGrowth()
        self.preparing = asyncio.Event()
        """Set when something is made for a model that may take minutes, such as an environment."""

    async def read(self, name: str, directory: Path, delivery: LoadOverrides | None, *, renamed: bool) -> PolledModel:
        """Read a model's configuration and directory; mistakes are part of the result.

        ``renamed``: a different name in its configuration is not a mistake.
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
            return consult_agents(polled)

        polled = await asyncio.get_running_loop().run_in_executor(self._loader, read)
        _log_remarks(polled.remarks)
        return polled

    def prepare(self, name: str, directory: Path) -> list[str]:
        """Do what a load needs before the weights; return the models that this one needs. Blocks.

        Mistakes are left to the load. Raises ``NeriteError``.
        """
        polled = poll_model_directory(
            directory, name=name, config_name=self._options.config_name, auto_complete=self._options.auto_complete
        )
        if polled.mistakes:
            return []
        if polled.config.ensemble_scheduling is not None:
            return [step.model_name for step in polled.config.ensemble_scheduling.step]
        place = self._settings_of(polled.config.backend).get(SETTING, "")
        config = registry.filled_in(polled.config, place)
        self._launcher.prepare(self._context(polled, config, max(polled.versions, default=1), {}, lambda text: None))
        return []

    async def make(
        self, polled: PolledModel, version: int, report: Callable[[int, str], None] = lambda version, text: None
    ) -> RunningVersion:
        """Complete the configuration of a version and launch it. Raises ``NeriteError`` when no retry is left.

        ``report`` is told on the loop what is being made for it, and how far that is.
        """
        loop = asyncio.get_running_loop()

        def heard(text: str) -> None:
            self.preparing.set()
            report(version, text)

        def progress(text: str) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(heard, text)

        tries = self._options.load_retries + 1
        async with AsyncExitStack() as slot:
            with stage("waiting"):
                await slot.enter_async_context(self._slots)
            while True:
                tries -= 1
                try:
                    return await self._make(polled, version, progress)
                except NeriteError as error:
                    if not tries:
                        # The frames refer to what was loaded so far, weights and files: drop them to free that memory.
                        error.__context__ = None
                        raise error.with_traceback(None) from None
                    _log.warning("failed to load '%s' version %d, retrying: %s", polled.name, version, error.message)

    async def assembly(self, polled: PolledModel) -> EnsembleDefinition:
        """Return the definition of an ensemble. Raises ``NeriteError`` for the first mistake in it."""

        def complete() -> EnsembleDefinition:
            finished = finish_config(polled, None)
            if finished.mistakes:
                raise finished.mistakes[0].as_error()
            signature = signature_of(finished.config, polled.directory)
            return EnsembleDefinition(finished.config, signature, polled.versions, polled.text.source)

        return await asyncio.get_running_loop().run_in_executor(self._loader, complete)

    def assemble(
        self, name: str, version: int, config: ModelConfig, signature: Signature, parts: Sequence[StepModel]
    ) -> RunningVersion:
        """Create a running version of an ensemble whose models already run."""
        _log.info("loading: %s:%d", name, version)
        return self._launcher.assemble(name, version, config, signature, parts)

    async def resize(self, polled: PolledModel, running: RunningVersion) -> None:
        """Adjust the instances of a running version to its new configuration. Raises ``NeriteError``."""
        finished = finish_config(polled, None, gpus=self._placement.gpus(polled.config))
        if finished.mistakes:
            raise finished.mistakes[0].as_error()
        groups = finished.config.instance_group
        if groups != running.config.instance_group:
            await self._launcher.resize(running, replace(running.config, instance_group=groups))
            _log.info("'%s' version %d now has %d instances", running.name, running.version, len(running.instances))

    async def _make(self, polled: PolledModel, version: int, progress: Callable[[str], None]) -> RunningVersion:
        """Launch a version, and measure by how much this process grows if it runs here."""
        with stage("configuration"):
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._loader, self._own_files, polled, version, progress)
        if found is None:
            return await self._launched(polled, version, progress)
        load = object()
        self._growth.begin(load, found, memory_of(os.getpid()))
        try:
            running = await self._launched(polled, version, progress)
        finally:
            growth = self._growth.end(load, memory_of(os.getpid()))
        running.own_memory = OwnMemory.of_load(growth, found)
        return running

    def _own_files(self, polled: PolledModel, version: int, progress: Callable[[str], None]) -> int | None:
        """Return the size of the files of a version that runs in this process, and None for another.

        Its framework is imported, which is not of the memory of the model. Blocks; mistakes are left to the load.
        """
        place = self._settings_of(polled.config.backend).get(SETTING, "")
        config = registry.filled_in(polled.config, place)
        gpus = self._placement.gpus(config)
        if check_instances(normalise_instances(config, gpus), polled.text, gpus):
            return None
        try:
            if not self._launcher.import_here(self._context(polled, config, version, {}, progress)):
                return None
        except NeriteError:
            return None
        return files_size(polled.directory / str(version))

    async def _launched(self, polled: PolledModel, version: int, progress: Callable[[str], None]) -> RunningVersion:
        memo: dict[str, Any] = {}
        with stage("configuration"):
            loop = asyncio.get_running_loop()
            finished = await loop.run_in_executor(self._loader, self._finish, polled, version, memo, progress)
        _log_remarks(finished.remarks)
        if finished.mistakes:
            for line in mistake_text(finished.mistakes):
                _log.error("%s", line)
            raise finished.mistakes[0].as_error()
        context = self._context(polled, finished.config, version, memo, progress)
        signature = signature_of(finished.config, polled.directory)
        try:
            return await self._launcher.launch(finished.config, context, signature)
        except NeriteError as error:
            folder, filename = context.version_directory, finished.config.default_model_filename
            raise await loop.run_in_executor(self._loader, with_damage_noted, error, folder, filename) from None

    def _finish(
        self, polled: PolledModel, version: int, memo: dict[str, Any], progress: Callable[[str], None]
    ) -> FinishedConfig:
        def complete(config: ModelConfig, version: int) -> Mapping[str, Any]:
            with damage_explained(polled.directory / str(version), config.default_model_filename):
                context = self._context(polled, config, version, memo, progress)
                return self._launcher.complete(config.backend, context)

        place = self._settings_of(polled.config.backend).get(SETTING, "")
        polled = replace(polled, config=registry.filled_in(polled.config, place))
        finished = finish_config(
            polled,
            version,
            complete=complete if self._options.auto_complete else None,
            gpus=self._placement.gpus(polled.config),
        )
        if not finished.mistakes:
            refuse_unusable_files(polled.directory / str(version), finished.config.default_model_filename)
            self._placement.check_room(finished.config)
        return finished

    def _context(
        self,
        polled: PolledModel,
        config: ModelConfig,
        version: int,
        memo: dict[str, Any],
        progress: Callable[[str], None],
    ) -> ModelContext:
        settings = self._settings_of(config.backend)
        return ModelContext(polled.name, version, polled.directory, to_json(config), settings, memo, progress)


def _log_remarks(remarks: Iterable[Remark]) -> None:
    for remark in remarks:
        _LEVELS[remark.level](remark.text)


_BLOCK: Final = 1 << 20
_MAX_KNOWN: Final = 10_000
"""Maximum number of file hashes kept; the bound matters because files in load requests always have new paths."""


class ContentHashes:
    """Content hashes of serving versions, equal wherever and whenever the same files and configuration are loaded.

    A file is read once until its size or time changes. Blocks: call it on the loader's threads.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], bytes] = {}
        """Hashes of files by path, size and modification time."""
        self._stopped = False

    def stop(self) -> None:
        """Stop reading files because the server shuts down."""
        self._stopped = True

    def of_version(self, loaded: LoadedVersion, version: int) -> str:
        """Return the hash of everything a version was made from; empty if its files have changed since.

        The hash covers neither the number of instances, nor other versions, nor the formatting of the configuration.
        """
        polled, seen = loaded.polled, loaded.seen
        config = dataclasses.replace(polled.config, version_policy=None, instance_group=())
        digest = hashlib.sha256(to_text(config).encode("utf-8", "surrogateescape"))
        try:
            self._add(digest, polled.directory, seen.shared)
            self._add(digest, polled.directory / str(version), seen.versions.get(version, ()))
            if self._stopped or catalogue.model_fingerprint(polled.directory) != seen:
                return ""
        except OSError:
            return ""
        return f"sha256:{digest.hexdigest()}"

    def _add(self, digest: hashlib._Hash, folder: Path, entries: Iterable[FileEntry]) -> None:
        digest.update(b"\0folder\0")
        for name, size, time_ns in entries:
            key = (str(folder / name), size, time_ns)
            if key not in self._known:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[key] = self._of_file(folder / name)
            digest.update(os.fsencode(name) + b"\0" + self._known[key])

    def _of_file(self, path: Path) -> bytes:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while not self._stopped and (block := file.read(_BLOCK)):
                digest.update(block)
        return digest.digest()
