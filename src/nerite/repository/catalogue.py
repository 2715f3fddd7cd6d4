"""Records of every model that was ever loaded or tried, and the resolution of model names.

Also the repository index, the definitions of ensembles, and the origin of a version's responses. Pure, except that
fingerprints read the file system.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import getsizeof
from typing import Final, NamedTuple, TypeAlias

from nerite.config.loading import PolledModel
from nerite.config.mistake import ConfigSource, Mistake, nearest
from nerite.config.model_config import ModelConfig, ModelEnsembling, ModelTransactionPolicy
from nerite.config.validate_ensemble import EnsembleCandidate, find_step_models
from nerite.core.byte_budget import REFUSALS, Memo
from nerite.core.errors import InvalidArgument, NeriteError, NotFound, NotLoaded, Unavailable
from nerite.core.signature import Signature
from nerite.models.running_version import RunningVersion
from nerite.repository.version_state import ASLEEP, IN_SEVERAL, ON_DEMAND, UNLOADED, Entry, ModelState, VersionState
from nerite.routes import route_file
from nerite.routes.table import RouteTable

Find = Callable[[str, str, str], RunningVersion]


def version_origin(running: RunningVersion, find: Find, *, lasting: bool) -> str:
    """Return a text that changes whenever a version's responses may change; empty if that is unknown.

    An ensemble's origin includes its models. ``find`` resolves a model's name, version and namespace to the running
    version. ``lasting``: the text is the same wherever and whenever the same files are loaded; else it is unique for
    each load.
    """
    made_from = running.content if lasting else str(running.number)
    if not made_from:
        return ""
    parts = [f"{running.name}/{running.label}/{made_from}"]
    ensemble = running.config.ensemble_scheduling
    for step in ensemble.step if ensemble is not None else ():
        try:
            version = str(step.model_version) if step.model_version > 0 else ""
            part = version_origin(find(step.model_name, version, step.model_namespace), find, lasting=lasting)
        except NeriteError:  # unloaded, but it may be loaded again
            return ""
        if not part:
            return ""
        parts.append(f"({part})")
    return " ".join(parts)


# Fingerprints of directories, by which changes are detected: names, sizes and times.

_INCONCLUSIVE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE})
"""Errors of the operating system that leave open whether a file exists."""

FileEntry: TypeAlias = tuple[str, int, int]
"""Relative path, size, modification time in nanoseconds."""


@dataclass(frozen=True)
class ModelFingerprint:
    """The files of one model: those shared by all versions, those of each version, and the configuration.

    The configuration is separate because its content decides more precisely than its file entry what to reload.
    """

    shared: tuple[FileEntry, ...]
    versions: dict[int, tuple[FileEntry, ...]]
    config: FileEntry | None = None
    route: FileEntry | None = None
    """The file that divides requests among versions, which is no reason to load them again."""


def directory_fingerprint(directory: Path) -> tuple[FileEntry, ...]:
    """Return all regular files below ``directory``, except those that vanish meanwhile or may not be read.

    Raises ``OSError`` if an error leaves open whether a file exists.
    """
    entries: list[FileEntry] = []
    for parent, folders, files in os.walk(directory, onerror=_ignore_if_absent):
        # Python writes its bytecode caches at any time; they are not a change of the model.
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            path = os.path.join(parent, name)
            try:
                status = os.stat(path)
            except OSError as error:
                _ignore_if_absent(error)
                continue
            if stat.S_ISREG(status.st_mode):  # not a pipe, which nobody could read
                entries.append((os.path.relpath(path, directory), status.st_size, status.st_mtime_ns))
    return tuple(entries)


ROLLOUT_FILE: Final = "rollout.toml"
"""File beside a model that asks for a rollout. It is not part of the model: a change of it reloads nothing."""


def model_fingerprint(directory: Path) -> ModelFingerprint:
    """Return the fingerprint of a model's directory. Raises ``OSError`` as ``directory_fingerprint`` does."""
    versions: dict[int, tuple[FileEntry, ...]] = {}
    shared: list[FileEntry] = []
    config: FileEntry | None = None
    route: FileEntry | None = None
    try:
        children = sorted(os.scandir(directory), key=lambda child: child.name)
    except OSError as error:
        _ignore_if_absent(error)
        return ModelFingerprint((), {})
    for child in children:
        if child.is_dir() and child.name.isdecimal():
            versions[int(child.name)] = directory_fingerprint(Path(child.path))
        elif child.name in ("__pycache__", ROLLOUT_FILE):
            continue
        elif child.is_dir():
            shared += (
                (f"{child.name}/{name}", size, time) for name, size, time in directory_fingerprint(Path(child.path))
            )
        else:
            try:
                status = child.stat()
            except OSError as error:
                _ignore_if_absent(error)
                continue
            entry = (child.name, status.st_size, status.st_mtime_ns)
            if child.name == "config.pbtxt":
                config = entry
            elif child.name == route_file.FILE:
                route = entry
            elif stat.S_ISREG(status.st_mode):
                shared.append(entry)
    return ModelFingerprint(tuple(shared), versions, config, route)


def _ignore_if_absent(error: OSError) -> None:
    """Raise the error again unless it means that there is no such readable file."""
    if error.errno in _INCONCLUSIVE:
        raise error


@dataclass(frozen=True)
class LoadedVersion:
    """Configuration and files that running versions were made from."""

    polled: PolledModel
    """The model as it was read from its files."""
    seen: ModelFingerprint
    """The fingerprint of those files."""
    brought: bool = False
    """True if the files came with a load request, and therefore match neither the repository nor another request."""

    def with_versions(self, versions: Iterable[int], later: LoadedVersion) -> LoadedVersion:
        """Return this with versions that were added from files read ``later``.

        If the shared files or the configuration have changed since, the next load reloads all versions.
        """
        files = {version: later.seen.versions.get(version, ()) for version in versions}
        same = self.seen.shared == later.seen.shared and _reload_key(later.polled.config) == _reload_key(
            self.polled.config
        )
        return replace(self, seen=replace(self.seen, versions={**self.seen.versions, **files})) if same else self


@dataclass(eq=False)
class ModelRecord:
    """Everything the server knows of one model. Only the ``ModelManager`` and its parts change it."""

    name: str
    namespace: str = ""
    """The repository, if namespacing is on; else empty."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """Held while the model is loaded or unloaded."""
    states: dict[int, VersionState] = field(default_factory=dict)
    running: dict[int, RunningVersion] = field(default_factory=dict)
    """The versions that take requests."""
    asleep: dict[int, RunningVersion] = field(default_factory=dict)
    """The versions that have given the memory of their GPUs back, and take none."""
    latest: int = -1
    """The version that serves requests which name none; -1 if none runs."""
    loaded: LoadedVersion | None = None
    """The configuration and files that ``running`` was made from."""
    seen: ModelFingerprint | None = None
    """The fingerprint of the files at the last load, even a failed one."""
    going: bool = False
    """True while the unload waits for the ensembles that need the model to drain."""
    asked: bool = False
    """True if the model was loaded explicitly, not just because an ensemble needs it."""
    assembly: EnsembleDefinition | None = None
    """The definition of an ensemble, whether it runs or waits for its models; None for other models."""
    optional: frozenset[int] = frozenset()
    """Versions without which the model is ready, because they are only tried."""
    parts: tuple[object, ...] = ()
    """The properties of the ensemble's models on which it was built."""
    routed: bool = False
    """Its directory has a route to it, or is that of a route and nothing else."""
    unreadable: str = ""
    """The mistake in the files because of which no load was tried."""
    on_demand: bool = False
    """A request for it has it loaded."""
    retry_after: int = 0
    """Seconds that a load is likely to take; 0: not known."""
    text_task: str = ""
    """What a model of language is likely to do, as far as its files show, such as ``generate``; empty for others."""

    def unloaded(self) -> VersionState:
        """Return the state of a version that is not loaded."""
        if self.asleep:
            return VersionState(ModelState.UNAVAILABLE, ASLEEP)
        return VersionState(ModelState.UNAVAILABLE, ON_DEMAND if self.on_demand else UNLOADED)

    def find(self, version: str) -> RunningVersion:
        """Return the running version that ``version`` names; empty means the latest. Raises Triton's errors."""
        if not version:
            if self.latest < 0:
                if self.on_demand:
                    raise NotLoaded.of(self.name, self.retry_after)
                raise NotFound(f"Request for unknown model: '{self.name}' has no available versions")
            return self.running[self.latest]
        number = version_number(version)
        running = self.running.get(number)
        if running is not None:
            return running
        if self.on_demand and not self.running and number in self.states:
            raise NotLoaded.of(self.name, self.retry_after)
        if number in self.states:
            raise Unavailable(f"Request for unknown model: '{self.name}' version {number} is not at ready state")
        ready = ", ".join(map(str, sorted(self.running))) or "none"
        raise NotFound(
            f"Request for unknown model: '{self.name}' version {number} is not found (versions that are ready: {ready})"
        )

    def unchanged(self, loading: LoadedVersion) -> dict[int, RunningVersion]:
        """Return the running versions that need no reload because their files and configuration are the same.

        The set of versions and the number of instances may differ.
        """
        loaded = self.loaded
        if loaded is None or loaded.brought or loading.brought or loaded.seen.shared != loading.seen.shared:
            return {}
        if _reload_key(loaded.polled.config) != _reload_key(loading.polled.config):
            return {}
        return {
            version: running
            for version in loading.polled.versions
            if (running := self.running.get(version)) is not None
            and loaded.seen.versions.get(version) == loading.seen.versions.get(version)
        }

    def note_progress(self, version: int, text: str) -> None:
        """Have the index say what is being made for a version that is loaded."""
        state = self.states.get(version)
        if state is not None and state.state is ModelState.LOADING:
            state.reason = text

    @property
    def gone(self) -> bool:
        """True if the model was unloaded or is about to be."""
        leaves = [
            each.state is ModelState.UNLOADING or each.reason.startswith(UNLOADED) for each in self.states.values()
        ]
        return self.going or (bool(leaves) and all(leaves))

    @property
    def known(self) -> bool:
        """True if a load of the model was ever tried."""
        return bool(self.states)


def _reload_key(config: ModelConfig) -> ModelConfig:
    return replace(config, version_policy=None, instance_group=())


def version_number(text: str) -> int:
    """Parse the version in a request. Raises ``InvalidArgument``."""
    try:
        number = int(text)
        if number >= 1 << 63:
            raise ValueError
    except ValueError:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        ) from None
    if number < 0:
        raise InvalidArgument(f"invalid model version specified '{text}' , version should be an integral value > 0")
    return number


class Catalogue:
    """Models by namespace and name. Without namespacing all namespaces are empty and names are unique."""

    def __init__(self, routes: RouteTable | None = None, *, namespacing: bool = False) -> None:
        """A name that only a route has stands for its arm with the largest weight of those that run."""
        self._routes = RouteTable() if routes is None else routes
        self._namespacing = namespacing
        self._named: dict[str, dict[str, ModelRecord]] = {}
        self._near: Memo[str, str] = Memo()
        """Memoized suggestions for unknown names, empty for none: finding one is slow, and clients retry."""

    def __iter__(self) -> Iterator[ModelRecord]:
        """Iterate over all models, by namespace and name."""
        records = [record for named in self._named.values() for record in named.values()]
        return iter(sorted(records, key=lambda record: (record.namespace, record.name)))

    def open(self, namespace: str, name: str) -> ModelRecord:
        """Return the record of a model, creating it if necessary."""
        named = self._named.setdefault(name, {})
        if namespace not in named:
            self._near.clear()
            named[namespace] = ModelRecord(name, namespace)
        return named[namespace]

    def record(self, namespace: str, name: str) -> ModelRecord | None:
        """Return the record of a model, or None if it is unknown."""
        return self._named.get(name, {}).get(namespace)

    def forget(self, record: ModelRecord) -> None:
        """Remove the record of a model."""
        self._near.clear()
        self._named[record.name].pop(record.namespace, None)

    def all_named(self, name: str) -> list[ModelRecord]:
        """Return every model of that name."""
        return list(self._named.get(name, {}).values())

    def meant(self, name: str) -> ModelRecord:
        """Resolve a model's name as a request uses it. Raises Triton's errors."""
        tried = [record for record in self._named.get(name, {}).values() if record.known]
        if self._routes and not any(record.running for record in tried) and (route := self._routes.get(name)):
            if (found := self._arm(name)) is None:
                for arm in route.by_weight:
                    if (loadable := self._named.get(arm.model)) and any(each.on_demand for each in loadable.values()):
                        raise NotLoaded.of(arm.model)
                arms = ", ".join(arm.label for arm in route.by_weight)
                raise Unavailable(f"route '{name}' has no arm that is ready: load one of {arms}")
            return found[0]
        if not tried:
            raise self._unknown(name)
        if not self._namespacing:
            return tried[0]
        running = [record for record in tried if record.running]
        if not running:
            on_demand = [record for record in tried if record.on_demand]
            if len(on_demand) == 1:
                return on_demand[0]
            raise NotFound(f"Identifier of model '{name}' is not found in global map")
        if len(running) > 1:
            raise InvalidArgument(
                f"There are {len(running)} identifiers of model '{name}' in global map, "
                "model namespace must be provided to resolve ambiguity."
                "\n    A request cannot name a namespace: give the models different names."
            )
        return running[0]

    def part(self, own: str, namespace: str, name: str) -> ModelRecord | None:
        """Resolve a step's model for an ensemble in namespace ``own``; None if it is unknown or ambiguous.

        It is the model in ``namespace`` if the step names one. Otherwise it is the model in the ensemble's own
        namespace, or if that was unloaded or is about to be, the only running one of that name.
        """
        named = self._named.get(name, {})
        if self._routes and not any(each.running for each in named.values()) and (found := self._arm(name)) is not None:
            return found[0]
        if not self._namespacing:
            return named.get("")
        if namespace:
            return named.get(namespace)
        neighbour = named.get(own)
        if neighbour is not None and not neighbour.gone:
            return neighbour
        running = [record for record in named.values() if record.running and not record.going]
        return running[0] if len(running) == 1 else neighbour

    def find(self, name: str, version: str, namespace: str = "") -> RunningVersion:
        """Return the version that serves a request for ``name``; ``namespace``, if given, is the model's repository.

        Raises Triton's errors.
        """
        if self._routes and not version and (found := self._arm(name, namespace)) is not None:
            return found[1]
        if not namespace:
            record = self.meant(name)
            if version and record.name != name:
                raise NotFound(f"Request for unknown model: '{name}' is a route and has no versions of its own")
            return record.find(version)
        own = self.record(namespace, name)
        if own is None:
            raise self._unknown(name)
        return own.find(version)

    def _arm(self, name: str, namespace: str = "") -> tuple[ModelRecord, RunningVersion] | None:
        """Return the arm of a route with the largest weight among those that are ready; None if there is none."""
        route = self._routes.get(name)
        found: list[tuple[ModelRecord, RunningVersion]] = []
        for arm in () if route is None else route.by_weight:
            records = [each for each in self._named.get(arm.model, {}).values() if namespace in ("", each.namespace)]
            for record in records if len(records) == 1 else ():
                running = record.running.get(int(arm.version) if arm.version else record.latest)
                if running is not None and not record.going:
                    found.append((record, running))
        return next((each for each in found if each[1].usable), found[0] if found else None)

    def _unknown(self, name: str) -> NeriteError:
        near = self._near.get(name)
        if near is None:
            others = (other for other, named in self._named.items() if any(record.known for record in named.values()))
            near = nearest(name, (other for other in others if other != name))
            REFUSALS.put(self._near, name, near, getsizeof(name) + getsizeof(near))
        unknown = f"Request for unknown model: '{name}' is not found" + (f" (did you mean '{near}'?)" if near else "")
        return InvalidArgument(unknown) if self._namespacing else NotFound(unknown)


def loadable_text_models(records: Iterable[ModelRecord]) -> dict[str, str]:
    """Return the tasks of models of language that are not loaded and that a request would have loaded, by name."""
    waiting = (record for record in records if record.on_demand and not record.running)
    return {record.name: record.text_task for record in waiting if record.text_task}


# The repository index: every model in the repositories, with the state of its versions.


def index_entries(
    offered: Mapping[str, Iterable[str]], catalogue: Catalogue, *, ready_only: bool = False
) -> list[Entry]:
    """Return the index. ``offered`` has the models' names by namespace; a name in several repositories is repeated.

    A model that still runs although its directory is gone is not listed, as in Triton.
    """
    listed: list[Entry] = []
    for namespace, names in sorted(offered.items()):
        names = sorted(names)
        for name in dict.fromkeys(names):
            listed += _entries(name, catalogue.record(namespace, name), names.count(name), ready_only=ready_only)
    return listed


def _entries(name: str, record: ModelRecord | None, places: int, *, ready_only: bool) -> Iterator[Entry]:
    if places > 1:  # even in an index of ready models only, as in Triton
        yield VersionState(ModelState.UNAVAILABLE, IN_SEVERAL).entry(name, -1)
    elif record is None or not record.states:
        if not ready_only:
            broken = record is not None and record.unreadable
            yield VersionState(ModelState.UNAVAILABLE, broken).entry(name, -1) if broken else {"name": name}
    else:
        for version, state in sorted(record.states.items()):
            if ready_only and state.state is not ModelState.READY:
                continue
            entry = state.entry(name, version)
            running = record.running.get(version)
            if state.state is ModelState.READY and running is not None and running.content:
                entry["content_hash"] = running.content
            yield entry


class StepTarget(NamedTuple):
    """Running version that a step of an ensemble sends requests to, with its namespace."""

    namespace: str
    running: RunningVersion


@dataclass(frozen=True)
class EnsembleDefinition:
    """Definition of an ensemble from its own files, before its models are known."""

    config: ModelConfig
    signature: Signature
    """The signature with only the ensemble's own labels."""
    versions: tuple[int, ...]
    source: ConfigSource
    """Source text of the configuration, to locate mistakes."""

    @property
    def models(self) -> Sequence[str]:
        """The distinct names of the models in the steps."""
        return tuple(dict.fromkeys(step.model_name for step in self.steps))

    @property
    def steps(self) -> Sequence[ModelEnsembling.Step]:
        """The steps of the ensemble's graph."""
        assert self.config.ensemble_scheduling is not None
        return self.config.ensemble_scheduling.step

    def finished(self, targets: Sequence[StepTarget]) -> tuple[ModelConfig, Signature]:
        """Complete configuration and signature from the models of the steps.

        Adds the models' namespaces, whether the ensemble is decoupled, and the labels of classes.
        """
        labels = {
            tensor: target.running.signature.outputs[name].labels
            for step, target in zip(reversed(self.steps), reversed(targets), strict=True)
            for name, tensor in step.output_map.items()
        }
        own = self.signature
        outputs = [
            output._replace(labels=output.labels or labels.get(output.name, ())) for output in own.outputs.values()
        ]
        policy = ModelTransactionPolicy(decoupled=any(target.running.decoupled for target in targets))
        assert self.config.ensemble_scheduling is not None
        steps = tuple(
            replace(step, model_namespace=target.namespace) for step, target in zip(self.steps, targets, strict=True)
        )
        scheduling = replace(self.config.ensemble_scheduling, step=steps)
        config = replace(self.config, model_transaction_policy=policy, ensemble_scheduling=scheduling)
        return config, Signature(own.model_name, own.max_batch_size, list(own.inputs.values()), outputs)


def find_targets(
    assembly: EnsembleDefinition, namespace: str, catalogue: Catalogue
) -> tuple[list[StepTarget], list[Mistake]]:
    """Return the running versions that the steps go to, and the mistakes in or between the models."""
    targets, mistakes = _find(assembly, namespace, catalogue)
    return targets, assembly.source.place(mistakes)


def _find(assembly: EnsembleDefinition, namespace: str, catalogue: Catalogue) -> tuple[list[StepTarget], list[Mistake]]:
    records = [catalogue.part(namespace, step.model_namespace, step.model_name) for step in assembly.steps]
    candidates = [None if record is None else _candidate(record) for record in records]
    _, mistakes = find_step_models(assembly.config, candidates)
    targets: list[StepTarget] = []
    for step, record, candidate in zip(assembly.steps, records, candidates, strict=True):
        version = None if candidate is None else candidate.version(step)
        if record is not None and version is not None:
            targets.append(StepTarget(record.namespace, record.running[version]))
    return targets, mistakes


def _candidate(record: ModelRecord) -> EnsembleCandidate | None:
    """Return the model as a candidate for a step; None if it was never tried, was unloaded, or is about to be."""
    if record.going:
        return None
    name = record.name
    if record.running:
        return EnsembleCandidate(
            name, {version: each.config for version, each in record.running.items()}, record.latest
        )
    if record.assembly is not None:
        failure = f"which is not valid. Model '{name}' failed with error: {record.unreadable}"
        return EnsembleCandidate(name, {}, failure=failure)
    waits = ("", UNLOADED, ON_DEMAND)
    if all(state.state is ModelState.LOADING or state.reason in waits for state in record.states.values()):
        return None
    reasons = "\n".join(_failures(record))
    return EnsembleCandidate(
        name, {}, failure=f"which has no loaded version. Model '{name}' loading failed with error: {reasons}"
    )


def _failures(record: ModelRecord) -> Iterator[str]:
    for version, state in sorted(record.states.items()):
        if state.state is ModelState.UNAVAILABLE:
            yield f"version {version} is at {state.state.value} state: {state.reason};"
