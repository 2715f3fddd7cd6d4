"""What a load request may bring along: a configuration, and files in place of the repository's."""

from __future__ import annotations

import posixpath
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from nerite.core.errors import InvalidArgument

_FILE: Final = "file:"
_MAX_FILE_NAME: Final = 255
"""Bytes that file systems take."""


@dataclass(frozen=True, eq=False)
class Delivery:
    """A configuration in JSON, and files by their path in the model's directory."""

    config: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    """If there are any, they are all the files that the model has."""

    @classmethod
    def of(cls, parameters: Mapping[str, str | bytes]) -> Delivery | None:
        """Return what the parameters of a load bring, None for nothing. Raises Triton's refusals."""
        if not parameters:
            return None
        files = {}
        for key, value in parameters.items():
            if key.startswith(_FILE):
                assert isinstance(value, bytes)
                files[_path(key)] = value
        for path in files:
            for parent in map(str, PurePosixPath(path).parents):
                if parent in files:
                    raise InvalidArgument(
                        f"Invalid file parameter '{_FILE}{path}': '{_FILE}{parent}' is a file and not a directory."
                    )
        config = parameters.get("config")
        if config is None:
            raise InvalidArgument(
                "Load parameter 'config' must be specified for model file override\n"
                "    Send the model's configuration, as JSON, in load parameter 'config'; '{}' to have it completed."
            )
        assert isinstance(config, str)
        return cls(config, files)


def check_names(parameters: Iterable[str]) -> None:
    """Raise ``InvalidArgument`` for a parameter whose path no file can have. One that is too long ends Triton."""
    for key in parameters:
        if key.startswith(_FILE) and any(len(part.encode()) > _MAX_FILE_NAME for part in key[len(_FILE) :].split("/")):
            raise InvalidArgument(
                f"Invalid file parameter '{key}': a name in its path is longer than {_MAX_FILE_NAME} bytes, which no "
                "file system takes. Send the file under a shorter name."
            )


def new_folder() -> Path:
    """Return the path of a directory for the files of a delivery. It does not exist, and nobody else has the path."""
    return Path(tempfile.gettempdir(), f"nerite-model-{secrets.token_hex(8)}")


def unpack(delivery: Delivery, folder: Path) -> None:
    """Make ``folder`` and write the files to it. Blocks.

    Raises ``OSError``, and may leave the directory with a part of the files then.
    """
    folder.mkdir(mode=0o700)
    for path, data in delivery.files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def _path(key: str) -> str:
    """Return the path that ``file:<path>`` names.

    Raises ``InvalidArgument`` if it leads out of the directory.
    """
    # In the model's directory also where it begins with a slash, as Triton has it.
    path = posixpath.normpath(key.removeprefix(_FILE).lstrip("/"))
    if path.startswith("../") or path in (".", "..") or "\0" in path:
        raise InvalidArgument(
            f"Invalid file parameter '{key}' with normalized path '{path}' must stay within model directory."
        )
    return path
