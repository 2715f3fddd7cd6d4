"""What a load request may bring along: a configuration, and files in place of the repository's."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nerite.core.errors import InvalidArgument

_FILE = "file:"


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
        config = parameters.get("config")
        if config is None:
            raise InvalidArgument(
                "Load parameter 'config' must be specified for model file override\n"
                "    Send the model's configuration, as JSON, in load parameter 'config'; '{}' to have it completed."
            )
        assert isinstance(config, str)
        return cls(config, files)


def unpack(delivery: Delivery) -> Path:
    """Write the files to a new directory. Blocks."""
    folder = Path(tempfile.mkdtemp(prefix="nerite-model-"))
    for path, data in delivery.files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return folder


def _path(key: str) -> str:
    """Return the path that ``file:<path>`` names. Raises ``InvalidArgument`` if it leads out of the directory."""
    path = posixpath.normpath(key.removeprefix(_FILE))
    if path.startswith(("/", "../")) or path in (".", "..") or "\0" in path:
        raise InvalidArgument(
            f"Invalid file parameter '{key}' with normalized path '{path}' must stay within model directory."
        )
    return path
