"""Parses the locations of repositories in object stores, as flags name them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from nerite.core.errors import InvalidArgument

Kind = Literal["s3", "gs", "as"]

FORMS: dict[Kind, tuple[str, ...]] = {
    "s3": ("s3://bucket/path", "s3://host:port/bucket/path", "s3://https://host:port/bucket/path"),
    "gs": ("gs://bucket/path",),
    "as": ("as://account/container/path",),
}
_SCHEME = re.compile(r"(s3|gs|as)://")
_ENDPOINT = re.compile(r"(?:(https?)://([^/]+)|([^/]+:\d+))(?:/|$)")


@dataclass(frozen=True, slots=True)
class Location:
    """Parsed location in an object store."""

    text: str
    """The location as it was written."""
    kind: Kind
    bucket: str
    """The bucket; on Azure, the container."""
    path: str
    """The prefix of all object names, without leading and trailing slashes; empty for the whole bucket."""
    endpoint: str = ""
    """The URL of the server; empty for the cloud's default."""
    account: str = ""
    """The storage account, on Azure."""

    @property
    def key(self) -> str:
        """A directory name that is unique to this location and stable."""
        place = "\0".join((self.kind, self.endpoint, self.account, self.bucket, self.path))
        return f"{self.kind}-{self.bucket}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"

    def below(self, *names: str) -> str:
        """Return the name of an object, or a prefix of object names, below this location."""
        return "/".join(part for part in (self.path, *names) if part)


def is_remote(text: str) -> bool:
    """Return whether a location is in an object store rather than on this machine."""
    return _SCHEME.match(text) is not None


def read_location(text: str) -> Location:
    """Parse a location. Raises ``InvalidArgument``, which names the valid forms."""
    scheme = _SCHEME.match(text)
    if scheme is None:
        raise InvalidArgument(f"'{text}' is not in an object store; such locations begin with s3://, gs:// or as://")
    kind: Kind = scheme[1]  # type: ignore[assignment]  # the pattern has these three
    rest, endpoint, account = text[scheme.end() :], "", ""
    if kind == "s3" and (server := _ENDPOINT.match(rest)):
        endpoint = f"{server[1]}://{server[2]}" if server[1] else f"http://{server[3]}"
        rest = rest[server.end() :]
    names = [name for name in rest.split("/") if name]
    if kind == "as" and names:
        account = names.pop(0)
    if not names:
        raise InvalidArgument(f"cannot read the location '{text}'. Write it as {' or '.join(FORMS[kind])}.")
    return Location(text, kind, names[0], "/".join(names[1:]), endpoint, account)
