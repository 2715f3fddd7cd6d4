"""Where Redis is and how to connect to it; also as one address, ``redis://USER:PASSWORD@HOST:PORT/DB``."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from nerite.core.errors import InvalidArgument


@dataclass(frozen=True)
class RedisSettings:
    """Address and connection settings of Redis. Times are in milliseconds; 0 for no timeout."""

    host: str
    port: int
    user: str = "default"
    password: str = field(default="", repr=False)
    db: int = 0
    connect_timeout: int = 5000
    socket_timeout: int = 100
    """Timeout of a reply. Triton has none, so that its clients wait indefinitely."""
    pool_size: int = 1
    wait_timeout: int = 1000
    """Ignored, like ``pool_size``: one connection carries all commands, so none waits for a free connection."""
    tls_enabled: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cacert_dir: str = ""
    sni: str = ""
    """Expected host name in the certificate of Redis, if it is not ``host``."""

    @property
    def place(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of the connection; None without TLS. Raises ``OSError`` if a file is not usable."""
        if not self.tls_enabled:
            return None
        context = ssl.create_default_context(cafile=self.cacert or None, capath=self.cacert_dir or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key or None)
        return context


_SCHEMES: Final = ("redis", "rediss")
_FORM: Final = "redis://HOST:PORT or redis://USER:PASSWORD@HOST:PORT/DATABASE, or rediss:// for TLS"


def settings_of_address(address: str) -> RedisSettings:
    """Return the settings in an address. Raises ``InvalidArgument``, without the password, if it is not valid."""
    try:
        parts = urlsplit(address)
        port = parts.port or 6379
    except ValueError:
        raise InvalidArgument(f"the address of Redis is not valid: write {_FORM}") from None
    database = parts.path.removeprefix("/") or "0"
    shown = f"{parts.scheme}://{parts.hostname or ''}:{port}{parts.path}"
    if parts.scheme not in _SCHEMES or not parts.hostname or parts.query or parts.fragment:
        raise InvalidArgument(f"'{shown}' is not an address of Redis: write {_FORM}")
    if not (database.isascii() and database.isdecimal() and len(database) < 5):
        raise InvalidArgument(f"'{shown}' must end with the number of a database: write {_FORM}")
    return RedisSettings(
        parts.hostname,
        port,
        user=unquote(parts.username or "") or "default",
        password=unquote(parts.password or ""),
        db=int(database),
        tls_enabled=parts.scheme == "rediss",
    )
