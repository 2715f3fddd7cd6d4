"""Addresses of Redis: what they say, and what is said of those that are none."""

from __future__ import annotations

import pytest

from nerite.core.errors import InvalidArgument
from nerite.redis.settings import RedisSettings, settings_of_address


@pytest.mark.parametrize(
    ("address", "settings"),
    [
        ("redis://localhost", RedisSettings("localhost", 6379)),
        ("redis://10.0.0.1:7000/3", RedisSettings("10.0.0.1", 7000, db=3)),
        ("redis://[::1]:7000/", RedisSettings("::1", 7000)),
        ("rediss://me:p%40ss@h", RedisSettings("h", 6379, "me", "p@ss", tls_enabled=True)),
        ("redis://:secret@h", RedisSettings("h", 6379, "default", "secret")),
    ],
)
def test_addresses(address: str, settings: RedisSettings) -> None:
    assert settings_of_address(address) == settings


@pytest.mark.parametrize(
    "address",
    [
        "localhost:6379",
        "http://x:secret@h",
        "redis://",
        "redis://x:secret@h/one",
        "redis://h/99999",
        "redis://h:port",
        "redis://h:70000",
        "redis://h?db=1",
        "redis://[h",
        "",
    ],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InvalidArgument, match=r"write redis://HOST:PORT or redis://USER:PASSWORD@HOST") as caught:
        settings_of_address(address)
    assert "secret" not in caught.value.message
