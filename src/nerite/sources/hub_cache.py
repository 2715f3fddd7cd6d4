"""The cache of models from the Hugging Face hub, in the layout that its library documents, so that all tools share it.

models--ORG--NAME/blobs/<hash>               a complete file, by its content
models--ORG--NAME/blobs/<hash>.nerite.part   a download in progress, or one that broke off
models--ORG--NAME/snapshots/<commit>/<path>  links to the blobs of a revision
models--ORG--NAME/refs/<revision>            the commit that a branch or tag had when it was fetched
models--ORG--NAME/nerite/<commit>.json       what was chosen of it: whether a snapshot is complete can be told offline
.locks/models--ORG--NAME/nerite.<purpose>    held exclusively by a download or removal, shared by servers
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from nerite.core.errors import InvalidArgument, Unavailable
from nerite.sources.hub_files import HubChoice, HubFile
from nerite.sources.name import is_commit

_PREFIX: Final = "models--"
_PART: Final = ".nerite.part"
_UNFINISHED: Final = (_PART, ".incomplete")
_WAIT: Final = 0.2
"""Seconds between two attempts to take a lock."""


class CachedRevision(NamedTuple):
    """A revision of a model in the cache."""

    repository: str
    commit: str
    names: tuple[str, ...]
    """Branches and tags that stood for it when they were fetched."""
    size: int
    used: float
    """Time of the last fetch or use."""
    complete: bool


class NotedFiles(NamedTuple):
    """What was chosen of a revision."""

    model: Path
    """The file that is the model, or the directory of the revision."""
    missing: list[str]
    """Files that are not here."""


def cache_root(environment: Mapping[str, str]) -> Path:
    """Return the directory of the cache, as the hub's library finds it."""
    if place := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(place).expanduser().absolute()
    usual = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    home = environment.get("HF_HOME") or Path(usual) / "huggingface"
    return Path(home).expanduser().absolute() / "hub"


class HubCache:
    """The cache. Its methods block, and raise ``OSError``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, repository: str) -> Path:
        """Return the directory of a model."""
        return self.root / f"{_PREFIX}{repository.replace('/', '--')}"

    def snapshot(self, repository: str, commit: str) -> Path:
        """Return the directory of a revision."""
        return self.folder(repository) / "snapshots" / commit

    def blob(self, repository: str, file: HubFile) -> Path:
        """Return the path of a complete file."""
        return self.folder(repository) / "blobs" / file.identity

    def part(self, repository: str, file: HubFile) -> Path:
        """Return the path of an incomplete file."""
        return self.folder(repository) / "blobs" / f"{file.identity}{_PART}"

    def has(self, repository: str, file: HubFile) -> bool:
        """Return whether a complete file is there."""
        try:
            return self.blob(repository, file).stat().st_size == file.size
        except OSError:
            return False

    def commit_of(self, repository: str, revision: str) -> str:
        """Return the commit of a revision when it was last fetched; empty if it is not here."""
        commit = revision
        if not is_commit(revision):
            try:
                commit = (self.folder(repository) / "refs" / (revision or "main")).read_text().strip()
            except OSError:
                return ""
        return commit if is_commit(commit) and self.snapshot(repository, commit).is_dir() else ""

    def noted(self, repository: str, commit: str, wanted: str = "") -> NotedFiles | None:
        """Return what was chosen of a revision; None if that is not known."""
        return _noted(self._note(repository, commit, wanted), self.snapshot(repository, commit))

    def complete(self, repository: str, commit: str, revision: str, choice: HubChoice, wanted: str = "") -> Path:
        """Link the files of a revision, all of which are here; return its directory."""
        snapshot = self.snapshot(repository, commit)
        for file in choice.files:
            link = snapshot / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.unlink(missing_ok=True)
                up = "../" * (len(Path(file.path).parts) + 1)
                link.symlink_to(f"{up}blobs/{file.identity}")
        noted = {"files": [file.path for file in choice.files], "model": choice.model}
        _write(self._note(repository, commit, wanted), json.dumps(noted))
        if revision != commit:
            _write(self.folder(repository) / "refs" / (revision or "main"), commit)
        return snapshot

    def _note(self, repository: str, commit: str, wanted: str) -> Path:
        file = f"{wanted.replace('/', '--')}." if wanted else ""
        return self.folder(repository) / "nerite" / f"{commit}.{file}json"

    @contextmanager
    def downloading(self, repository: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Lock a model against other downloads and removals; ``waiting`` is called once if that takes time."""
        handle = self._open_lock(repository, "download")
        try:
            if not _locked(handle, fcntl.LOCK_EX):
                waiting()
                while not _locked(handle, fcntl.LOCK_EX):
                    time.sleep(_WAIT)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def using(self, repository: str) -> Iterator[None]:
        """Protect a model from removal. Raises nothing: a cache that is only read cannot be locked, and not removed."""
        handle = -1
        with contextlib.suppress(OSError):
            handle = self._open_lock(repository, "use")
            fcntl.flock(handle, fcntl.LOCK_SH)
            os.utime(handle)
        try:
            yield
        finally:
            if handle >= 0:
                os.close(handle)

    def _open_lock(self, repository: str, purpose: str) -> int:
        folder = self.root / ".locks" / self.folder(repository).name
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / f"nerite.{purpose}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    # Listing and removal.

    def revisions(self) -> list[CachedRevision]:
        """Return the revisions in the cache, whichever tool fetched them, by name."""
        found = []
        for folder in sorted(self.root.glob(f"{_PREFIX}*/snapshots")):
            repository = folder.parent.name.removeprefix(_PREFIX).replace("--", "/", 1)
            names = self._references(repository)
            for snapshot in sorted(each for each in folder.iterdir() if is_commit(each.name)):
                found.append(self._revision(repository, snapshot, names))
        return found

    def _revision(self, repository: str, snapshot: Path, names: Mapping[str, str]) -> CachedRevision:
        blobs = {path.resolve() for path in snapshot.rglob("*") if path.is_file()}
        notes = sorted((self.folder(repository) / "nerite").glob(f"{snapshot.name}.*json"))
        missing = [noted.missing for note in notes if (noted := _noted(note, snapshot)) is not None]
        broken = [path for path in snapshot.rglob("*") if not path.exists()]
        lock = self.root / ".locks" / self.folder(repository).name / "nerite.use"
        times = [path.stat().st_mtime for path in (snapshot, lock) if path.exists()]
        return CachedRevision(
            repository,
            snapshot.name,
            tuple(sorted(name for name, commit in names.items() if commit == snapshot.name)),
            sum(blob.stat().st_size for blob in blobs),
            max(times, default=0.0),
            not broken and not any(missing),
        )

    def _references(self, repository: str) -> dict[str, str]:
        refs = self.folder(repository) / "refs"
        return {str(path.relative_to(refs)): path.read_text().strip() for path in refs.rglob("*") if path.is_file()}

    def unfinished(self) -> dict[str, int]:
        """Return the bytes that broken downloads have left, by model."""
        found: dict[str, int] = {}
        for path in self._parts():
            repository = path.parents[1].name.removeprefix(_PREFIX).replace("--", "/", 1)
            with contextlib.suppress(OSError):
                found[repository] = found.get(repository, 0) + path.stat().st_size
        return found

    def _parts(self, folder: str = f"{_PREFIX}*") -> list[Path]:
        return [path for path in self.root.glob(f"{folder}/blobs/*") if path.name.endswith(_UNFINISHED)]

    def remove(self, repository: str, commits: Sequence[str] | None = None, *, parts: bool = True) -> int:
        """Remove revisions of a model, or all of it; return the bytes that became free.

        ``parts``: what broken downloads have left goes too. Raises ``Unavailable`` if a server uses the model or a
        download is under way, ``InvalidArgument`` if the directory is not one of the cache.
        """
        folder = self.folder(repository)
        if folder.parent != self.root or folder.is_symlink():
            raise InvalidArgument(f"{folder} is not a directory of the cache {self.root}")
        with self._unused(repository):
            before = _size(folder)
            snapshots = folder / "snapshots"
            kept = [] if commits is None else [each for each in snapshots.glob("*") if each.name not in commits]
            if commits is None or not kept:
                shutil.rmtree(folder)
                return before
            for commit in commits:
                shutil.rmtree(snapshots / commit, ignore_errors=True)
                for note in (folder / "nerite").glob(f"{commit}.*"):
                    note.unlink()
            for name, commit in self._references(repository).items():
                if commit in commits:
                    (folder / "refs" / name).unlink()
            used = {os.readlink(path).rpartition("/")[2] for path in snapshots.rglob("*") if path.is_symlink()}
            for blob in (folder / "blobs").glob("*"):
                unfinished = blob.name.endswith(_UNFINISHED)
                if (parts if unfinished else blob.name not in used) and not blob.is_dir():
                    blob.unlink()
            return before - _size(folder)

    def remove_parts(self, repository: str) -> int:
        """Remove what broken downloads of a model have left; return the bytes. Raises ``Unavailable``."""
        with self._unused(repository, "download"):
            removed = 0
            for path in self._parts(self.folder(repository).name):
                removed += path.stat().st_size
                path.unlink()
            return removed

    @contextmanager
    def _unused(self, repository: str, *purposes: str) -> Iterator[None]:
        why = {"download": "it is being downloaded", "use": "a server uses it"}
        with contextlib.ExitStack() as stack:
            for purpose in purposes or tuple(why):
                handle = self._open_lock(repository, purpose)
                stack.callback(os.close, handle)
                if not _locked(handle, fcntl.LOCK_EX):
                    raise Unavailable(f"'{repository}' is not removed: {why[purpose]}")
            yield


def _noted(note: Path, snapshot: Path) -> NotedFiles | None:
    try:
        found = json.loads(note.read_bytes())
        paths, model = [str(path) for path in found["files"]], str(found.get("model", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return NotedFiles(snapshot / model, [path for path in paths if not (snapshot / path).exists()])


def _locked(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one; leave one that has the text."""
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.rename(path)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
