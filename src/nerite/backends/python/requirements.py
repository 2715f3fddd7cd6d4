"""Environments that are made from a list of packages: requirements.txt, pyproject.toml or uv.lock.

They are made (``installer.py``) for the Python that the server runs on. numpy, which every model needs, is installed
with the rest.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nerite.backends.python import environment_store
from nerite.backends.python.installer import Installer
from nerite.core.errors import InvalidArgument

_PROJECT: Final = "pyproject.toml"
_LOCK: Final = "uv.lock"
_NUMPY: Final = "numpy"
_FILES: Final = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)(?:\s+|=)(\S+)", re.MULTILINE)
_WHEELS: Final = re.compile(r"^\s*(?:file:)?([^\s#]+\.(?:whl|tar\.gz))\s*(?:$|[;#])", re.MULTILINE)
_HASHES: Final = "--hash="


def is_list(file: Path) -> bool:
    """Return whether a file is a list of packages, by its name."""
    return file.name in (_PROJECT, _LOCK) or file.suffix == ".txt"


def made(file: Path, place: Path) -> Path:
    """Return the directory of the environment with what ``file`` lists; make it in ``place`` if it is not there.

    May take minutes. Raises ``InvalidArgument`` with the last words of the tool that could not do it.
    """
    file = file.absolute()  # the installer runs beside it
    return environment_store.kept(place, _key(file), file, lambda directory, lock: _make(file, directory, lock))


def _make(file: Path, directory: Path, lock: int) -> None:
    installer = Installer(directory, file, lock)
    packages = _packages(file, directory, installer)
    installer.begin()
    installer.install(packages)


def _packages(file: Path, directory: Path, installer: Installer) -> list[str | Path]:
    """Return what is said to the installer."""
    if file.name == _LOCK:
        if installer.uv is None:
            raise InvalidArgument(f"'{file}' can be read by uv only. Install it for the server: pip install uv")
        listed = directory / "requirements.txt"
        options = ["--quiet", "--frozen", "--no-dev", "--no-emit-project", "--project", str(file.parent)]
        installer.run([installer.uv, "export", *options, "--output-file", listed])
        # uv does not want hashes of all packages where there are some.
        return ["-r", listed, _NUMPY]
    if file.name == _PROJECT:
        try:
            dependencies: list[str] = tomllib.loads(file.read_text())["project"].get("dependencies", [])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"'{file}' has no list of packages at 'dependencies' of [project]: {error}") from None
        return [*dependencies, _NUMPY]
    # With hashes for some packages pip wants them for all.
    hashes = any(_HASHES in text for _, text in _texts(file))
    return ["-r", file, *([] if hashes else [_NUMPY])]


def _key(file: Path) -> str:
    """Return a name for the environment: it changes with the lists, with the wheels that they name, and with Python."""
    digest = hashlib.sha256(this_python())
    names = (_LOCK, _PROJECT) if file.name == _LOCK else (file.name,)
    for name in names:
        for path, text in _texts(file.with_name(name)):
            digest.update(repr((path.name, text)).encode())
            for wheel in _WHEELS.findall(text):
                if (local := file.parent / wheel.removeprefix("//")).is_file():
                    digest.update(local.read_bytes())
    return digest.hexdigest()


def this_python() -> bytes:
    """Return what is another for each Python that environments are made for."""
    return repr([sys.version, os.path.realpath(sys.executable), sysconfig.get_platform()]).encode()


def _texts(file: Path, seen: frozenset[Path] = frozenset()) -> Iterator[tuple[Path, str]]:
    """Yield a list and the lists that it includes. One that is not there is for the installer to complain of."""
    if file in seen or not file.is_file():
        return
    text = file.read_text(errors="replace")
    yield file, text
    for name in _FILES.findall(text):
        yield from _texts(file.parent / name, seen | {file})
