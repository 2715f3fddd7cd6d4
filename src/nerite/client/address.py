"""Where a server is: what stands in a URL, of which most may be left out."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from nerite.client.error import ClientError

DEFAULT_PORT = 8000


class Address(NamedTuple):
    """A server's place. ``prefix`` is what stands before each path, for a server behind a proxy."""

    tls: bool
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read ``[http[s]://]host[:port][/prefix]``. Without a scheme the port is 8000. Raises ``ClientError``."""
        bare = "://" not in url
        try:
            parts = urlsplit(f"http://{url}" if bare else url)
            port = parts.port
        except ValueError as error:
            raise ClientError(f"'{url}' is no address: {error}. Write it as HOST:PORT.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"'{url}' is no address. Write it as HOST:PORT or https://HOST:PORT.")
        if port is None:
            port = DEFAULT_PORT if bare else {"http": 80, "https": 443}[parts.scheme]
        return cls(parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"
