"""Model repositories in object stores: Amazon S3 and compatible stores, Google Cloud Storage, Azure Blob Storage.

Models are staged in a cache on this machine; each file is downloaded once until it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nerite.core.errors import Internal
from nerite.repository.remote.location import is_remote, read_location

if TYPE_CHECKING:
    from nerite.repository.remote.repository import RemoteRepository

__all__ = ["is_remote", "repository_at"]


def repository_at(text: str, environment: Mapping[str, str], cache: str = "") -> RemoteRepository:
    """Return the repository at a location. ``cache`` is the directory for its files; if empty, the environment decides.

    May take a second to look for credentials; the store itself is not contacted yet. Raises ``InvalidArgument`` for an
    invalid location or invalid credentials, ``Internal`` if the library is missing.
    """
    location = read_location(text)
    try:
        # Imported lazily: a server with local models does not need the library for object stores.
        from nerite.repository.remote.credentials import open_store
        from nerite.repository.remote.repository import DownloadCache, RemoteRepository, cache_directory
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise Internal(
            f"the model repository '{text}' needs the package 'obstore'. Install it with: pip install 'nerite[cloud]'"
        ) from None
    return RemoteRepository(
        open_store(location, environment), DownloadCache(cache_directory(location, environment, cache))
    )
