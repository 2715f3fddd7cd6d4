"""``rollout.toml`` beside a model: the version that the model should serve, and how a change of it is rolled out.

What the file asks for is acted on once. A command of an operator holds until the content of the file changes:

| the file | and the server |
|---|---|
| names the version that serves | nothing is rolled out; a rollout that is under way is ended |
| names another version | rolls it out from the version that serves, or from ``from`` |
| is the same as when it was last acted on | nothing: a rollback, an abort or another command holds |
| changes while a rollout is under way | the rollout ends, and the file is acted on |
| has a mistake, or is gone | nothing: the log tells the mistakes |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from nerite.config.rollout_spec import MAX_SPEC, RolloutSpec, spec_of_file
from nerite.config.watched_file import FileContent, WatchedFile, read_content
from nerite.core.errors import InvalidArgument
from nerite.core.work_loop import WorkLoop
from nerite.repository.catalogue import ROLLOUT_FILE
from nerite.repository.remote import is_remote

_ABSENT: Final = FileContent(b"", "is not there")


class DeclaredRollout(WatchedFile[FileContent]):
    """The file of one model, and the specification in it; keeps the last valid one."""

    def __init__(self, path: str) -> None:
        super().__init__(path, _ABSENT)
        self.spec: RolloutSpec | None = None
        """None until a valid file was read."""

    @property
    def found(self) -> bool:
        """Whether there is anything to tell about: a specification or a mistake."""
        return self.spec is not None or bool(self.problem)

    def _take(self, found: FileContent) -> None:
        if found == _ABSENT:
            self.problem = f"{self.path} is gone; its last content stays in force" if self.spec is not None else ""
            return
        try:
            self.spec = parse_file(self.path, found)
            self.problem = ""
        except InvalidArgument as error:
            self.problem = error.message

    def poll(self) -> FileContent:
        """Read the file. Blocks on I/O."""
        try:
            if not Path(self.path).exists():
                return _ABSENT
        except OSError as error:  # its directory may not be searched
            return FileContent(b"", f"cannot be read: {error.strerror}")
        return read_content(self.path, MAX_SPEC)

    def news(self) -> str:
        """Return the log message after a change."""
        if self.problem:
            return f"{self.problem}\nNothing is rolled out because of '{self.path}' until it is corrected"
        return f"the rollout file '{self.path}' was read and is in force"


def parse_file(path: str, found: FileContent) -> RolloutSpec:
    """Return the specification in a file. Raises ``InvalidArgument`` with all mistakes."""
    if found.problem:
        raise InvalidArgument(f"{path} {found.problem}")
    try:
        text = found.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not UTF-8: {error}") from None
    return spec_of_file(text, path)


def read_now(directory: Path) -> RolloutSpec | None:
    """Return the specification beside a model; None without a valid one. Blocks on I/O."""
    path = directory / ROLLOUT_FILE
    if not path.exists():
        return None
    try:
        return parse_file(str(path), read_content(str(path), MAX_SPEC))
    except InvalidArgument:
        return None  # it is watched, and its mistakes are logged, once the server has started


def baselines_in(repositories: Iterable[str]) -> dict[str, str]:
    """Return the baselines that files beside the models of local repositories name. Blocks on I/O."""
    found: dict[str, str] = {}
    for repository in repositories:
        for path in () if is_remote(repository) else sorted(Path(repository).glob(f"*/{ROLLOUT_FILE}")):
            spec = read_now(path.parent)
            if spec is not None and spec.baseline:
                found[path.parent.name] = spec.baseline
    return found


class Declarations:
    """The files of all models."""

    def __init__(self, changed: Callable[[str, DeclaredRollout], None], loop: WorkLoop) -> None:
        """``changed`` is called with the model after each change of its file that counts."""
        self._changed = changed
        self._loop = loop
        self._files: dict[str, DeclaredRollout] = {}

    def follow(self, directories: Mapping[str, Path]) -> None:
        """Watch the files of these models, and no others."""
        for model in self._files.keys() - directories.keys():
            self._loop.forget(self._files.pop(model).path)
        for model, directory in directories.items():
            path = str(directory / ROLLOUT_FILE)
            file = self._files.get(model)
            if file is None:
                self._files[model] = DeclaredRollout(path)
            elif file.path != path:  # an object store: each state of a model has its own directory
                file.path = path

    def path(self, model: str) -> str:
        """Return the file of a model; empty if it has none."""
        file = self._files.get(model)
        return file.path if file is not None and file.found else ""

    def read(self) -> list[tuple[str, DeclaredRollout, FileContent]]:
        """Read all files. Blocks on I/O; for another thread."""
        return [(model, file, file.poll()) for model, file in list(self._files.items())]

    def see(self, found: list[tuple[str, DeclaredRollout, FileContent]]) -> None:
        """Take what ``read`` has returned. A file that fails keeps no other from being taken."""
        for model, file, content in found:
            if self._loop.admits(file.path):
                with self._loop.step(file.path):
                    file.follow(content, partial(self._tell, model, file))

    def _tell(self, model: str, file: DeclaredRollout) -> None:
        if file.found:
            self._changed(model, file)
