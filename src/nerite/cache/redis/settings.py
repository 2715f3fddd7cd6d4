"""The settings of ``--cache-config=redis,…``, under the names that they have in Triton's cache."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from nerite.cache.refusals import refuse_unknown
from nerite.core.errors import InvalidArgument

_FROM_ENVIRONMENT: Final = {"user": "TRITONCACHE_REDIS_USERNAME", "password": "TRITONCACHE_REDIS_PASSWORD"}
_FILES: Final = ("cert", "key", "cacert", "cacert_dir")
_NUMBERS: Final = frozenset(("port", "db", "connect_timeout", "socket_timeout", "pool_size", "wait_timeout"))


@dataclass(frozen=True)
class RedisSettings:
    """Where Redis is, and how it is spoken to. Times are in milliseconds; 0 waits for ever."""

    host: str
    port: int
    user: str = "default"
    password: str = ""
    db: int = 0
    connect_timeout: int = 5000
    socket_timeout: int = 100
    """How long an answer may take. Triton waits for ever, and its clients with it."""
    pool_size: int = 1
    wait_timeout: int = 1000
    """Like ``pool_size`` without a meaning here: one connection carries everything, and nobody waits for it."""
    tls_enabled: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cacert_dir: str = ""
    sni: str = ""
    """The name that Redis' certificate must be for, where it is not ``host``."""

    @property
    def place(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        """Return what a connection over TLS needs; None for one without. Raises ``OSError`` for files."""
        if not self.tls_enabled:
            return None
        context = ssl.create_default_context(cafile=self.cacert or None, capath=self.cacert_dir or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key or None)
        return context


def read(given: Mapping[str, str], environment: Mapping[str, str]) -> RedisSettings:
    """Return the settings. Raises ``InvalidArgument`` for what is missing or wrong."""
    if "host" not in given or "port" not in given:
        raise InvalidArgument(
            "Failed to initialize RedisCache, didn't specify address. Must at a minimum specify 'host' and 'port' in "
            "the configuration: --cache-config=redis,host=localhost --cache-config=redis,port=6379"
        )
    refuse_unknown("redis", given, [field.name for field in fields(RedisSettings)])
    values: dict[str, str] = {
        name: environment[variable] for name, variable in _FROM_ENVIRONMENT.items() if environment.get(variable)
    }
    values |= given
    for name in _FILES:
        if (path := values.get(name)) and not os.path.exists(path):
            raise InvalidArgument(f"the setting '{name}' of the cache 'redis' is '{path}', which does not exist")
    # Each value has the type of its field by now, as ``_value`` has seen to.
    return RedisSettings(**{name: _value(name, text) for name, text in values.items()})  # type: ignore[arg-type]


def _value(name: str, text: str) -> str | int | bool:
    if name == "tls_enabled":
        if text not in ("true", "false"):
            raise InvalidArgument(f"the setting 'tls_enabled' of the cache 'redis' is 'true' or 'false', not '{text}'")
        return text == "true"
    if name in _NUMBERS:
        if not (text.isascii() and text.isdecimal()):
            raise InvalidArgument(f"the setting '{name}' of the cache 'redis' is a number, not '{text}'")
        return int(text)
    return text
