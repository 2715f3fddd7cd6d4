"""From ``--cache-config`` to the cache it asks for."""

from __future__ import annotations

from collections.abc import Mapping

from nerite.cache.interface import ResponseCache
from nerite.cache.local import LocalCache
from nerite.cache.refusals import choice, refuse_unknown
from nerite.config.options import CacheOptions
from nerite.core.errors import Internal, InvalidArgument, Unsupported

_EXAMPLE = "--cache-config=local,size=1048576"


async def open_cache(options: CacheOptions, environment: Mapping[str, str]) -> ResponseCache | None:
    """Return the cache that the options ask for, ready for use; None if they ask for none.

    Raises ``NeriteError``, in Triton's words where it has any.
    """
    match options.name:
        case "":
            return None
        case "local":
            return _local(options.settings)
        case "redis":
            try:
                from nerite.cache.redis.cache import open_redis
            except ModuleNotFoundError as error:
                if error.name != "hiredis":
                    raise
                raise Unsupported(
                    "the cache 'redis' needs the package 'hiredis'. Install it with: pip install 'nerite[redis]'"
                ) from None
            return await open_redis(options.settings, environment)
    raise InvalidArgument(
        f"unable to find 'libtritoncache_{options.name}.so' for cache. Searched: {options.directory}. "
        f"The caches of this server are {choice(options.name, ('local', 'redis'))}"
    )


def _local(settings: Mapping[str, str]) -> LocalCache:
    failed = "Failed to initialize LocalCache:"
    text = settings.get("size")
    if text is None:
        raise InvalidArgument(f"{failed} config didn't contain a valid 'size' field. Say how many bytes: {_EXAMPLE}")
    refuse_unknown("local", settings, ("size",))
    try:
        size = int(text)
    except ValueError:
        raise Internal(f"{failed} stoull. '{text}' is not a number of bytes: {_EXAMPLE}") from None
    if size <= 0:
        raise Internal(f"{failed} failed to allocate buffer. {size} bytes are too few: {_EXAMPLE}")
    return LocalCache(size)
