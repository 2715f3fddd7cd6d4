"""Environments that come in an archive, as conda-pack makes it."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import tarfile
import zlib
from pathlib import Path

from nerite.backends.python import environment_store
from nerite.core.errors import InvalidArgument


def unpacked(archive: Path, place: Path) -> Path:
    """Return the directory with the content of ``archive``; unpack it into ``place`` if that has not been done.

    Raises ``InvalidArgument`` for what is not a tar archive, and for one that would write outside its directory.
    """
    state = archive.stat()
    key = _digest(archive, state.st_size, state.st_mtime_ns)

    def make(directory: Path, lock: int) -> None:
        _extract(archive, directory)
        _unpack_prefixes(directory)

    return environment_store.kept(place, key, archive, make)


@functools.lru_cache(maxsize=64)
def _digest(archive: Path, size: int, modified_ns: int) -> str:
    """Return the digest of the content; size and time are there for the cache to see that the file has changed."""
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(archive: Path, target: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise InvalidArgument(
            f"EXECUTION_ENV_PATH '{archive}' cannot be unpacked: {error}. "
            "Give a virtual environment, an archive made by conda-pack, or a requirements.txt."
        ) from None


def _unpack_prefixes(environment: Path) -> None:
    """Let the environment take note of its new place, as conda-pack wants it; without its script there is no need."""
    script = environment / "bin" / "conda-unpack"
    if script.exists():
        subprocess.run([environment / "bin" / "python", script], capture_output=True, check=False)
