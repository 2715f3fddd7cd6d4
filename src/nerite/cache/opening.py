"""From ``--cache-config`` to the cache it asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nerite.cache.interface import ResponseCache
from nerite.cache.local import LocalCache
from nerite.config.near import nearest
from nerite.config.options import CacheOptions
from nerite.core.errors import Internal, InvalidArgument

_CACHES = ("local",)
_EXAMPLE = "--cache-config=local,size=1048576"


async def open_cache(options: CacheOptions) -> ResponseCache | None:
    """Return the cache that the options ask for, ready for use; None if they ask for none.

    Raises ``NeriteError``, in Triton's words where it has any.
    """
    match options.name:
        case "":
            return None
        case "local":
            return _local(options.settings)
    raise InvalidArgument(
        f"unable to find 'libtritoncache_{options.name}.so' for cache. Searched: {options.directory}. "
        f"The caches of this server are {_listed(_CACHES)}.{_meant(options.name, _CACHES)}"
    )


def refuse_unknown(cache: str, settings: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``InvalidArgument`` for the first setting that a cache does not have."""
    known = list(known)
    for name in settings:
        if name not in known:
            raise InvalidArgument(
                f"the cache '{cache}' has no setting '{name}'. It has {_listed(known)}.{_meant(name, known)}"
            )


def _local(settings: Mapping[str, str]) -> LocalCache:
    failed = "Failed to initialize LocalCache:"
    size = settings.get("size")
    if size is None:
        raise InvalidArgument(f"{failed} config didn't contain a valid 'size' field. Say how many bytes: {_EXAMPLE}")
    refuse_unknown("local", settings, ("size",))
    try:
        bytes_ = int(size)
    except ValueError:
        raise Internal(f"{failed} stoull '{size}' is not a number of bytes: {_EXAMPLE}") from None
    if bytes_ <= 0:
        raise Internal(f"{failed} failed to allocate buffer {bytes_} bytes are too few: {_EXAMPLE}")
    return LocalCache(bytes_)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _meant(wrong: str, known: Iterable[str]) -> str:
    near = nearest(wrong, known)
    return f" Did you mean '{near}'?" if near else ""
