"""Every model that was ever loaded or tried, and which of them a name means. Pure."""

from __future__ import annotations

import asyncio
import enum
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import getsizeof
from typing import Final, NamedTuple, TypeAlias

from nerite.config.loading import PolledModel
from nerite.config.mistake import ConfigSource, Mistake, nearest
from nerite.config.model_config import EnsembleStep, ModelConfig, ModelTransactionPolicy
from nerite.config.validate_ensemble import EnsembleCandidate, find_step_models
from nerite.core.byte_budget import REFUSALS, Memo
from nerite.core.errors import InvalidArgument, NeriteError, NotFound, Unavailable
from nerite.core.signature import Signature
from nerite.models.running_version import RunningVersion

# Where the answers of a version come from: from itself, and an ensemble's from the models that it is made of.

Find = Callable[[str, str, str], RunningVersion]


def version_origin(running: RunningVersion, find: Find, *, lasting: bool) -> str:
    """Return a text that is another when a version may answer otherwise than before; empty if that is not known.

    ``find`` returns the running version that a model's name, version and namespace mean. ``lasting``: the text is the
    same wherever and whenever the same files are loaded; else it is one for each load.
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
        except NeriteError:  # it is gone, and comes back perhaps
            return ""
        if not part:
            return ""
        parts.append(f"({part})")
    return " ".join(parts)


# What a directory looks like, so that a change is noticed: names, sizes and times.

_UNKNOWN: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE})
"""What the system says where it cannot tell whether there is a file."""

FileEntry: TypeAlias = tuple[str, int, int]
"""Relative path, size, time of modification in nanoseconds."""


@dataclass(frozen=True)
class ModelFingerprint:
    """The files of one model: those all versions share, those of each version, and the configuration's own.

    The configuration stands apart because its content says better than its looks what has to be loaded anew.
    """

    shared: tuple[FileEntry, ...]
    versions: dict[int, tuple[FileEntry, ...]]
    config: FileEntry | None = None


def directory_fingerprint(directory: Path) -> tuple[FileEntry, ...]:
    """Return all files below ``directory``, but for those that vanish meanwhile, or may not be read.

    Raises ``OSError`` where the system cannot tell.
    """
    entries: list[FileEntry] = []
    for parent, folders, files in os.walk(directory, onerror=_leave_out):
        # Python writes its caches when it pleases; they are no change of the model.
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            path = os.path.join(parent, name)
            try:
                status = os.stat(path)
            except OSError as error:
                _leave_out(error)
                continue
            entries.append((os.path.relpath(path, directory), status.st_size, status.st_mtime_ns))
    return tuple(entries)


def model_fingerprint(directory: Path) -> ModelFingerprint:
    """Return the fingerprint of a model's directory. Raises ``OSError`` where the system cannot tell."""
    versions: dict[int, tuple[FileEntry, ...]] = {}
    shared: list[FileEntry] = []
    config: FileEntry | None = None
    try:
        children = sorted(os.scandir(directory), key=lambda child: child.name)
    except OSError as error:
        _leave_out(error)
        return ModelFingerprint((), {})
    for child in children:
        if child.is_dir() and child.name.isdecimal():
            versions[int(child.name)] = directory_fingerprint(Path(child.path))
        elif child.name == "__pycache__":
            continue
        elif child.is_dir():
            shared += (
                (f"{child.name}/{name}", size, time) for name, size, time in directory_fingerprint(Path(child.path))
            )
        else:
            try:
                status = child.stat()
            except OSError as error:
                _leave_out(error)
                continue
            entry = (child.name, status.st_size, status.st_mtime_ns)
            if child.name == "config.pbtxt":
                config = entry
            else:
                shared.append(entry)
    return ModelFingerprint(tuple(shared), versions, config)


def _leave_out(error: OSError) -> None:
    """Raise an error that does not mean that there is no such file to be read."""
    if error.errno in _UNKNOWN:
        raise error


# What the server knows of one model: each version's state, and the ones that run.


class ModelState(enum.Enum):
    """Where a version is in its life."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass
class VersionState:
    """ModelState, and what led to it where that needs saying."""

    state: ModelState
    reason: str = ""


@dataclass(frozen=True)
class LoadedVersion:
    """What running versions were made from."""

    polled: PolledModel
    """What the files said."""
    seen: ModelFingerprint
    """How they looked."""
    brought: bool = False
    """A load request brought the files: they are the repository's no more than those of another one."""


@dataclass(eq=False)
class ModelRecord:
    """One model. Changed by the ``ModelManager`` only."""

    name: str
    namespace: str = ""
    """The repository, where models of one name are told apart by it; else empty."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """Held by whoever loads or unloads."""
    states: dict[int, VersionState] = field(default_factory=dict)
    running: dict[int, RunningVersion] = field(default_factory=dict)
    """The versions that take requests."""
    latest: int = -1
    """The version a request without one goes to."""
    loaded: LoadedVersion | None = None
    """What ``running`` was made from."""
    seen: ModelFingerprint | None = None
    """How the files looked when they were last loaded, or failed to load."""
    going: bool = False
    """It is to be unloaded once the ensembles that need it have answered what they hold."""
    asked: bool = False
    """It was loaded for its own sake, not because an ensemble needs it."""
    assembly: EnsembleDefinition | None = None
    """What there is to an ensemble, whether it runs or waits for its models; None for any other model."""
    parts: tuple[object, ...] = ()
    """What the models of an ensemble were like when it was put together."""
    unreadable: str = ""
    """What is wrong with the files, where it is so wrong that no load was tried."""

    def find(self, version: str) -> RunningVersion:
        """Return the running version that ``version`` means; empty means the latest. Raises Triton's refusals."""
        if not version:
            if self.latest < 0:
                raise NotFound(f"Request for unknown model: '{self.name}' has no available versions")
            return self.running[self.latest]
        number = version_number(version)
        running = self.running.get(number)
        if running is not None:
            return running
        if number in self.states:
            raise Unavailable(f"Request for unknown model: '{self.name}' version {number} is not at ready state")
        ready = ", ".join(map(str, sorted(self.running))) or "none"
        raise NotFound(
            f"Request for unknown model: '{self.name}' version {number} is not found (versions that are ready: {ready})"
        )

    def unchanged(self, loading: LoadedVersion) -> dict[int, RunningVersion]:
        """Return the running versions that need no reload: same files, and the same configuration.

        Which versions there are, and how many instances, may be otherwise.
        """
        loaded = self.loaded
        if loaded is None or loaded.brought or loading.brought or loaded.seen.shared != loading.seen.shared:
            return {}
        if _essence(loaded.polled.config) != _essence(loading.polled.config):
            return {}
        return {
            version: running
            for version in loading.polled.versions
            if (running := self.running.get(version)) is not None
            and loaded.seen.versions.get(version) == loading.seen.versions.get(version)
        }

    @property
    def gone(self) -> bool:
        """The model was unloaded, or is about to be."""
        leaves = [each.state is ModelState.UNLOADING or each.reason == "unloaded" for each in self.states.values()]
        return self.going or (bool(leaves) and all(leaves))

    @property
    def known(self) -> bool:
        """The model was loaded, or tried, at some time."""
        return bool(self.states)


def _essence(config: ModelConfig) -> ModelConfig:
    return replace(config, version_policy=None, instance_group=())


def version_number(text: str) -> int:
    """Return the number that a version in a request is. Raises ``InvalidArgument``."""
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
    """Models by namespace and name. Without namespacing every namespace is empty, and a name means one model."""

    def __init__(self, *, namespacing: bool = False) -> None:
        self._namespacing = namespacing
        self._named: dict[str, dict[str, ModelRecord]] = {}
        self._near: Memo[str, str] = Memo()
        """What was meant by unknown names, empty for nothing: finding it takes a while, and clients ask again."""

    def __iter__(self) -> Iterator[ModelRecord]:
        """Give every model, by namespace and name."""
        records = [record for named in self._named.values() for record in named.values()]
        return iter(sorted(records, key=lambda record: (record.namespace, record.name)))

    def open(self, namespace: str, name: str) -> ModelRecord:
        """Return what is known of a model, from now on if it was not known."""
        named = self._named.setdefault(name, {})
        if namespace not in named:
            self._near.clear()
            named[namespace] = ModelRecord(name, namespace)
        return named[namespace]

    def record(self, namespace: str, name: str) -> ModelRecord | None:
        """Return what is known of a model."""
        return self._named.get(name, {}).get(namespace)

    def forget(self, record: ModelRecord) -> None:
        """Know nothing of a model any more."""
        self._near.clear()
        self._named[record.name].pop(record.namespace, None)

    def all_named(self, name: str) -> list[ModelRecord]:
        """Return every model of that name."""
        return list(self._named.get(name, {}).values())

    def meant(self, name: str) -> ModelRecord:
        """Return the model that a request means by ``name``. Raises Triton's refusals."""
        tried = [record for record in self._named.get(name, {}).values() if record.known]
        if not tried:
            raise self._unknown(name)
        if not self._namespacing:
            return tried[0]
        running = [record for record in tried if record.running]
        if not running:
            raise NotFound(f"Identifier of model '{name}' is not found in global map")
        if len(running) > 1:
            raise InvalidArgument(
                f"There are {len(running)} identifiers of model '{name}' in global map, "
                "model namespace must be provided to resolve ambiguity."
                "\n    A request cannot name a namespace: give the models different names."
            )
        return running[0]

    def part(self, own: str, namespace: str, name: str) -> ModelRecord | None:
        """Return the model that an ensemble of namespace ``own`` means; None if there is none, or more than one.

        That is the one in ``namespace`` if the ensemble names one; else its neighbour, unless that was unloaded or is
        about to be, else the only one that runs.
        """
        named = self._named.get(name, {})
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
        """Return where a request for ``name`` goes, which means one model if ``namespace`` says of which repository.

        Raises Triton's refusals.
        """
        if not namespace:
            return self.meant(name).find(version)
        record = self.record(namespace, name)
        if record is None:
            raise self._unknown(name)
        return record.find(version)

    def _unknown(self, name: str) -> NeriteError:
        near = self._near.get(name)
        if near is None:
            others = (other for other, named in self._named.items() if any(record.known for record in named.values()))
            near = nearest(name, (other for other in others if other != name))
            REFUSALS.put(self._near, name, near, getsizeof(name) + getsizeof(near))
        unknown = f"Request for unknown model: '{name}' is not found" + (f" (did you mean '{near}'?)" if near else "")
        return InvalidArgument(unknown) if self._namespacing else NotFound(unknown)


# The repository index: every model that the repositories have, with the state of its versions. Pure.

Entry: TypeAlias = dict[str, str]
IN_SEVERAL = "model appears in two or more repositories"


def index_entries(
    offered: Mapping[str, Iterable[str]], catalogue: Catalogue, *, ready_only: bool = False
) -> list[Entry]:
    """Return the index. ``offered`` has the names of the models in each namespace, one more time for each place.

    A model that still runs although its directory is gone is not among them, as with Triton.
    """
    listed: list[Entry] = []
    for namespace, names in sorted(offered.items()):
        names = sorted(names)
        for name in dict.fromkeys(names):
            listed += _of_model(name, catalogue.record(namespace, name), names.count(name), ready_only=ready_only)
    return listed


def _of_model(name: str, record: ModelRecord | None, places: int, *, ready_only: bool) -> Iterator[Entry]:
    if places > 1:  # even in an index of what is ready, as with Triton
        yield {"name": name, "state": ModelState.UNAVAILABLE.value, "reason": IN_SEVERAL}
    elif record is None or not record.states:
        if not ready_only:
            broken = record is not None and record.unreadable
            yield {"name": name} | ({"state": ModelState.UNAVAILABLE.value, "reason": broken} if broken else {})
    else:
        for version, state in sorted(record.states.items()):
            if ready_only and state.state is not ModelState.READY:
                continue
            entry = {"name": name}
            if version >= 0:
                entry["version"] = str(version)
            entry["state"] = state.state.value
            if state.reason:
                entry["reason"] = state.reason
            running = record.running.get(version)
            if state.state is ModelState.READY and running is not None and running.content:
                entry["content_hash"] = running.content
            yield entry


# An ensemble as its files say it, and whether the models are there that it is put together from.


class StepTarget(NamedTuple):
    """What a step goes to."""

    namespace: str
    running: RunningVersion


@dataclass(frozen=True)
class EnsembleDefinition:
    """What is known of an ensemble before its models are."""

    config: ModelConfig
    signature: Signature
    """With the labels that the ensemble has itself."""
    versions: tuple[int, ...]
    source: ConfigSource
    """Where it is written."""

    @property
    def models(self) -> Sequence[str]:
        """The names of the models to ask."""
        return tuple(dict.fromkeys(step.model_name for step in self.steps))

    @property
    def steps(self) -> Sequence[EnsembleStep]:
        """The models to ask, and how they are connected."""
        assert self.config.ensemble_scheduling is not None
        return self.config.ensemble_scheduling.step

    def finished(self, targets: Sequence[StepTarget]) -> tuple[ModelConfig, Signature]:
        """Return what follows from the models.

        That is where they are, whether there are several responses, and the names of classes.
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
    """Return the models of the steps as they run now, and what is wrong: with one of them, or between them."""
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
    """Return what a step may go to; None if there is nothing to tell of the model, never tried or about to go."""
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
    if all(state.reason in ("", "unloaded") for state in record.states.values()):
        return None
    reasons = "\n".join(_failures(record))
    return EnsembleCandidate(
        name, {}, failure=f"which has no loaded version. Model '{name}' loading failed with error: {reasons}"
    )


def _failures(record: ModelRecord) -> Iterator[str]:
    for version, state in sorted(record.states.items()):
        if state.state is ModelState.UNAVAILABLE:
            yield f"version {version} is at {state.state.value} state: {state.reason};"
