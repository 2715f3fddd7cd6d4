"""Parses the names that models are fetched by: ``hf:ORG/NAME@REVISION``, ``mlflow:URI``, ``s3://bucket/path``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from nerite.core.client_text import is_file_path
from nerite.core.errors import InvalidArgument

_HUB: Final = "hf:"
_MLFLOW: Final = "mlflow:"
_STORE: Final = re.compile(r"(?:s3|gs|as)://")
_PART: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
"""An organization or a model, as the hub allows them."""
_REVISION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+-]{0,199}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_LONGEST: Final = 1024
_FORM: Final = "Write hf:ORG/NAME, hf:ORG/NAME@REVISION, or hf:ORG/NAME/FILE for one file of several."


class HubName(NamedTuple):
    """A model on the Hugging Face hub."""

    repository: str
    """``ORG/NAME``."""
    revision: str = ""
    """Branch, tag or commit; empty for the main branch."""
    file: str = ""
    """Path of the file that is wanted; empty to choose the files."""

    @property
    def model(self) -> str:
        """Name of the model without its organization."""
        return self.repository.partition("/")[2]

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, which never changes."""
        return is_commit(self.revision)

    def at(self, commit: str) -> HubName:
        """Return the name of exactly this state."""
        return self._replace(revision=commit)

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        return f"{_HUB}{self.repository}{file}{f'@{self.revision}' if self.revision else ''}"


class MlflowName(NamedTuple):
    """A model that MLflow has logged or registered, by its URI."""

    uri: str

    def __str__(self) -> str:
        return f"{_MLFLOW}{self.uri}"


class StoreName(NamedTuple):
    """A file, or a directory of files, in an object store."""

    location: str

    def __str__(self) -> str:
        return self.location


ModelName = HubName | MlflowName | StoreName


def is_commit(revision: str) -> bool:
    """Return whether a revision is the full hash of a commit."""
    return _COMMIT.fullmatch(revision) is not None


def parse_name(text: str) -> ModelName | None:
    """Parse a name with a scheme; None if the text has none of them. Raises ``InvalidArgument``."""
    if text.startswith((_HUB, _MLFLOW)) and (len(text) > _LONGEST or not text.isprintable()):
        raise InvalidArgument(f"'{text}' is not the name of a model: it is too long, or has control characters")
    if text.startswith(_HUB):
        return _hub_name(text.removeprefix(_HUB).removeprefix("//"), text)
    if text.startswith(_MLFLOW):
        uri = text.removeprefix(_MLFLOW)
        if not uri:
            raise InvalidArgument(f"'{text}' names no model.\n    Write mlflow:models:/NAME/VERSION or mlflow:runs:/…")
        return MlflowName(uri)
    return StoreName(text) if _STORE.match(text) else None


def parse_bare_name(text: str) -> HubName | None:
    """Parse ``ORG/NAME`` or ``ORG/NAME@REVISION``, if that is neither a path nor looks like one; else return None.

    A path below an existing directory is one, even if nothing is there: it is probably misspelt.
    """
    repository, _, revision = text.partition("@")
    organization, slash, model = repository.partition("/")
    if not slash or not _PART.fullmatch(organization) or not _PART.fullmatch(model):
        return None
    if ("@" in text and not _is_revision(revision)) or Path(text).exists() or Path(organization).exists():
        return None
    return HubName(repository, revision)


def _hub_name(text: str, whole: str) -> HubName:
    path, _, revision = text.partition("@")
    organization, _, rest = path.partition("/")
    model, slash, file = rest.partition("/")
    if not _PART.fullmatch(organization) or not _PART.fullmatch(model):
        raise InvalidArgument(f"'{whole}' is not the name of a model.\n    {_FORM}")
    if ("@" in text and not _is_revision(revision)) or (slash and not is_file_path(file)):
        wrong = "file" if slash and not is_file_path(file) else "revision"
        raise InvalidArgument(f"'{whole}' names no possible {wrong}.\n    {_FORM}")
    return HubName(f"{organization}/{model}", revision, file)


def _is_revision(text: str) -> bool:
    return _REVISION.fullmatch(text) is not None and ".." not in text and "//" not in text and not text.endswith("/")
