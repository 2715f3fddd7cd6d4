"""Unpacking environments, once for each content."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from pathlib import Path

from nerite.core.errors import InvalidArgument


def cache_folder() -> Path:
    """Return where unpacked environments are kept, across restarts: below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nerite" / "environments"


def unpacked(archive: Path) -> Path:
    """Return the directory with the content of ``archive``; unpack it if that has not been done.

    Safe against others who do the same at the same time. Raises ``InvalidArgument`` for what is not a tar archive, and
    for one that would write outside its directory.
    """
    state = archive.stat()
    target = cache_folder() / _digest(archive, state.st_size, state.st_mtime_ns)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Complete before it has its name, so that nobody ever sees half an environment.
    workplace = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=target.parent))
    try:
        _extract(archive, workplace)
        _unpack_prefixes(workplace)
        try:
            workplace.rename(target)
        except OSError:
            if not target.is_dir():  # somebody else was faster otherwise, and theirs is the same
                raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return target


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
            "Give a virtual environment, or an archive made by conda-pack."
        ) from None


def _unpack_prefixes(environment: Path) -> None:
    """Let the environment take note of its new place, as conda-pack wants it; without its script there is no need."""
    script = environment / "bin" / "conda-unpack"
    if script.exists():
        subprocess.run([environment / "bin" / "python", script], capture_output=True, check=False)
