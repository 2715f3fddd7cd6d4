"""Describes and downloads models of the Hugging Face hub with its own library. Nothing else imports that library.

The library downloads a file from its beginning again if the process ended. Here a download goes on where it stopped,
and a file takes its place in the cache only when its hash is the one that the hub has stated.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Any, Final

from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotFound, NotInstalled, Unavailable
from nerite.core.transfer import readable_size
from nerite.sources.hub_files import HubFile, HubRevision, check_revision
from nerite.sources.name import HubName

PACKAGE: Final = "huggingface_hub"
_TIMEOUT: Final = 30.0
_TRUE: Final = ("1", "on", "yes", "true")
_BLOCK: Final = 1 << 18
_TRIES: Final = 6
"""Attempts in a row that bring nothing of a file."""
_LONGEST_PAUSE: Final = 8.0
"""Seconds between two attempts."""
_TRANSIENT: Final = (408, 425, 429)
"""HTTP statuses below 500 that are transient."""


def is_offline(environment: Mapping[str, str]) -> bool:
    """Return whether the environment forbids contact with the hub, as it does for the hub's library."""
    return (environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE") or "").lower() in _TRUE


class HubUnreachableError(Exception):
    """The hub did not answer, or not as a hub."""


class DownloadStoppedError(Exception):
    """Another file of the same download has failed, or the user has cancelled it."""


class Hub:
    """The hub that ``HF_ENDPOINT`` names, asked with the token of ``HF_TOKEN`` or of ``hf auth login``."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Import the library. Raises ``NotInstalled``."""
        if importlib.util.find_spec(PACKAGE) is None:
            raise NotInstalled(
                f"models of the Hugging Face hub need the package '{PACKAGE}'. Install it with: "
                "pip install 'nerite[hub]'"
            )
        import huggingface_hub

        token = environment.get("HF_TOKEN")
        self._token = ((huggingface_hub.get_token() or "") if token is None else token).strip()
        endpoint = environment.get("HF_ENDPOINT", "").rstrip("/") or None
        self._api = huggingface_hub.HfApi(endpoint, self._token or False, library_name="nerite")
        self.endpoint = str(self._api.endpoint)

    def revision(self, name: HubName) -> HubRevision:
        """Return the current state of a revision. Raises ``HubUnreachableError``, and ``NeriteError`` for a refusal."""
        with self._translated(name):
            info = self._api.model_info(
                name.repository, revision=name.revision or None, timeout=_TIMEOUT, files_metadata=True
            )
            files = tuple(_hub_file(each) for each in info.siblings or ())
        return check_revision(HubRevision(name.repository, info.sha or "", files, _licence(info)))

    def download(
        self, name: HubName, file: HubFile, part: Path, place: Path, arrived: Callable[[int], None], stopped: Event
    ) -> None:
        """Download a file of a pinned revision to ``place``; go on with what ``part`` has of it.

        ``arrived`` is called with the size of each block. Raises ``DownloadStoppedError`` once ``stopped`` is set,
        ``HubUnreachableError``, ``NeriteError``, and ``OSError`` if it cannot be written.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        part.parent.mkdir(parents=True, exist_ok=True)
        url = hf_hub_url(name.repository, file.path, revision=name.revision, endpoint=self.endpoint)
        # Compressed bytes could not be resumed. A redirect to another host drops the token.
        headers: dict[str, str] = build_hf_headers(token=self._token or False, library_name="nerite")
        headers["Accept-Encoding"] = "identity"
        with _PartialFile(part, file, arrived, stopped) as sink:
            with self._translated(name, file.path):
                failures = 0
                while (have := sink.begin()) < file.size:
                    failure = _receive(url, headers, sink, have)
                    failures = 1 if sink.tell() > have else failures + 1
                    if failure is not None and failures >= _TRIES:
                        raise failure
                    if sink.tell() < file.size:
                        stopped.wait(min(_LONGEST_PAUSE, 0.25 * 2**failures))
            os.fsync(sink.fileno())
        found = content_hash(part, large=file.is_large)
        if found != file.identity:
            part.unlink()
            kind = "SHA-256" if file.is_large else "Git hash"
            raise Internal(
                f"'{file.path}' of '{name.repository}' arrived with another content than {self.endpoint} states: its "
                f"{kind} is {found}, not {file.identity}. What arrived was removed.\n"
                "    Try again. If that repeats, a proxy or mirror on the way changes files."
            )
        part.chmod(0o644)
        part.rename(place)

    @contextmanager
    def _translated(self, name: HubName, file: str = "") -> Iterator[None]:
        """Turn the library's errors into ``HubUnreachableError`` and ``NeriteError``, without the token."""
        from huggingface_hub import errors

        try:
            yield
        except (NeriteError, DownloadStoppedError, HubUnreachableError):
            raise
        except errors.GatedRepoError:
            raise self._no_access(name) from None
        except errors.RevisionNotFoundError:
            raise NotFound(
                f"'{name.repository}' has no revision '{name.revision}' on {self.endpoint}.\n"
                "    Name a branch, a tag or the full hash of a commit."
            ) from None
        except errors.RepositoryNotFoundError:
            hint = "the token of HF_TOKEN has no access to it" if self._token else "it is private: set HF_TOKEN"
            raise NotFound(
                f"there is no model '{name.repository}' on {self.endpoint}, or {hint}.\n"
                f"    Check the name at {self.endpoint}/models"
            ) from None
        except errors.EntryNotFoundError:
            raise NotFound(f"'{name.repository}' has no file '{file}' at {name.revision} any more.") from None
        except errors.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            if status in (401, 403):
                raise self._no_access(name) from None
            raise HubUnreachableError(f"{self.endpoint} answers with status {status}") from None
        except errors.OfflineModeIsEnabled:
            raise HubUnreachableError("HF_HUB_OFFLINE is set") from None
        except OSError as error:
            if _is_of_the_disk(error):
                raise
            raise HubUnreachableError(self._safe(error)) from None
        except Exception as error:  # of the HTTP library that this release of the hub's library uses
            raise HubUnreachableError(f"{self.endpoint}: {self._safe(error)}") from None

    def _no_access(self, name: HubName) -> InvalidArgument:
        page = f"{self.endpoint}/{name.repository}"
        if self._token:
            return InvalidArgument(
                f"the token of HF_TOKEN gives no access to '{name.repository}'.\n"
                f"    Accept its terms at {page} with the account of the token."
            )
        return InvalidArgument(
            f"'{name.repository}' requires an account.\n"
            f"    Accept its terms at {page}, and set HF_TOKEN to a token of that account."
        )

    def _safe(self, error: Exception) -> str:
        text = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        return text.replace(self._token, "…") if self._token else text


def _receive(url: str, headers: Mapping[str, str], sink: _PartialFile, have: int) -> Exception | None:
    """Append what is missing of a file; return the reason if that broke off and may be tried again."""
    from huggingface_hub import errors
    from huggingface_hub.utils import get_session, hf_raise_for_status

    asked = {**headers, "Range": f"bytes={have}-"} if have else dict(headers)
    try:
        with get_session().stream("GET", url, headers=asked, follow_redirects=True, timeout=_TIMEOUT) as response:
            hf_raise_for_status(response)
            if have and response.status_code != HTTPStatus.PARTIAL_CONTENT:
                sink.restart()
            for block in response.iter_bytes(_BLOCK):
                sink.write(block)
    except (NeriteError, DownloadStoppedError):
        raise
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        if status not in _TRANSIENT and status < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        return error
    except OSError as error:
        if _is_of_the_disk(error):
            raise
        return error
    except Exception as error:  # of the HTTP library
        return error
    return None if sink.tell() > have else HubUnreachableError("the connection ends without data")


def _is_of_the_disk(error: OSError) -> bool:
    return bool(error.errno) and not isinstance(error, ConnectionError | TimeoutError)


def _hub_file(sibling: Any) -> HubFile:
    large = sibling.lfs.sha256 if sibling.lfs is not None else ""
    size = sibling.lfs.size if sibling.lfs is not None else sibling.size
    return HubFile(str(sibling.rfilename), -1 if size is None else int(size), large or sibling.blob_id or "")


def _licence(info: Any) -> str:
    card = info.card_data
    named = [getattr(card, "license_name", None), getattr(card, "license", None)] if card is not None else []
    tags = [tag.partition(":")[2] for tag in info.tags or () if tag.startswith("license:")]
    found = next((each for each in (*named, *tags) if isinstance(each, str) and each), "")
    return found if found.isprintable() and len(found) <= 100 else ""


def content_hash(path: Path, *, large: bool) -> str:
    """Return the SHA-256 of a file, or, unless it is ``large``, Git's hash of it as a blob."""
    digest = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class _PartialFile(io.FileIO):
    """The file that a download grows in. Its writes are counted, bounded by the size that the hub has stated."""

    def __init__(self, path: Path, file: HubFile, arrived: Callable[[int], None], stopped: Event) -> None:
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
        self._file = file
        self._arrived = arrived
        self._stopped = stopped

    def begin(self) -> int:
        """Move to the end of what is there; return its size. More than the whole file is not part of it."""
        if self.seek(0, os.SEEK_END) > self._file.size:
            self.seek(0)
            self.truncate()
        return self.tell()

    def restart(self) -> None:
        """Drop what is there."""
        self._arrived(-self.seek(0, os.SEEK_END))
        self.seek(0)
        self.truncate()

    def write(self, data: Any) -> int:
        """Write all of a block."""
        if self._stopped.is_set():
            raise DownloadStoppedError
        rest = memoryview(data)
        if self.tell() + len(rest) > self._file.size:
            raise Internal(f"'{self._file.path}' is longer than the {self._file.size} bytes that the hub has stated.")
        while rest:
            rest = rest[super().write(rest) :]
        self._arrived(len(data))
        return len(data)


def check_space(folder: Path, needed: int) -> None:
    """Raise ``Internal`` if the disk of a directory, which need not exist yet, has too little space."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if (free := shutil.disk_usage(existing).free) < needed:
        raise no_space(folder, f"{readable_size(needed)} are needed, and {readable_size(free)} are free")


def no_space(folder: Path, what: str) -> Internal:
    """Return the error for a full disk."""
    return Internal(
        f"there is not enough space in {folder}: {what}.\n"
        "    Free some (nerite downloads ls, nerite downloads prune), or set HF_HOME to a directory on another disk. "
        "What has arrived is kept."
    )


def is_full(error: OSError) -> bool:
    """Return whether an error means that a disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def unreachable(name: HubName, reason: HubUnreachableError) -> Unavailable:
    """Return the error for a model that is not here, of a hub that cannot be reached."""
    return Unavailable(
        f"'{name.repository}' is not on this machine, and the hub cannot be reached: {reason}\n"
        "    Check the network, HTTPS_PROXY and HF_ENDPOINT. What is here: nerite downloads ls"
    )
