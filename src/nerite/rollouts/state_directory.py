"""Files that keep the state of rollouts while the server is down: one JSON document for each model.

They are in a directory of their own and not in the repository, which may be read-only, under version control, or shared
by many servers, each with its own evidence.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import orjson

from nerite.core.errors import Unavailable
from nerite.core.failures import report, system_error
from nerite.observability.log import log

VERSION: Final = 1
"""Version of the form of the documents. A file of a newer one is not read."""
_SUFFIX: Final = ".json"
_MAX_NAME: Final = 180
"""Bytes of a file's name, which file systems limit to 255."""


def state_directory(flag: str, repositories: Sequence[str], identity: str, environment: Mapping[str, str]) -> Path:
    """Return the flag's directory, or one in the user's state directory for a server of these repositories.

    ``identity`` distinguishes servers of the same repositories on one machine.
    """
    if flag:
        return Path(flag).absolute()
    usual = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME") or Path.home()) / ".local" / "state"
    places = [path if "://" in path else str(Path(path).absolute()) for path in repositories]
    digest = hashlib.sha256("\0".join((identity, *sorted(places))).encode()).hexdigest()
    return Path(usual).absolute() / "nerite" / "rollouts" / digest[:16]


class StoredState(NamedTuple):
    """A document that was read, or the reason why it cannot be used."""

    model: str
    document: dict[str, Any]
    problem: str = ""


class StateDirectory:
    """Reads and writes the documents. Its methods block."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Create the directory and write to it. Raises ``Unavailable`` with a remedy."""
        probe = self.path / f".probe-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise Unavailable(
                f"the state of rollouts cannot be saved: {system_error(error, self.path)}. "
                "Name a directory that the server may write to with --rollout-state"
            ) from None

    def read(self) -> Iterator[StoredState]:
        """Yield what each file contains; a file that cannot be read is left where it is."""
        try:
            files = sorted(path for path in self.path.iterdir() if path.suffix == _SUFFIX)
        except OSError:
            return
        for file in files:
            try:
                document = orjson.loads(file.read_bytes())
                if not isinstance(document, dict) or not isinstance(document.get("model"), str):
                    raise ValueError("it is not the state of a rollout")
                if document.get("version") != VERSION:
                    raise ValueError(f"its version is {document.get('version')}, and this server reads {VERSION}")
            except (OSError, ValueError) as error:
                yield StoredState("", {}, f"{file} cannot be read: {error}")
            else:
                yield StoredState(document["model"], document)

    def write(self, model: str, data: bytes) -> None:
        """Replace the document of a model, which a crash leaves either old or new. Raises ``OSError``."""
        file = self._file(model)
        new = file.with_suffix(".new")
        self.path.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        new.rename(file)

    def remove(self, model: str) -> None:
        """Remove the document of a model. Raises ``OSError``."""
        self._file(model).unlink(missing_ok=True)

    def recording(self, model: str, number: str) -> Path:
        """Return the file of a rollout's recording."""
        return self.path / f"{_file_name(model)}-{number}.jsonl"

    def _file(self, model: str) -> Path:
        return self.path / f"{_file_name(model)}{_SUFFIX}"


def _file_name(model: str) -> str:
    """Return the beginning of the names of a model's files."""
    name = quote(model, safe=" ").replace(".", "%2E")
    return name if len(name) <= _MAX_NAME else f"{name[:100]}-{hashlib.sha256(model.encode()).hexdigest()}"


class StateWriter:
    """Writes documents on a thread, one at a time; of several for one model the last. For the loop's thread."""

    def __init__(self, directory: StateDirectory, executor: Executor) -> None:
        self.directory = directory
        self.problem = ""
        """Why the last document could not be written; empty if it could."""
        self._executor = executor
        self._waiting: dict[str, bytes] = {}
        """Documents by model; an empty one is removed."""
        self._writing = Lock()

    def save(self, model: str, document: Mapping[str, Any] | None) -> None:
        """Write a document, or remove it if it is None."""
        whole = b"" if document is None else orjson.dumps({"version": VERSION, "model": model, **document}, list)
        self._waiting[model] = whole
        self.write_later()

    def write_later(self) -> None:
        """Write what is waiting, such as what could not be written before."""
        if self._waiting:
            with contextlib.suppress(RuntimeError):  # the executor is shut down: ``flush`` writes
                self._executor.submit(self.flush)

    def flush(self) -> None:
        """Write what is waiting, each document once. Blocks; for any thread. Never raises."""
        with self._writing:
            problem = ""
            for model in list(self._waiting):
                data = self._waiting.pop(model)
                try:
                    self._write(model, data)
                except Exception as error:
                    self._waiting.setdefault(model, data)  # unless a later one has come meanwhile
                    problem = self._problem_of(model, error)
            self.problem = problem

    def _write(self, model: str, data: bytes) -> None:
        if data:
            self.directory.write(model, data)
        else:
            self.directory.remove(model)

    def _problem_of(self, model: str, error: Exception) -> str:
        if isinstance(error, OSError):
            problem = system_error(error, self.directory.path)
        else:
            problem = report("loop", error, f"while the state of the rollout of '{model}' was saved").message
        if not self.problem:
            log.error(f"the state of the rollout of '{model}' was not saved: {problem}")
        return problem
