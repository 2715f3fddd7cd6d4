"""Environments that are made from a list of packages: requirements.txt, pyproject.toml or uv.lock.

They are made with uv where it is installed, else with venv and pip, for the Python that the server runs on. numpy,
which every model needs, is installed with the rest.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import tomllib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from nerite.backends.python import environment_store
from nerite.core.errors import InvalidArgument, Unavailable

_log = logging.getLogger("nerite.python")

_PROJECT: Final = "pyproject.toml"
_LOCK: Final = "uv.lock"
_NUMPY: Final = "numpy"
_TAIL: Final = 15
"""Lines of a tool that has failed that go into the error."""
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


def stop() -> None:
    """End what is being made; nothing more is made in this process. For any thread."""
    with _lock:
        environment_store.stopped.set()
        for process in _running:
            process.terminate()


_lock = threading.Lock()
_running: set[subprocess.Popen[str]] = set()


def _make(file: Path, directory: Path, lock: int) -> None:
    uv = _uv()
    _log.info("making an environment of '%s' with %s", file, "uv" if uv else "pip")
    python = directory / "bin" / "python"
    packages = _packages(file, directory, uv, lock)
    if uv:
        options = ["--quiet", "--no-project", "--allow-existing", "--python", sys.executable]
        _run([uv, "venv", *options, directory], file, lock)
        _run([uv, "pip", "install", "--python", python, *packages], file, lock)
    else:
        _run([sys.executable, "-m", "venv", directory], file, lock)
        _run([python, "-m", "pip", "--disable-pip-version-check", "install", "--no-input", *packages], file, lock)


def _packages(file: Path, directory: Path, uv: str | None, lock: int) -> list[str | Path]:
    """Return what is said to the installer."""
    if file.name == _LOCK:
        if uv is None:
            raise InvalidArgument(f"'{file}' can be read by uv only. Install it for the server: pip install uv")
        listed = directory / "requirements.txt"
        options = ["--quiet", "--frozen", "--no-dev", "--no-emit-project", "--project", str(file.parent)]
        _run([uv, "export", *options, "--output-file", listed], file, lock)
        # uv does not want hashes of all packages where there are some.
        return ["-r", listed, _NUMPY]
    if file.name == _PROJECT:
        try:
            dependencies: list[str] = tomllib.loads(file.read_text())["project"].get("dependencies", [])
        except (tomllib.TOMLDecodeError, KeyError) as error:
            raise InvalidArgument(f"'{file}' has no list of packages at 'dependencies' of [project]: {error}") from None
        return [*dependencies, _NUMPY]
    # With hashes for some packages pip wants them for all.
    hashes = any(_HASHES in text for _, text in _texts(file))
    return ["-r", file, *([] if hashes else [_NUMPY])]


def _key(file: Path) -> str:
    """Return a name for the environment: it changes with the lists, with the wheels that they name, and with Python."""
    digest = hashlib.sha256()
    known = [sys.version, os.path.realpath(sys.executable), sysconfig.get_platform()]
    digest.update(repr(known).encode())
    names = (_LOCK, _PROJECT) if file.name == _LOCK else (file.name,)
    for name in names:
        for path, text in _texts(file.with_name(name)):
            digest.update(repr((path.name, text)).encode())
            for wheel in _WHEELS.findall(text):
                if (local := file.parent / wheel.removeprefix("//")).is_file():
                    digest.update(local.read_bytes())
    return digest.hexdigest()


def _texts(file: Path, seen: frozenset[Path] = frozenset()) -> Iterator[tuple[Path, str]]:
    """Yield a list and the lists that it includes. One that is not there is for the installer to complain of."""
    if file in seen or not file.is_file():
        return
    text = file.read_text(errors="replace")
    yield file, text
    for name in _FILES.findall(text):
        yield from _texts(file.parent / name, seen | {file})


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")


def _run(command: Sequence[str | Path], file: Path, lock: int) -> None:
    """Run a step, with what it says in the log. It holds the lock as well, so that it may outlive the server.

    Raises ``InvalidArgument`` if it fails.
    """
    # The server's own packages are none of the environment's.
    ours = ("PYTHON", "VIRTUAL_ENV")
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    with _lock:
        if environment_store.stopped.is_set():
            raise Unavailable(f"no environment is made of '{file}': the server stops")
        process = subprocess.Popen(
            command,
            cwd=file.parent,
            env=surroundings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[lock],
        )
        _running.add(process)
    last: deque[str] = deque(maxlen=_TAIL)
    try:
        with process:
            for line in process.stdout or ():
                last.append(line.rstrip())
                _log.info("environment of '%s': %s", file, last[-1])
    finally:
        with _lock:
            _running.discard(process)
    if process.returncode:
        said = "\n".join(last) or f"exit status {process.returncode}"
        raise InvalidArgument(f"no environment can be made of '{file}':\n{said}")
