"""Where a repository in an object store is, as a flag names it."""

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
    """A place in an object store, taken apart."""

    text: str
    """As it was written."""
    kind: Kind
    bucket: str
    """Azure calls it a container."""
    path: str
    """What the names of all its objects begin with, without slashes at the ends; empty for the whole bucket."""
    endpoint: str = ""
    """The URL of the server; empty for the cloud's own."""
    account: str = ""
    """On Azure, whose container it is."""

    @property
    def key(self) -> str:
        """A name for a directory: the same for the same place, and not for another."""
        place = "\0".join((self.kind, self.endpoint, self.account, self.bucket, self.path))
        return f"{self.kind}-{self.bucket}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"

    def below(self, *names: str) -> str:
        """Return the name of an object, or the beginning of several, in this place."""
        return "/".join(part for part in (self.path, *names) if part)


def is_remote(text: str) -> bool:
    """Say whether a flag names an object store, and not a directory of this machine."""
    return _SCHEME.match(text) is not None


def read_location(text: str) -> Location:
    """Take a location apart. Raises ``InvalidArgument``, with the forms that there are."""
    scheme = _SCHEME.match(text)
    if scheme is None:
        raise InvalidArgument(f"'{text}' names no object store; locations begin with s3://, gs:// or as://")
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
