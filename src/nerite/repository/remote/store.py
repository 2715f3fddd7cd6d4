"""What is asked of an object store, and its refusals in words: what was refused, to whom, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from nerite.core.errors import Internal
from nerite.repository.remote.credentials import Opened
from nerite.repository.remote.listing import Listing, RemoteFile, listing_of
from nerite.repository.remote.retries import PassingFailure, retried

if TYPE_CHECKING:
    from obstore import ObjectMeta

_T = TypeVar("_T")
_CHUNK = 1 << 20
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_WRONG_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
_REFUSED = {"reading": "failed to read", "writing": "failed to write"}
_PASSING = (408, 425, 429)
"""Refusals that may be none the next time; so may everything from 500."""


class ObjectChangedError(Exception):
    """The object is not any more what it was when it was listed."""


class Store:
    """The objects of one repository. Its methods block, and raise ``Internal`` when the store refuses."""

    def __init__(self, opened: Opened, stopped: Event) -> None:
        """``stopped``: set when nothing is to be waited for any more."""
        self._opened = opened
        self._location = opened.location
        self._stopped = stopped

    def models(self) -> list[str]:
        """Return the names of the directories right below the repository."""
        path = self._location.below()
        found = self._asked(lambda: obstore.list_with_delimiter(self._opened.client, path or None))
        names = [prefix.rpartition("/")[2] for prefix in found["common_prefixes"]]
        if path and not names and not found["objects"]:
            raise Internal(
                f"failed to stat file {self._location.text}: there is no object below '{path}' in "
                f"'{self._location.bucket}'. Name the path that has the models' directories in it."
            )
        return sorted(name for name in names if not name.startswith("."))

    def listing(self, name: str) -> Listing:
        """Return the files of a model; none if there is no such model."""
        prefix = self._location.below(name)
        found = self._asked(lambda: list(obstore.list(self._opened.client, prefix).collect()))
        try:
            return listing_of(_file(prefix, meta) for meta in found)
        except ValueError as error:
            raise Internal(f"failed to read model repository '{self._location.text}': {error}") from None

    def read(self, file: RemoteFile, start: int) -> tuple[int, Iterator[bytes]]:
        """Return the content of a file from ``start`` on, or from before that: where it begins, and its pieces.

        Raises ``ObjectChangedError`` and ``PassingFailure``; the iterator, too.
        """
        options: obstore.GetOptions = {}
        if file.etag:
            options["if_match"] = f'"{file.etag}"'
        if start:
            options["range"] = {"offset": start}
        with self._translated():
            result = obstore.get(self._opened.client, file.key, options=options)
        if _etag(result.meta) != file.etag or result.meta["size"] != file.size:
            raise ObjectChangedError(file.key)
        return result.range[0], self._pieces(result)

    def write(self, name: str, path: str, source: Path) -> None:
        """Make a file the content of ``path`` of a model, whatever was there."""
        key = self._location.below(f"{name}/{path}")
        self._asked(lambda: obstore.put(self._opened.client, key, source), "writing")

    def remove(self, files: Sequence[RemoteFile]) -> None:
        """Remove files; those that are gone already are no mistake."""
        keys = [file.key for file in files]
        if keys:
            with suppress(ObjectChangedError):
                self._asked(lambda: obstore.delete(self._opened.client, keys), "writing")

    def _pieces(self, result: obstore.GetResult) -> Iterator[bytes]:
        pieces = iter(result.stream(_CHUNK))
        while True:
            with self._translated():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def _asked(self, question: Callable[[], _T], doing: str = "reading") -> _T:
        def attempt() -> _T:
            with self._translated(doing):
                return question()

        return retried(f"{doing} model repository '{self._location.text}'", attempt, self._stopped)

    @contextmanager
    def _translated(self, doing: str = "reading") -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise self._trouble(error, _REFUSED[doing]) from None

    def _trouble(self, error: Exception, refused: str) -> Exception:
        """Return what an error of the library means to us."""
        text = str(error).partition("\n\nDebug source")[0]
        if isinstance(error, FileNotFoundError | PreconditionError) and "NoSuchBucket" not in text:
            return ObjectChangedError(text)
        status = int(found[1]) if (found := _STATUS.search(text)) else 0
        code = found[1] if (found := _CODE.search(text)) else ""
        message = found[1].strip() if (found := _MESSAGE.search(text)) else ""
        reason = ": ".join(filter(None, (code, message))) or text

        def refusal(said: str) -> Internal:
            return Internal(f"{refused} model repository '{self._location.text}': {said}")

        if code in _WRONG_REGION or "redirect without LOCATION" in text:
            return refusal(f"{reason}. Set AWS_DEFAULT_REGION to the region of the bucket.")
        if status in (401, 403) or (not status and isinstance(error, PermissionDeniedError | UnauthenticatedError)):
            signed = f"with the credentials of {self._opened.signed}" if self._opened.signed else "without credentials"
            return refusal(f"access was denied {signed}: {reason}. {self._opened.remedy}.")
        if status == 404:
            what = "container" if self._location.kind == "as" else "bucket"
            return refusal(f"there is no {what} '{self._location.bucket}': {reason}. Check the name.")
        if 400 <= status < 500 and status not in _PASSING:
            return refusal(f"{reason} (HTTP status {status})")
        return PassingFailure(reason)


def _file(prefix: str, meta: ObjectMeta) -> RemoteFile:
    path = meta["path"][len(prefix) :].removeprefix("/")
    return RemoteFile(path, meta["path"], meta["size"], _etag(meta), meta["last_modified"])


def _etag(meta: ObjectMeta) -> str:
    """Return the entity tag without the quotes, which not all stores write everywhere."""
    return (meta["e_tag"] or "").removeprefix("W/").strip('"')
