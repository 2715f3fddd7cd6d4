"""Client of one repository's object store: listing, reading, writing, retries, resumable downloads.

Errors of the store become messages that say what was refused, with which credentials, and what to do. Whatever the
store sends, each answer has a time limit, a listing has a limit of objects, and all ends when the server stops.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final, TypeVar

import obstore
from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from nerite.core.client_text import is_file_path
from nerite.core.errors import Internal, Unavailable
from nerite.core.text import quoted_text
from nerite.repository.remote.credentials import OpenedStore
from nerite.scheduling.backoff import ExponentialBackoff

if TYPE_CHECKING:
    from obstore import ObjectMeta

_log = logging.getLogger("nerite.repository")
_T = TypeVar("_T")

TRIES = 6
"""Maximum number of attempts in a row without progress, about eight seconds in all."""
ANSWER_SECONDS: Final = 60.0
"""How long the store may take for an answer, for a page of a listing, or for ``_CHUNK`` bytes of a file."""
MOST_OBJECTS: Final = 100_000
"""Maximum number of objects of a model, and of models of a repository. A prefix with more holds data."""
_TICK: Final = 0.2
"""Seconds between two looks whether the server stops."""


class TransientFailure(Exception):
    """A transient failure: the operation may succeed when it is retried."""

    def __init__(self, reason: str, *, progressed: bool = False) -> None:
        """``progressed``: a part was completed and is kept."""
        super().__init__(reason)
        self.progressed = progressed


def retried(what: str, attempt: Callable[[], _T], stopped: Event) -> _T:
    """Call ``attempt`` until it succeeds, with exponential backoff, and return its result.

    ``what`` describes the operation in the log. Raises ``Internal`` after ``TRIES`` attempts without progress,
    ``Unavailable`` once ``stopped`` is set, and whatever else ``attempt`` raises.
    """
    backoff, failures = ExponentialBackoff(first=0.5, limit=15.0), 0
    while True:
        if stopped.is_set():
            raise Unavailable(f"{what} was cancelled: the server is stopping")
        try:
            return attempt()
        except TransientFailure as failure:
            if failure.progressed:
                backoff, failures = ExponentialBackoff(first=0.5, limit=15.0), 0
            failures += 1
            if failures >= TRIES:
                raise Internal(f"{what} failed {TRIES} times: {failure}") from None
            pause = backoff.failed(time.monotonic())
            _log.warning("%s failed, retrying%s: %s", what, f" in {pause:g} s" if pause else "", failure)
            stopped.wait(pause)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """File of a model in an object store."""

    path: str
    """Path relative to the model's directory."""
    key: str
    """The object's name in its bucket."""
    size: int
    etag: str
    """The store's entity tag of the object's content; empty if it has none."""
    modified: datetime

    @property
    def identity(self) -> str:
        """Identifier of the content, which changes when the object does."""
        content = self.etag or self.modified.isoformat()
        return hashlib.sha256(f"{self.key}\0{self.size}\0{content}".encode()).hexdigest()[:40]

    @property
    def modified_ns(self) -> int:
        """Modification time. Stores report whole seconds; the fraction, from the identity, makes contents differ."""
        return int(self.modified.timestamp()) * 10**9 + int(self.identity, 16) % 10**9


@dataclass(frozen=True, slots=True)
class Listing:
    """State of a model in the store when it was listed."""

    files: tuple[RemoteFile, ...]
    directories: tuple[str, ...]
    """Directories that may be empty, because a version without files counts as well."""

    @property
    def identity(self) -> str:
        """Identifier of the whole state."""
        lines = [f"{file.path}\0{file.identity}\n" for file in self.files] + [f"{path}/\n" for path in self.directories]
        return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:40]

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return sum(file.size for file in self.files)


def listing_of(found: Iterable[RemoteFile]) -> Listing:
    """Separate files from directories.

    Stores have no directories, but tools write empty objects as placeholders for them. Such an object has others below
    it, or is a version: its name is a number, directly below the model. Raises ``ValueError`` for an object name that
    is not a valid file name, or that occurs twice.
    """
    objects = sorted((file for file in found if file.path), key=lambda file: file.path)
    parents = {
        "/".join(parts[:depth])
        for parts in (file.path.split("/") for file in objects)
        for depth in range(1, len(parts))
    }
    files: list[RemoteFile] = []
    directories = []
    for file in objects:
        if not is_file_path(file.path):
            raise ValueError(f"the name of the object '{quoted_text(file.key)}' is not a valid file name. Rename it.")
        if file.size == 0 and (file.path in parents or file.path.isdecimal()):
            directories.append(file.path)
        elif file.path in parents:
            raise ValueError(f"the object '{file.key}' is a file, but other objects are below it")
        elif files and files[-1].path == file.path:
            raise ValueError(f"the store lists the object '{file.key}' twice")
        else:
            files.append(file)
    return Listing(tuple(files), tuple(directories))


async def _within(begin: Callable[[], Awaitable[_T]], seconds: float, stopped: Event) -> _T:
    """Return the result of an operation.

    Raises ``TransientFailure`` after ``seconds``, ``Unavailable`` once ``stopped`` is set; the operation is then ended.
    """
    answer = asyncio.ensure_future(begin())
    last = time.monotonic() + seconds
    while not answer.done():
        await asyncio.wait((answer,), timeout=_TICK)
        if not answer.done() and (stopped.is_set() or time.monotonic() >= last):
            answer.cancel()
            if stopped.is_set():
                raise Unavailable("the server is stopping")
            raise TransientFailure(f"the store has not answered, or has sent too little, for {seconds:g} s")
    return answer.result()


_CHUNK = 1 << 20
_BATCH: Final = 1000
"""Objects of a listing that are taken at a time."""
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_WRONG_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
_REFUSED = {"reading": "failed to read", "writing": "failed to write"}
_PASSING = (408, 425, 429)
"""HTTP statuses below 500 that are transient; all from 500 are."""


class ObjectChangedError(Exception):
    """The object has changed since it was listed."""


class Store:
    """The objects of one repository. Its methods block, and raise ``Internal`` when the store refuses."""

    def __init__(self, opened: OpenedStore, stopped: Event) -> None:
        """``stopped`` is set when the server shuts down; waits and retries then end."""
        self._opened = opened
        self._location = opened.location
        self._stopped = stopped

    def models(self) -> list[str]:
        """Return the names of the directories directly below the repository."""
        path = self._location.below()
        found = self._call(lambda: obstore.list_with_delimiter_async(self._opened.client, path or None))
        self._check_number(len(found["common_prefixes"]))
        names = [prefix.rpartition("/")[2] for prefix in found["common_prefixes"]]
        if path and not names and not found["objects"]:
            raise Internal(
                f"failed to stat file {self._location.text}: there is no object below '{path}' in "
                f"'{self._location.bucket}'. Use the path that contains the models' directories."
            )
        return sorted(name for name in names if not name.startswith("."))

    def listing(self, name: str) -> Listing:
        """Return the files of a model; none if it does not exist."""
        prefix = self._location.below(name)
        found = self._retried(lambda: self._objects(prefix))
        try:
            return listing_of(_file(prefix, meta) for meta in found)
        except ValueError as error:
            raise Internal(f"failed to read model repository '{self._location.text}': {error}") from None

    def object(self, name: str) -> RemoteFile | None:
        """Return the object directly below the repository with this name, as a file; None if it does not exist."""
        key = self._location.below(name)
        try:
            meta = self._call(lambda: obstore.head_async(self._opened.client, key))
        except ObjectChangedError:
            return None
        return RemoteFile(name, key, meta["size"], _etag(meta), meta["last_modified"])

    def read(self, file: RemoteFile, start: int) -> tuple[int, Generator[bytes]]:
        """Read a file from ``start``, or from an earlier offset; return the actual offset and the chunks.

        Whoever does not take all chunks closes the iterator. Both the call and the iterator raise
        ``ObjectChangedError`` and ``TransientFailure``.
        """
        options: obstore.GetOptions = {}
        if file.etag:
            options["if_match"] = f'"{file.etag}"'
        if start:
            options["range"] = {"offset": start}
        result = self._answer(lambda: obstore.get_async(self._opened.client, file.key, options=options))
        if _etag(result.meta) != file.etag or result.meta["size"] != file.size:
            raise ObjectChangedError(file.key)
        return result.range[0], self._pieces(result)

    def write(self, name: str, path: str, source: Path) -> None:
        """Upload a local file as ``path`` of a model, replacing any existing content."""
        key = self._location.below(f"{name}/{path}")
        # Nothing tells how far an upload is, so it has no time limit of its own.
        self._call(lambda: obstore.put_async(self._opened.client, key, source), "writing", limited=False)

    def remove(self, files: Sequence[RemoteFile]) -> None:
        """Remove files; ignore those that are already gone."""
        keys = [file.key for file in files]
        if keys:
            with suppress(ObjectChangedError):
                self._call(lambda: obstore.delete_async(self._opened.client, keys), "writing", limited=False)

    def _objects(self, prefix: str) -> list[ObjectMeta]:
        batches = obstore.list(self._opened.client, prefix, chunk_size=_BATCH)
        found: list[ObjectMeta] = []
        with asyncio.Runner() as runner:
            while batch := self._answer(lambda: anext(batches, None), runner=runner):
                found += batch
                self._check_number(len(found), f" below '{prefix}'")
        return found

    def _check_number(self, number: int, place: str = "") -> None:
        if number > MOST_OBJECTS:
            raise Internal(
                f"failed to read model repository '{self._location.text}': the store lists more than {MOST_OBJECTS} "
                f"objects{place}. Use the path that contains the models' directories, and keep data elsewhere."
            )

    def _pieces(self, result: obstore.GetResult) -> Generator[bytes]:
        pieces = result.stream(_CHUNK)
        with asyncio.Runner() as runner:
            while (piece := self._answer(lambda: anext(pieces, None), runner=runner)) is not None:
                yield piece

    def _call(self, begin: Callable[[], Awaitable[_T]], doing: str = "reading", *, limited: bool = True) -> _T:
        return self._retried(lambda: self._answer(begin, doing, limited=limited), doing)

    def _retried(self, attempt: Callable[[], _T], doing: str = "reading") -> _T:
        return retried(f"{doing} model repository '{self._location.text}'", attempt, self._stopped)

    def _answer(
        self,
        begin: Callable[[], Awaitable[_T]],
        doing: str = "reading",
        *,
        limited: bool = True,
        runner: asyncio.Runner | None = None,
    ) -> _T:
        """Return the result of an operation: of one of several in ``runner``, or of one that stands alone."""
        seconds = ANSWER_SECONDS if limited else math.inf
        with self._translated(doing), nullcontext(runner) if runner else asyncio.Runner() as running:
            return running.run(_within(begin, seconds, self._stopped))

    @contextmanager
    def _translated(self, doing: str = "reading") -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise self._translate(error, _REFUSED[doing]) from None

    def _translate(self, error: Exception, refused: str) -> Exception:
        """Convert an error of the library into an exception of this module or a ``NeriteError``."""
        text = str(error).partition("\n\nDebug source")[0]
        if isinstance(error, FileNotFoundError | PreconditionError) and "NoSuchBucket" not in text:
            return ObjectChangedError(text)
        status = int(found[1]) if (found := _STATUS.search(text)) else 0
        code = found[1] if (found := _CODE.search(text)) else ""
        message = found[1].strip() if (found := _MESSAGE.search(text)) else ""
        reason = ": ".join(filter(None, (code, message))) or text

        def refusal(details: str) -> Internal:
            return Internal(f"{refused} model repository '{self._location.text}': {details}")

        if code in _WRONG_REGION or "redirect without LOCATION" in text:
            return refusal(f"{reason}. Set AWS_DEFAULT_REGION to the region of the bucket.")
        if isinstance(error, InvalidPathError) or "invalid path" in text:
            return refusal(f"{quoted_text(text)}. Rename the object.")
        if status in (401, 403) or (not status and isinstance(error, PermissionDeniedError | UnauthenticatedError)):
            signed = f"with the credentials of {self._opened.signed}" if self._opened.signed else "without credentials"
            return refusal(f"access was denied {signed}: {reason}. {self._opened.remedy}.")
        if status == 404:
            what = "container" if self._location.kind == "as" else "bucket"
            return refusal(f"there is no {what} '{self._location.bucket}': {reason}. Check the name.")
        if 400 <= status < 500 and status not in _PASSING:
            return refusal(f"{reason} (HTTP status {status})")
        return TransientFailure(reason)


def _file(prefix: str, meta: ObjectMeta) -> RemoteFile:
    if meta["path"] != prefix and not meta["path"].startswith(f"{prefix}/"):
        raise ValueError(f"the store lists the object '{quoted_text(meta['path'])}', which is not below '{prefix}'")
    path = meta["path"][len(prefix) :].removeprefix("/")
    return RemoteFile(path, meta["path"], meta["size"], _etag(meta), meta["last_modified"])


def _etag(meta: ObjectMeta) -> str:
    """Return the entity tag without quotes, which stores use inconsistently."""
    return (meta["e_tag"] or "").removeprefix("W/").strip('"')


def download(store: Store, file: RemoteFile, place: Path, arrived: Callable[[int], None], stopped: Event) -> None:
    """Download a complete file to ``place``, resuming after failures and never mixing two contents.

    ``arrived`` is called with the size of each chunk and may raise. The file's time is that of its last change in the
    store. Raises ``ObjectChangedError`` if the object has changed, ``NeriteError`` if it cannot be read, ``OSError`` if
    it cannot be written.
    """
    part = place.with_name(f"{place.name}.part")
    retried(f"downloading '{file.key}'", partial(_continue, store, file, part, arrived), stopped)
    os.utime(part, ns=(file.modified_ns, file.modified_ns))
    part.rename(place)
    # Loads share the file; a model that wrote to it would change it for the others.
    place.chmod(0o444)


def _continue(store: Store, file: RemoteFile, part: Path, arrived: Callable[[int], None]) -> None:
    """Download the missing part of a file. Bytes received before a failure are kept."""
    with open(part, "ab") as sink:
        have = sink.tell()
        if have == file.size:
            return
        begin, pieces = store.read(file, have if have < file.size else 0)
        sink.truncate(begin)
        sink.seek(begin)
        try:
            with closing(pieces):
                for piece in pieces:
                    sink.write(piece)
                    arrived(len(piece))
        except TransientFailure as failure:
            raise TransientFailure(str(failure), progressed=sink.tell() > begin) from None
        sink.flush()
        os.fsync(sink.fileno())
        if sink.tell() != file.size:
            raise TransientFailure(f"received {sink.tell()} of {file.size} bytes", progressed=sink.tell() > begin)
