"""``nerite serve ORG/NAME``: fetches the models that its arguments name, and lays them out as a repository."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nerite.artifacts.artifact import Artifact, Candidate, Unusable
from nerite.cli.command import UsageError
from nerite.cli.command_line import NERITE, scan
from nerite.config.loading import CONFIG_FILE
from nerite.config.text import to_text
from nerite.core.errors import AlreadyExists, InvalidArgument
from nerite.sources.fetching import FetchedModel, ModelFetcher, TerminalWatcher
from nerite.sources.name import HubName, MlflowName, ModelName, parse_bare_name, parse_name

_OFFLINE: Final = "--offline"
_TRUST: Final = "--trust"
_FILES: Final = frozenset({".gguf", ".mar", ".onnx", ".tflite", ".pt", ".pt2", ".xml"})
"""Suffixes of model files that can be served as they are."""
_SAFE: Final = frozenset("-_.")
_LONGEST: Final = 128


@contextmanager
def named_models(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Fetch the models that arguments of ``nerite serve`` name; yield arguments with a repository of them instead.

    Without such an argument they are unchanged. The repository and its protection end with the ``with`` block. Raises
    ``NeriteError``.
    """
    rest = [each for each in arguments if each not in (_OFFLINE, _TRUST)]
    sources = {text: source for text in _repositories(rest) if (source := _source(text)) is not None}
    if not sources:
        yield list(arguments)
        return
    trusted = _TRUST in arguments
    folder = Path(tempfile.mkdtemp(prefix="nerite-models-"))
    try:
        repository, downloads = folder / "models", folder / "downloads"
        repository.mkdir()
        downloads.mkdir()
        watcher = TerminalWatcher()
        offline = _OFFLINE in arguments
        with ModelFetcher(environment, downloads, watcher, offline=offline, trusted=trusted) as fetcher:
            aliases = []
            for source in sources.values():
                found = _file(source) if isinstance(source, Path) else fetcher.fetch(source)
                name = lay_out(found, repository, trusted=trusted)
                aliases += [f"--model-alias={alias}={name}" for alias in found.aliases if alias != name]
                watcher.told(f"'{name}' is {found.origin}")
            yield [*aliases, *(each for each in rest if each not in sources), str(repository)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _repositories(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that are neither flags nor their values; none if the command line is invalid."""
    try:
        return [given.text for given in scan(arguments, NERITE) if given.label == given.text]
    except UsageError:  # it is reported when it is parsed
        return []


def _source(text: str) -> ModelName | Path | None:
    """Return what an argument names, if that is one model; None for repositories and functions."""
    name = parse_name(text)
    if isinstance(name, HubName | MlflowName):
        return name
    if name is not None or ":" in text:
        return None  # a repository in an object store, or a function
    path = Path(text)
    if path.is_file() and path.suffix.lower() in _FILES:
        return path
    return parse_bare_name(text)


def _file(path: Path) -> FetchedModel:
    return FetchedModel(path, "", str(path))


def lay_out(found: FetchedModel, repository: Path, *, trusted: bool) -> str:
    """Create the directory of a model in a repository, with links to its files; return its name.

    Raises ``NeriteError`` if it cannot be served.
    """
    # Imported lazily, because every server passes through this module, and few need it.
    from nerite.artifacts.recognition import recognise

    try:
        artifact = recognise(Candidate(found.path, trusted=trusted))
    except Unusable as error:
        raise InvalidArgument(f"{found.origin} cannot be served: {error.message}") from None
    name = served_name(found.name or artifact.name)
    model = repository / name
    if model.exists():
        raise AlreadyExists(f"two of the models that are to be served have the name '{name}': serve one of them.")
    if artifact.versions:
        model.symlink_to(found.path.absolute())
        return name
    version = model / "1"
    model.mkdir()
    common = _directory_of(artifact)
    if common is not None:
        version.symlink_to(common)
    else:
        version.mkdir()
        for file, source in artifact.files.items():
            target = version / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.suffix == ".py":  # it finds its files beside itself
                shutil.copyfile(source, target)
            else:
                target.symlink_to(source.resolve())
        if artifact.make is not None:
            artifact.make(version)
    for file, source in artifact.beside.items():
        (model / file).symlink_to(source.resolve())
    if not artifact.finished:
        (model / CONFIG_FILE).write_text(f"# {artifact.kind}, from {found.origin}\n{to_text(artifact.config)}")
    return name


def _directory_of(artifact: Artifact) -> Path | None:
    """Return the directory that has exactly the files of a version, under the same names, if there is one.

    What is kept for the files of a directory is found again at the next start.
    """
    if artifact.make is not None or not artifact.files:
        return None
    parents = {source.parent.absolute() for source in artifact.files.values()}
    named = all(source.name == file for file, source in artifact.files.items())
    return parents.pop() if named and len(parents) == 1 else None


def served_name(suggested: str) -> str:
    """Return a suggested name, changed so that directories, URLs and metrics can contain it."""
    name = "".join(each if each.isascii() and (each.isalnum() or each in _SAFE) else "_" for each in suggested)
    return name.strip("_-.")[:_LONGEST] or "model"
