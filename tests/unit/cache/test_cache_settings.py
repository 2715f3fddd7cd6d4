"""From --cache-config to a cache, or to the words that say what is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nerite.cache import redis
from nerite.cache.local import LocalCache, open_cache
from nerite.config.options import CacheOptions
from nerite.core.errors import NeriteError

ADDRESS = {"host": "h", "port": "1"}


def refusal(name: str, **given: str) -> str:
    with pytest.raises(NeriteError) as caught:
        asyncio.run(open_cache(CacheOptions(name, given), {}))
    return f"{caught.value.code} {caught.value.message}"


def test_no_cache() -> None:
    assert asyncio.run(open_cache(CacheOptions(), {})) is None


def test_a_local_one() -> None:
    cache = asyncio.run(open_cache(CacheOptions("local", {"size": "1000"}), {}))
    assert isinstance(cache, LocalCache)
    assert cache.size == 1000


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        (
            "local",
            {"x": "1"},
            "INVALID_ARG Failed to initialize LocalCache: config didn't contain a valid 'size' field.",
        ),
        ("local", {"size": "9k"}, "INTERNAL Failed to initialize LocalCache: stoull. '9k' is not a number of bytes"),
        ("local", {"size": "0"}, "INTERNAL Failed to initialize LocalCache: failed to allocate buffer. 0 bytes"),
        (
            "local",
            {"size": "1", "siz": "2"},
            "INVALID_ARG the cache 'local' has no setting 'siz'. Its settings are 'size'. Did",
        ),
        ("rediss", {"host": "h"}, "INVALID_ARG unable to find 'libtritoncache_rediss.so' for cache. Searched: /opt/"),
        (
            "redis",
            {"host": "h"},
            "INVALID_ARG Failed to initialize RedisCache, didn't specify address. Must at a minimum",
        ),
        (
            "redis",
            {**ADDRESS, "pasword": "x"},
            "INVALID_ARG the cache 'redis' has no setting 'pasword'. Its settings are 'host',",
        ),
        (
            "redis",
            {**ADDRESS, "port": "x"},
            "INVALID_ARG the setting 'port' of the cache 'redis' must be a number, not 'x'",
        ),
        (
            "redis",
            {**ADDRESS, "tls_enabled": "1"},
            "INVALID_ARG the setting 'tls_enabled' of the cache 'redis' must be 'true'",
        ),
        (
            "redis",
            {**ADDRESS, "cert": "/none"},
            "INVALID_ARG the setting 'cert' of the cache 'redis' is '/none', which",
        ),
    ],
)
def test_mistakes(name: str, given: dict[str, str], said: str) -> None:
    assert refusal(name, **given).startswith(said)


def test_what_was_meant() -> None:
    assert refusal("redi", host="h").endswith("are 'local', 'redis'. Did you mean 'redis'?")
    assert refusal("redis", **ADDRESS, pasword="x").endswith("Did you mean 'password'?")


def test_who_we_are() -> None:
    environment = {"TRITONCACHE_REDIS_USERNAME": "me", "TRITONCACHE_REDIS_PASSWORD": "secret"}
    read = redis.read_redis_settings(ADDRESS, environment)
    assert (read.user, read.password, read.place) == ("me", "secret", "h:1")
    read = redis.read_redis_settings({**ADDRESS, "user": "you", "password": "other"}, environment)
    assert (read.user, read.password) == ("you", "other")
    assert (redis.read_redis_settings(ADDRESS, {}).user, redis.read_redis_settings(ADDRESS, {}).password) == (
        "default",
        "",
    )


def test_every_setting_of_triton(tmp_path: Path) -> None:
    numbers = dict.fromkeys(("db", "connect_timeout", "socket_timeout", "pool_size", "wait_timeout"), "7")
    files = {name: str(tmp_path) for name in ("cert", "key", "cacert", "cacert_dir")}
    read = redis.read_redis_settings({**ADDRESS, **numbers, **files, "tls_enabled": "true", "sni": "name"}, {})
    assert (read.db, read.connect_timeout, read.socket_timeout, read.tls_enabled, read.sni) == (7, 7, 7, True, "name")
