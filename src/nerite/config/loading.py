"""Loads the configuration of a model from its directory, in the two steps of Triton.

``poll_model_directory`` reads config.pbtxt and the names of versions and files, fills in what follows from them, and
validates the result. ``finish_config`` then does, for one version, what needs the machine and the artifact. Mistakes
are collected, not raised: a load is refused with the first one, ``nerite check`` prints all.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from nerite.config.defaults import (
    ENSEMBLE,
    NO_GPUS,
    Gpus,
    choose_backend,
    fitting,
    misses_gpus,
    normalise,
    normalise_instances,
    without_gpus,
)
from nerite.config.json_form import from_json, parse_json
from nerite.config.mistake import ConfigSource, FieldPath, Mistake
from nerite.config.model_config import ModelConfig, ModelTransactionPolicy, ModelVersionPolicy
from nerite.config.signature import FOLDER, read_initial_state, read_labels
from nerite.config.text import Parsed, parse_text
from nerite.config.validate import (
    check_config,
    check_instances,
    check_override,
    check_sequences,
    check_tensors,
    metric_warnings,
    without_effect,
)
from nerite.config.validate_tensors import repeated_names
from nerite.core.bounded_files import read_bounded
from nerite.core.errors import Internal, NeriteError, NotFound

_OTHER_DIRECTORIES: Final = frozenset({"warmup", "initial_state", "configs"})
"""Directories of a model that have another meaning and are not versions."""
_LARGEST: Final = 2**63 - 1


class Remark(NamedTuple):
    """A log line about something that does not keep a model from being served."""

    level: Literal["note", "warning", "error"]
    text: str


class Versions(NamedTuple):
    """Versions in ascending order, with Triton's log lines about what is ignored or missing."""

    numbers: tuple[int, ...]
    remarks: tuple[Remark, ...] = ()


def find_versions(subdirectories: Iterable[str]) -> Versions:
    """Return the versions among the names of a model's subdirectories."""
    numbers, remarks = [], []
    for name in sorted(subdirectories):
        if name in _OTHER_DIRECTORIES:
            continue
        if len(name) > 1 and name.startswith("0"):
            reason = "which contains leading zeros in its directory name"
        elif name.isascii() and name.isdigit() and int(name[:20]) <= _LARGEST:
            numbers.append(int(name))
            continue
        else:
            reason = "which fails to convert to integral number"
        remarks.append(Remark("warning", f"ignore version directory '{name}' {reason}"))
    return Versions(tuple(sorted(numbers)), tuple(remarks))


def select_versions(policy: ModelVersionPolicy, existing: Iterable[int], model: str) -> Versions:
    """Return the versions to serve. If some are missing, the others are served."""
    numbers = sorted(existing)
    if policy.specific is not None:
        wanted = dict.fromkeys(policy.specific.versions)
        missing = [
            f"version {version} is specified for model '{model}', but the version directory is not present"
            for version in wanted
            if version not in numbers
        ]
        numbers = [version for version in numbers if version in wanted]
        return Versions(tuple(numbers), tuple(Remark("error", line) for line in missing))
    if policy.latest is not None:
        count = policy.latest.num_versions
        return Versions(tuple(numbers[len(numbers) - min(count, len(numbers)) :]))
    return Versions(tuple(numbers))


Complete: TypeAlias = Callable[[ModelConfig, int], Mapping[str, Any] | None]
"""Completes a configuration from the artifact of a version. Returns the whole configuration in JSON form, or ``None``
if the backend completes nothing. Raises ``NeriteError`` if configuration and artifact contradict each other, and
``CompletionUnavailable`` if the artifact cannot be read here."""

_SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


class CompletionUnavailable(Exception):
    """The artifact cannot be read here, and the configuration may be correct. ``str()`` is the reason."""


def apply_completion(config: ModelConfig, completed: Mapping[str, Any]) -> ModelConfig:
    """Return ``config`` with batch size, tensors, scheduling and decoupling of ``completed``, normalised.

    No other field of ``completed`` counts. The scheduler is used only if ``config`` has none. Raises ``Internal`` if
    ``completed`` has another scheduler, ``InvalidArgument`` if it is not a configuration.
    """
    given = from_json(completed)
    before, after = _scheduler(config), _scheduler(given)
    if before and before != after:
        raise Internal(f"Cannot update scheduling choice from {before} to {after or 'none'} when auto-completing.")
    changes: dict[str, Any] = {
        "max_batch_size": given.max_batch_size,
        "input": given.input,
        "output": given.output,
    }
    if after and not before:
        changes[after] = getattr(given, after)
    if given.model_transaction_policy is not None:
        decoupled = given.model_transaction_policy.decoupled
        changes["model_transaction_policy"] = ModelTransactionPolicy(decoupled=decoupled)
    return normalise(dataclasses.replace(config, **changes))


def _scheduler(config: ModelConfig) -> str:
    return next((name for name in _SCHEDULERS if getattr(config, name) is not None), "")


CONFIG_FILE: Final = "config.pbtxt"
_BACKEND_FIELDS: Final = ("backend", "platform", "default_model_filename")
OVERRIDE: Final = "config override"
"""Stands for the name of the file if the configuration comes from a load request."""


@dataclass(frozen=True, slots=True)
class PolledModel:
    """A model as its directory describes it, before anything is loaded."""

    name: str
    directory: Path
    config: ModelConfig
    """Filled in as far as text and file names allow."""
    text: Parsed
    provided: bool
    """A config.pbtxt or an override exists."""
    existing: tuple[int, ...] = ()
    """All existing versions, ascending."""
    versions: tuple[int, ...] = ()
    """The versions that the version policy selects, ascending."""
    mistakes: tuple[Mistake, ...] = ()
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedConfig:
    """The complete configuration of one version."""

    config: ModelConfig
    mistakes: tuple[Mistake, ...] = ()
    remarks: tuple[Remark, ...] = ()
    certain: bool = True
    """It was completed from the artifact, or nothing could complete it."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as its directory describes it, with the complete configuration of each version to serve."""

    polled: PolledModel
    configs: Mapping[int, ModelConfig]
    """By version, because the artifacts of versions may complete different configurations."""
    mistakes: tuple[Mistake, ...] = ()
    """All mistakes in the order in which they were found."""
    remarks: tuple[Remark, ...] = ()
    certain: bool = True
    """All of them were completed, or nothing could complete them."""


def load_model_directory(
    directory: Path,
    *,
    name: str = "",
    config_name: str = "",
    override: str | None = None,
    auto_complete: bool = True,
    complete: Complete | None = None,
    gpus: Callable[[ModelConfig], Gpus] = lambda config: NO_GPUS,
) -> LoadedModel:
    """Read, complete and validate a model in all versions that it serves. Blocks as long as ``complete`` does.

    ``gpus`` returns the GPUs for a model. One that needs GPUs which are not there is completed without any.
    """
    polled = poll_model_directory(
        directory, name=name, config_name=config_name, override=override, auto_complete=auto_complete
    )
    mistakes, remarks = dict.fromkeys(polled.mistakes), dict.fromkeys(polled.remarks)
    configs = {}
    certain = True
    available = gpus(polled.config)
    for version in polled.versions or (None,):
        finished = finish_config(
            polled, version, complete=complete if auto_complete else None, gpus=available, elsewhere=True
        )
        mistakes |= dict.fromkeys(finished.mistakes)
        remarks |= dict.fromkeys(finished.remarks)
        certain = certain and finished.certain
        if version is not None:
            configs[version] = finished.config
    return LoadedModel(polled, configs, tuple(mistakes), tuple(remarks), certain)


def poll_model_directory(
    directory: Path,
    *,
    name: str = "",
    renamed: bool = False,
    config_name: str = "",
    override: str | None = None,
    auto_complete: bool = True,
) -> PolledModel:
    """Read and validate the files that describe a model. Never raises.

    ``name`` is the name of the model if it differs from that of the directory; with ``renamed`` it also replaces the
    name in the file. ``config_name`` selects ``configs/<config_name>.pbtxt`` if it exists. ``override`` is JSON that
    replaces config.pbtxt. Without ``auto_complete`` the file must exist and declare all tensors.
    """
    name = name or directory.name
    text, provided = _read(directory, config_name, override, required=not auto_complete)
    mistakes = list(text.mistakes)
    versions, files, entries = Versions(()), None, dict[str, bool]()
    try:
        entries = _entries(directory)
        versions = find_versions(name for name, is_directory in entries.items() if is_directory)
        if versions.numbers:
            files = _entries(directory / min(map(str, versions.numbers)))
    except OSError as error:
        message = f"failed to open directory {error.filename}"
        mistakes.append(Mistake(message=message, file=str(directory), error=Internal, remedy=f"{error.strerror}."))
    try:
        config = choose_backend(text.config, name, files)
    except NeriteError as error:
        config = dataclasses.replace(text.config, name=text.config.name or name)
        if text.trusts(_BACKEND_FIELDS):
            mistakes += text.source.place([_no_backend(error, config, files or {})])
            # One mistake about the backend is enough.
            text = dataclasses.replace(text, doubtful=(text.doubtful or frozenset()) | {"backend", "platform"})
    config = normalise(config)
    if renamed:
        config = dataclasses.replace(config, name=name)
    mistakes += text.source.place(check_config(config, text, files))
    if override is not None:
        mistakes += text.source.place(list(check_override(config)))
    if not auto_complete:
        mistakes += text.source.place(check_tensors(config, text))
    if config.name != name and text.trusts(("name",)):
        mistakes += text.source.place([_wrong_name(config.name, name)])
    assert config.version_policy is not None
    selection = select_versions(config.version_policy, versions.numbers, name)
    if not selection.numbers and text.trusts(("version_policy",)):
        mistakes += text.source.place([_no_version(directory, name, config, versions.numbers, entries)])
    unused = [Remark("note", f"'{name}': {line}") for line in without_effect(text.config, config.backend)]
    remarks = (*versions.remarks, *selection.remarks, *unused)
    return PolledModel(
        name, directory, config, text, provided, versions.numbers, selection.numbers, tuple(mistakes), remarks
    )


def finish_config(
    polled: PolledModel,
    version: int | None,
    *,
    complete: Complete | None = None,
    gpus: Gpus = NO_GPUS,
    elsewhere: bool = False,
) -> FinishedConfig:
    """Return the complete configuration of a version on a machine with ``gpus``. Blocks as ``complete`` does.

    ``complete`` is called only for an existing version without mistakes so far. ``elsewhere``: also for one that lacks
    nothing but GPUs here, without them. Raises only what ``complete`` raises, except ``NeriteError`` and
    ``CompletionUnavailable``.
    """
    text = polled.text
    config = normalise_instances(polled.config, gpus)
    mistakes = text.source.place(check_instances(config, text, gpus))
    remarks: list[Remark] = []
    if version == max(polled.versions, default=None) and misses_gpus(polled.config, gpus):  # once for a model
        remarks.append(_on_the_cpu(polled.name, gpus))
    certain = complete is None or version is None or not config.backend
    found = [each for each in (*mistakes, *polled.mistakes) if not (elsewhere and each.elsewhere)]
    if complete is not None and version is not None and config.backend and not found:
        try:
            completed = complete(without_gpus(config) if mistakes else config, version)
            certain = True
            if completed is not None:
                config = apply_completion(config, completed)
                mistakes += text.source.place(check_config(config, text))
            elif not polled.provided:
                mistakes.append(_no_configuration(polled))
        except CompletionUnavailable as reason:
            remarks.append(Remark("note", str(reason)))
        except NeriteError as error:
            mistakes += refused(error, polled, version)
    mistakes += text.source.place(check_tensors(config, text))
    mistakes += text.source.place(_check_labels(config, polled.directory))
    mistakes += text.source.place(check_sequences(config, text))
    if all(each.elsewhere for each in (*mistakes, *polled.mistakes)):
        mistakes += text.source.place(_check_initial_states(config, polled.directory))
    remarks += [Remark("warning", line) for line in (*metric_warnings(config), *repeated_names(config))]
    return FinishedConfig(config, tuple(mistakes), tuple(remarks), certain)


def _on_the_cpu(name: str, gpus: Gpus) -> Remark:
    head = f"model '{name}' is on the CPU although there is a GPU: {gpus.misfit}"
    return Remark("warning", f"{head}. Write kind: KIND_CPU if that is intended, or {gpus.remedy}")


def refused(error: NeriteError, polled: PolledModel, version: int) -> list[Mistake]:
    """Return the mistake that a backend reports for a version of a model, as a list of one."""
    file, line, column = error.place or ("", 0, 0)
    if file:
        remedy = f"Correct the code there. To find syntax errors without running it: python -m py_compile {file}"
    else:
        where = polled.directory / str(version)
        remedy = f"Correct the configuration, or put the model that it describes into {where}."
    path = _subject(error.message, polled)
    mistake = Mistake(
        message=error.message, path=path, remedy=remedy, file=file, line=line, column=column, error=type(error)
    )
    return polled.text.source.place([mistake])


def _subject(message: str, polled: PolledModel) -> FieldPath:
    """Return the part of the configuration that a backend's message names, otherwise the choice of the backend."""
    config, positions = polled.config, polled.text.source.positions
    named: dict[FieldPath, str] = {
        **{("parameters", key): key for key in config.parameters},
        **{("input", index): tensor.name for index, tensor in enumerate(config.input)},
        **{("output", index): tensor.name for index, tensor in enumerate(config.output)},
    }
    paths = [path for path, name in named.items() if f"'{name}'" in message]
    return next((path for path in (*paths, *((field,) for field in _BACKEND_FIELDS)) if path in positions), ())


_MAX_CONFIG: Final = 1 << 20
"""Bytes of a ``config.pbtxt``: ten thousand lines. It is parsed for some microseconds per byte."""


def _read(directory: Path, config_name: str, override: str | None, *, required: bool) -> tuple[Parsed, bool]:
    """Return the parsed configuration, and whether one exists."""
    if override is not None:
        parsed = parse_json(override, OVERRIDE)
        mistakes = tuple(
            dataclasses.replace(mistake, message=f"Invalid config override: {mistake.message}")
            for mistake in parsed.mistakes
        )
        return dataclasses.replace(parsed, mistakes=mistakes), True
    path = directory / CONFIG_FILE
    if config_name and (custom := directory / "configs" / f"{config_name}.pbtxt").exists():
        path = custom
    try:
        data = read_bounded(path, _MAX_CONFIG)
    except FileNotFoundError as error:
        if not required:
            return Parsed(ModelConfig(), ConfigSource(str(directory))), False
        remedy = f"Write {path}, or allow it to be completed from the model."
        return _unreadable(path, error, remedy), False
    except OSError as error:
        return _unreadable(path, error, "Make it a file that the server may read."), False
    return parse_text(data.decode("utf-8", "surrogateescape"), str(path)), True


def _unreadable(path: Path, error: OSError, remedy: str) -> Parsed:
    message = f"failed to open text file for read {path}: {error.strerror}"
    mistake = Mistake(message=message, file=str(path), remedy=remedy, error=Internal)
    return Parsed(ModelConfig(), mistakes=(mistake,), doubtful=None)


def _entries(directory: Path) -> dict[str, bool]:
    """Return the names in ``directory``, and whether each is a directory."""
    return {entry.name: entry.is_dir() for entry in directory.iterdir()}


def _no_backend(error: NeriteError, config: ModelConfig, files: Mapping[str, bool]) -> Mistake:
    if config.ensemble_scheduling is not None:
        written = f'platform: "{ENSEMBLE}"'
    else:
        written = fitting(files) or 'backend: "python"'
    remedy = f"Say in {CONFIG_FILE} which backend it is, as in: {written}"
    return Mistake(message=error.message, remedy=remedy, error=type(error))


def _no_configuration(polled: PolledModel) -> Mistake:
    return Mistake(
        message=f"model configuration is not provided for model '{polled.name}'",
        file=str(polled.directory),
        remedy=f"Write {polled.directory / CONFIG_FILE}.",
        error=NotFound,
    )


def _wrong_name(written: str, name: str) -> Mistake:
    return Mistake(
        message=f"unexpected directory name '{name}' for model '{written}', directory name must equal model name",
        path=("name",),
        remedy=f'Write name: "{name}", or remove the line.',
    )


def _no_version(
    directory: Path, name: str, config: ModelConfig, existing: Collection[int], entries: Mapping[str, bool]
) -> Mistake:
    """``entries`` are the names in the model's directory, and whether each is a directory."""
    first = directory / "1"
    meant = {each: number for each, is_directory in entries.items() if is_directory and (number := _meant(each))}
    if existing:
        remedy = f"Let 'version_policy' serve a version that is there: {', '.join(map(str, existing))}."
    elif meant:
        moves = " && ".join(f"mv {directory / each} {directory / number}" for each, number in sorted(meant.items()))
        remedy = f"The name of a version's directory is a number and nothing else: {moves}"
    elif config.platform == ENSEMBLE:
        remedy = f"An ensemble needs the directory of a version, too, with nothing in it: mkdir -p {first}"
    else:
        remedy = f"Put the model's files into {first}: mkdir -p {first}"
    message = f"at least one version must be available under the version policy of model '{name}'"
    return Mistake(message=message, path=("version_policy",), remedy=remedy)


def _meant(name: str) -> str:
    """Return the version number that the name of a directory probably means; empty if it does not look like one."""
    found = re.fullmatch(r"(?:v|ver|version)?[-_.]?0*([1-9][0-9]{0,17})", name, re.IGNORECASE | re.ASCII)
    return found[1] if found is not None else ""


def _check_labels(config: ModelConfig, directory: Path) -> Iterator[Mistake]:
    for index, output in enumerate(config.output):
        try:
            read_labels(config.name, output, directory)
        except NeriteError as error:
            yield Mistake(
                message=error.message,
                path=("output", index, "label_filename"),
                remedy="Write the name of a file in the model's directory.",
                error=type(error),
            )


def _check_initial_states(config: ModelConfig, directory: Path) -> Iterator[Mistake]:
    """Find files that do not contain the initial value of a state. Requires that the states are valid."""
    states = config.sequence_batching.state if config.sequence_batching is not None else ()
    for index, state in enumerate(states):
        try:
            read_initial_state(state, directory)
        except NeriteError as error:
            yield Mistake(
                message=error.message,
                path=("sequence_batching", "state", index, "initial_state", 0, "data_file"),
                remedy=f"Write the name of a file in {directory / FOLDER} that holds the data of one row.",
                error=type(error),
            )
