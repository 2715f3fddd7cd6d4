"""Tries a configuration: stages it, loads it in a trial server, and measures it under load; checkpoints the results."""

from __future__ import annotations

import dataclasses
import importlib.metadata as metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import nerite
from nerite.backends import gpu_builds
from nerite.client import ClientError
from nerite.client.connection import Address
from nerite.config.json_form import from_json
from nerite.config.loading import CONFIG_FILE
from nerite.config.model_config import ModelConfig
from nerite.core.errors import Internal, InvalidArgument
from nerite.repository.catalogue import FileEntry, model_fingerprint
from nerite.tools.add.proposal import TrialServer
from nerite.tools.analyze.finding import Figure, Finding
from nerite.tools.analyze.search import Value
from nerite.tools.bench.measurement import BenchTarget, LoadLevel, Rule
from nerite.tools.bench.noise import half_width
from nerite.tools.bench.provenance import machine
from nerite.tools.bench.requests import TensorLoad, prepared_tensors, sized
from nerite.tools.bench.session import Fleet, LevelOutcome, ServerReading, Session, together


@contextmanager
def staged(repository: Path, texts: Mapping[str, str]) -> Iterator[Path]:
    """Yield a copy of a repository, made of symbolic links, in which models have other texts of config.pbtxt."""
    with tempfile.TemporaryDirectory(prefix="nerite-analyze-") as folder:
        for child in repository.resolve().iterdir():
            here = Path(folder, child.name)
            if child.name not in texts:
                here.symlink_to(child)
                continue
            here.mkdir()
            for part in child.iterdir():
                if part.name != CONFIG_FILE:
                    (here / part.name).symlink_to(part)
            if texts[child.name]:
                (here / CONFIG_FILE).write_text(texts[child.name], encoding="utf-8")
        yield Path(folder)


_SEQUENCE: Final = 20
"""Default number of requests in a sequence, as in perf_analyzer."""


@dataclass(frozen=True)
class Load:
    """Load that each configuration is measured with: the models that receive requests together, and its levels."""

    asked: tuple[TensorLoad, ...]
    """Models that receive requests."""
    concurrencies: tuple[int, ...]
    rule: Rule
    warm_up: float
    protocol: Literal["http", "grpc"] = "http"
    beside: tuple[str, ...] = ()
    """Models that receive no requests themselves, but are called by those that do."""

    @property
    def models(self) -> tuple[str, ...]:
        """Models to load."""
        return (*(wanted.model for wanted in self.asked), *self.beside)

    def fitted(self, configs: Mapping[str, ModelConfig]) -> Load:
        """Return the load adapted to the models' configurations: streaming, sequences, and the shapes of each model."""
        fitted = [_fitted(wanted, configs[wanted.model], several=len(self.asked) > 1) for wanted in self.asked]
        return dataclasses.replace(self, asked=tuple(fitted))

    def to_json(self) -> dict[str, Any]:
        """Return everything in the load that figures depend on as a JSON-serialisable document."""
        return {
            **{wanted.model: _load_json(wanted) for wanted in self.asked},
            "beside": list(self.beside),
            "protocol": self.protocol,
            "concurrencies": list(self.concurrencies),
            "warm-up": self.warm_up,
            "window": self.rule.seconds,
            "windows": self.rule.most,
            "stability": self.rule.percentage,
        }


def _fitted(wanted: TensorLoad, config: ModelConfig, *, several: bool) -> TensorLoad:
    policy = config.model_transaction_policy
    streaming = wanted.streaming or (policy is not None and policy.decoupled)
    length = wanted.sequence_length or (_SEQUENCE if config.sequence_batching is not None else 0)
    shapes = wanted.shapes
    if several:
        # Each model has its own inputs; if names clash, shapes are given as MODEL.INPUT.
        names = {name: each.name for each in config.input for name in (each.name, f"{config.name}.{each.name}")}
        shapes = {names[name]: sizes for name, sizes in shapes.items() if name in names}
    return dataclasses.replace(wanted, streaming=streaming, sequence_length=length, shapes=shapes)


def _load_json(wanted: TensorLoad) -> dict[str, Any]:
    return {
        "batch": wanted.batch,
        "shapes": {name: list(sizes) for name, sizes in wanted.shapes.items()},
        "data": str(wanted.data),
        "parameters": dict(wanted.parameters),
        "streaming": wanted.streaming,
        "sequence": wanted.sequence_length,
    }


def completed(repository: Path, load: Load) -> tuple[Load, dict[str, ModelConfig]]:
    """Return the load adapted to its models, and their current complete configurations.

    The configurations include those of the models that ensembles consist of. Raises ``NeriteError`` if a model cannot
    be loaded, or a shape does not fit.
    """
    found: dict[str, ModelConfig] = {}
    with _loaded(repository, load.models) as (trial, _):
        names = list(load.models)
        for name in names:
            found[name] = config = from_json(trial.client.config(name))
            steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
            names += [step.model_name for step in steps if step.model_name not in names]
        load = load.fitted(found)
        with suppress(ClientError):  # the measurement of the current configuration reports it
            # Once, so that all configurations are measured with the same sizes.
            load = dataclasses.replace(load, asked=tuple(sized(wanted, trial.client) for wanted in load.asked))
    return load, found


def measured(
    repository: Path,
    texts: Mapping[str, str],
    changes: Mapping[str, Value],
    load: Load,
    levels: Sequence[int],
    tell: Callable[[ServerReading], None],
) -> Finding:
    """Serve models with these texts of config.pbtxt, and return their figures at these levels of load."""
    try:
        with staged(repository, texts) as place:
            try:
                figures, memory = _figures(place, load, levels, tell)
            except (ClientError, InvalidArgument) as error:
                return Finding(changes, refused=str(error).replace(str(place), str(repository)))
    except OSError as error:
        return Finding(changes, refused=f"{error.filename}: {error.strerror}")
    return Finding(changes, figures, memory)


def _figures(
    repository: Path, load: Load, levels: Sequence[int], tell: Callable[[ServerReading], None]
) -> tuple[tuple[Figure, ...], int]:
    with _loaded(repository, load.models, grpc=load.protocol == "grpc") as (trial, before), ExitStack() as stack:
        target = BenchTarget(load.protocol, Address.parse(trial.grpc_url if load.protocol == "grpc" else trial.url))
        sessions = {}
        for wanted in load.asked:
            fleet = stack.enter_context(Fleet(prepared_tensors(wanted, target, trial.client)))
            sessions[wanted.model] = Session(fleet, load.rule, load.warm_up)
        figures = []
        for level in levels:
            outcomes = together(list(sessions.values()), LoadLevel(concurrency=level), tell)
            shown = map(_figure, outcomes)
            figures.append(Figure.of_several(dict(zip(sessions, shown, strict=True))))
        return tuple(figures), max(0, trial.memory() - before)


@contextmanager
def _loaded(repository: Path, models: Sequence[str], *, grpc: bool = False) -> Iterator[tuple[TrialServer, int]]:
    """Yield a trial server that has loaded the models, and the memory in bytes that it used before."""
    with TrialServer(repository, grpc=grpc) as trial, trial.client as client:
        before = trial.memory()
        for model in models:
            try:
                client.load(model)
            except ClientError as error:
                reason = f"the server exited while loading it:\n{trial.last_words}" if trial.ended else str(error)
                raise InvalidArgument(f"'{model}' cannot be loaded: {reason}") from None
        yield trial, before


def _figure(outcome: LevelOutcome) -> Figure:
    found = outcome.figures
    error = half_width([window.rate for window in outcome.windows[-outcome.counted :]])
    return Figure(
        outcome.level.concurrency, found.rate, found.latency.mean, found.latency["p99"], found.failed, error=error
    )


# Conditions of a measurement: everything besides the configuration that figures depend on.

Conditions: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON-serialisable values by category and name."""

_PACKAGES: Final = {
    "onnxruntime": gpu_builds.ONNXRUNTIME.distributions,
    "openvino": ("openvino",),
    "pytorch": gpu_builds.TORCH.distributions,
    "tensorflow": gpu_builds.TENSORFLOW.distributions,
    "litert": ("ai-edge-litert",),
    "fil": ("xgboost", "treelite", "lightgbm"),
}
"""Packages that run the models of each backend."""
_KINDS: Final = {"files": "the files of the models", "machine": "the machine", "software": "the software"}


def conditions(load: Mapping[str, Any], directories: Mapping[Path, ModelConfig], varied: Collection[str]) -> Conditions:
    """Return the current conditions for the models in these directories under this load.

    The configurations of ``varied`` models are not part of the conditions.
    """
    files = [_files(directory, config=config.name not in varied) for directory, config in directories.items()]
    backends = [config.backend for config in directories.values()]
    return {
        "load": dict(load),
        "files": {name: state for each in files for name, state in each},
        "machine": machine(),
        "software": dict(_software(backends)),
    }


def differences(then: Conditions, now: Conditions) -> list[str]:
    """Return the differences: a line for each category that differs, followed by a line for each value."""
    found = []
    for kind in now:
        old, new = then.get(kind, {}), now[kind]
        other = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
        if other:
            found.append(f"{_KINDS.get(kind, 'the ' + kind)}:")
            found += [f"    {name}: {_value(old, name)} then, {_value(new, name)} now" for name in other]
    return found


def _value(values: Mapping[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "nothing"


def _files(directory: Path, *, config: bool) -> Iterator[tuple[str, str]]:
    """Yield each file of a model with its size and time. ``config``: include config.pbtxt, because it is not varied."""
    seen = model_fingerprint(directory)
    if config and seen.config is not None:
        yield from _file_states(directory.name, [seen.config])
    for version, entries in seen.versions.items():
        yield from _file_states(f"{directory.name}/{version}", entries)
    yield from _file_states(directory.name, seen.shared)


def _file_states(folder: str, entries: Iterable[FileEntry]) -> Iterator[tuple[str, str]]:
    for path, size, time_ns in entries:
        when = datetime.fromtimestamp(time_ns / 1e9, UTC)
        yield f"{folder}/{path}", f"{size:,} bytes of {when:%Y-%m-%d %H:%M:%S.%f}"


def _software(backends: Iterable[str]) -> Iterator[tuple[str, str]]:
    yield "nerite", nerite.__version__
    yield "Python", platform.python_version()
    for package in dict.fromkeys(package for backend in backends for package in _PACKAGES.get(backend, ())):
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


_Key: TypeAlias = tuple[str, int, tuple[int, ...]]
"""Configuration, turn (number of earlier measurements), levels of load."""


class Checkpoint:
    """Findings by configuration and turn, written to a file immediately.

    The file has a line of JSON for the conditions, followed by one for each finding.
    """

    def __init__(self, path: Path, conditions: Conditions) -> None:
        """Read the file if it exists. Raises ``InvalidArgument`` if it is invalid or its conditions differ.

        ``conditions`` are everything besides the configuration that figures depend on.
        """
        self.path = path
        self._conditions = conditions
        self._known: dict[_Key, Finding] = {}
        self._length = 0
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InvalidArgument(f"cannot read {path}: {error.strerror}.") from None
        self._read(data)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, config: str, turn: int, levels: Sequence[int]) -> Finding | None:
        """Return the finding of a configuration at these levels in this turn, or None."""
        return self._known.get((config, turn, tuple(levels)))

    def add(self, config: str, turn: int, finding: Finding) -> None:
        """Store a finding. Raises ``Internal`` if it cannot be written."""
        self._keep(config, turn, finding)
        document = {"config": config, "turn": turn, **finding.to_json()}
        head = [] if self._length else [self._conditions]
        lines = "".join(json.dumps(line) + "\n" for line in (*head, document)).encode()
        try:
            with self.path.open("r+b" if self._length else "wb") as file:
                # Remove an incomplete line left by an interrupted run.
                file.truncate(self._length)
                file.seek(self._length)
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise Internal(
                f"cannot write {self.path}: {error.strerror}.\n    Specify another file with --checkpoint."
            ) from None
        self._length += len(lines)

    def _keep(self, config: str, turn: int, finding: Finding) -> None:
        levels = tuple(figure.concurrency for figure in finding.figures)
        self._known[config, turn, levels] = finding

    def _read(self, data: bytes) -> None:
        whole = data[: data.rfind(b"\n") + 1]
        if data and not whole.strip():
            raise InvalidArgument(f"{self.path} is not a checkpoint.\n    Specify another file with --checkpoint.")
        remedy = "Remove it to start over, or specify another file with --checkpoint."
        for number, line in enumerate(whole.splitlines()):
            try:
                document = json.loads(line)
                if number:
                    self._keep(document["config"], document["turn"], Finding.from_json(document))
                elif set(document) != set(self._conditions):
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                text = f"line {number + 1} of {self.path} is not a finding of an analysis.\n    {remedy}"
                raise InvalidArgument(text) from None
            if not number and (changed := differences(document, self._conditions)):
                lines = "\n    ".join(changed)
                raise InvalidArgument(f"{self.path} was measured under other conditions.\n    {lines}\n    {remedy}")
        self._length = len(whole)
