"""Archives are unpacked so that nothing is written outside of the directory, whatever links they have.

Python's data filter resolves links in the file system, which several versions of CPython got wrong: paths that are too
long to be resolved, or links to links, led outside (CVE-2025-4517, CVE-2025-4330, CVE-2025-4138). So links are also
checked here, by their text alone: nothing is unpacked through a link, and a link climbs only at its beginning, from a
directory that is none.
"""

from __future__ import annotations

import platform
import tarfile
import zlib
from pathlib import Path

from nerite.core.errors import InvalidArgument


def unpack_archive(archive: Path, target: Path) -> None:
    """Unpack a tar archive into a new directory. Blocks. Raises ``InvalidArgument``."""
    if not hasattr(tarfile, "data_filter"):
        raise InvalidArgument(
            f"EXECUTION_ENV_PATH '{archive}' cannot be unpacked: archives need Python 3.11.4 or newer, which refuses "
            f"paths outside of the directory; this is {platform.python_version()}. Give a requirements.txt."
        )
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter=_MemberFilter())
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise InvalidArgument(
            f"EXECUTION_ENV_PATH '{archive}' cannot be unpacked: {error}. "
            "Give a virtual environment, an archive made by conda-pack, or a requirements.txt."
        ) from None


class _MemberFilter:
    """Python's data filter, which also checks links by their text. For one archive: it knows what came before."""

    def __init__(self) -> None:
        self._links: set[tuple[str, ...]] = set()
        self._files: set[tuple[str, ...]] = set()

    def __call__(self, member: tarfile.TarInfo, target: str) -> tarfile.TarInfo:
        """Return the member to be unpacked. Raises ``TarError``."""
        member = tarfile.data_filter(member, target)
        path = _parts(member.name)
        if ".." in path or member.name.startswith("/"):
            raise tarfile.TarError(f"'{member.name}' leads out of the archive")
        if any(path[:length] in self._links for length in range(1, len(path))):
            raise tarfile.TarError(f"'{member.name}' is behind a link")
        if member.issym():
            steps = _parts(member.linkname)
            climbs = next((at for at, step in enumerate(steps) if step != ".."), len(steps))
            if member.linkname.startswith("/") or climbs > len(path) - 1 or ".." in steps[climbs:]:
                raise tarfile.TarError(f"the link '{member.name}' may lead out of the archive: '{member.linkname}'")
            self._links.add(path)
        elif member.islnk():
            if _parts(member.linkname) not in self._files:
                raise tarfile.TarError(f"the link '{member.name}' is to no file before it: '{member.linkname}'")
        elif path in self._links:
            raise tarfile.TarError(f"'{member.name}' is in the place of a link")
        if not (member.issym() or member.isdir()):
            self._files.add(path)
        return member


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part not in ("", "."))
