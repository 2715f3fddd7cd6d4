"""The file of ``TRITON_CLOUD_CREDENTIAL_PATH``: credentials for many places, in JSON.

    {"s3": {"": {...}, "s3://bucket": {...}}, "gs": {"": "<path of a key file>"}, "as": {...}}

The longest name that a location begins with counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from nerite.core.errors import InvalidArgument
from nerite.repository.remote.location import Location

VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"


class Given(NamedTuple):
    """What the file has for a location."""

    entry: Any
    """A path for Google, an object with strings for the others."""
    source: str
    """Where it stands, to be named in errors."""

    def text(self, field: str) -> str:
        """Return a field of the object; empty where it is not there."""
        return str(self.entry.get(field) or "")


def credentials_for(location: Location, environment: Mapping[str, str]) -> Given | None:
    """Return what the file says of ``location``; None without a file or an entry. Raises ``InvalidArgument``."""
    path = environment.get(VARIABLE)
    if not path:
        return None
    try:
        content = orjson.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot read '{path}', which {VARIABLE} names: {error}") from None
    entries = content.get(location.kind, {}) if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise InvalidArgument(
            f"'{path}', which {VARIABLE} names, has to be an object with objects named 'gs', 's3' and 'as' in it"
        )
    names = [name for name in entries if location.text.startswith(name)]
    if not names:
        return None
    name = max(names, key=len)
    source = f'the entry "{location.kind}" / "{name}" of \'{path}\''
    wanted: type = str if location.kind == "gs" else dict
    if not isinstance(entries[name], wanted):
        what = "the path of a key file" if wanted is str else "an object"
        raise InvalidArgument(f"{source} has to be {what}")
    return Given(entries[name], source)
