"""The Python environment that a model brings: ``EXECUTION_ENV_PATH``.

It is a directory, an archive made by conda-pack, or a list of packages. An archive is unpacked once, and of a list an
environment is made once (``environment_store.py``), for every model and every start of the server that has the same.
Any Python that we support will do, as long as it has numpy.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
import tomllib
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nerite.backends.interface import ModelContext
from nerite.core.errors import InvalidArgument, Unavailable

# Where environments are kept that were made here: each once, for all that want the same, across restarts.
#
# What else takes minutes to make for a model, such as converted files, is kept here, too.
#
#     <folder>/<key>/             an environment; the file ``nerite-origin`` in it is written last, and names its source
#     <folder>/<key>.lock         held by who makes it, alone; and by the processes that use it, until they end
#
# What has no origin was left by somebody who did not come to an end, and is made anew. An environment is made in the
# place where it stays, because environments know where they are.

_log = logging.getLogger("nerite.python")

SETTING: Final = "environment-directory"
"""The one of ``ModelContext.settings`` that says where the folder is."""
_ORIGIN: Final = "nerite-origin"
_LOOK_AGAIN: Final = 0.2
"""Seconds between two tries to lock what somebody else has locked."""

Make = Callable[[Path, int], None]
"""Fills a directory. The number is the descriptor of the lock: a process that inherits it goes on holding that."""


@dataclass(frozen=True)
class KeptEnvironment:
    """An environment in the folder."""

    directory: Path
    origin: str
    """Of what it was made; empty if it was not finished."""
    used: float
    """When a model that wants it was loaded for the last time, in seconds since 1970."""

    @property
    def size(self) -> int:
        """The bytes of its files. Walks through all of them."""
        files = (Path(root, name) for root, _, names in os.walk(self.directory) for name in names)
        return sum(file.lstat().st_size for file in files)


def environments_folder(setting: str = "") -> Path:
    """Return the folder: the one of the flag, or that in the user's directory of caches."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nerite" / "environments"
    return Path(setting).absolute() if setting else usual


stopped = threading.Event()
"""Set when nothing more is to be made in this process, nor waited for."""
_used: dict[Path, int] = {}
"""Environments that this process uses, and the descriptors of their locks."""


def kept_environments(place: Path, key: str, origin: Path, make: Make, what: str = "an environment") -> Path:
    """Return the directory of the environment ``key``; have ``make`` make it of ``origin`` if it is not there.

    Nobody removes it while this process lives. Waits for whoever else is making it. Raises what ``make`` raises, and
    ``InvalidArgument`` if the disk refuses.
    """
    directory = place / key
    told = False
    try:
        place.mkdir(parents=True, exist_ok=True)
        while not _is_used(directory):
            descriptor = _tried(directory, fcntl.LOCK_EX)
            if descriptor is not None:
                try:
                    if not _origin(directory):
                        _made(directory, origin, make, descriptor, what)
                finally:
                    os.close(descriptor)
                continue
            if not told:
                _log.info("waiting for %s that somebody else is making: %s", what, directory)
                told = True
            if stopped.wait(_LOOK_AGAIN):
                raise Unavailable(f"nobody waits for {what} in {directory}: the server stops")
        os.utime(directory)
    except OSError as error:
        raise InvalidArgument(
            f"cannot keep {what} made of '{origin}' in '{place}': {error.strerror or error}. Name a directory "
            "with enough room in --environment-directory."
        ) from None
    return directory


def find_environment(place: Path, key: str) -> Path | None:
    """Return the directory of the environment ``key``, if it is there."""
    return place / key if _origin(place / key) else None


def list_environments(place: Path) -> list[KeptEnvironment]:
    """Return the environments of a folder, the one that was not used for the longest time first."""
    entries = [entry for entry in place.glob("*") if entry.is_dir()]
    found = [KeptEnvironment(entry, _origin(entry), entry.stat().st_mtime) for entry in entries]
    return sorted(found, key=lambda each: each.used)


def remove_environments(environment: KeptEnvironment) -> bool:
    """Remove an environment; return False if somebody makes or uses it."""
    directory = environment.directory
    descriptor = _tried(directory, fcntl.LOCK_EX)
    if descriptor is None:
        return False
    try:
        # First of all: half an environment must not look like a whole one.
        (directory / _ORIGIN).unlink(missing_ok=True)
        shutil.rmtree(directory)
        _lock_file(directory).unlink()
    finally:
        os.close(descriptor)
    return True


def _made(directory: Path, origin: Path, make: Make, descriptor: int, what: str) -> None:
    began = time.monotonic()
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir()
        make(directory, descriptor)
        (directory / _ORIGIN).write_text(str(origin))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    _log.info("made %s of '%s' in %.1f s: %s", what, origin, time.monotonic() - began, directory)


def _origin(directory: Path) -> str:
    try:
        return (directory / _ORIGIN).read_text()
    except OSError:
        return ""


def _lock_file(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.lock")


def _is_used(directory: Path) -> bool:
    """Use an environment from now on, if it is there; return whether it is."""
    if not _origin(directory):
        # If we have used it, somebody has removed it by hand. It can be made anew when we let go of it.
        if (descriptor := _used.pop(directory, None)) is not None:
            os.close(descriptor)
        return False
    if directory in _used:
        return True
    descriptor = _tried(directory, fcntl.LOCK_SH)
    if descriptor is not None and not (_origin(directory) and _used.setdefault(directory, descriptor) == descriptor):
        os.close(descriptor)
    return directory in _used


def _tried(directory: Path, how: int) -> int | None:
    """Return the descriptor of the environment's lock, or None if somebody else has it."""
    path = _lock_file(directory)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            # Whoever had it may have removed the file, and a lock on what is gone keeps nobody out.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


# Environments that come in an archive, as conda-pack makes it.


def unpacked_archive(archive: Path, place: Path) -> Path:
    """Return the directory with the content of ``archive``; unpack it into ``place`` if that has not been done.

    Raises ``InvalidArgument`` for what is not a tar archive, and for one that would write outside its directory.
    """
    state = archive.stat()
    key = _digest(archive, state.st_size, state.st_mtime_ns)

    def make(directory: Path, lock: int) -> None:
        _extract(archive, directory)
        _unpack_prefixes(directory)

    return kept_environments(place, key, archive, make)


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


# Makes environments and installs packages into them: with uv where it is installed, else with venv and pip.


_TAIL: Final = 15
"""Lines of a tool that has failed that go into the error."""

_lock = threading.Lock()
_running: set[subprocess.Popen[str]] = set()


def stop_installer() -> None:
    """End what is being made; nothing more is made in this process. For any thread."""
    with _lock:
        stopped.set()
        for process in _running:
            process.terminate()


class Installer:
    """Fills one directory. Its methods block, and raise ``InvalidArgument`` with what a tool that failed said last."""

    def __init__(self, directory: Path, origin: Path, lock: int) -> None:
        """``origin`` is the list that the environment is made of, ``lock`` as ``environment_store.Make`` has it."""
        self.directory = directory
        self.python = directory / "bin" / "python"
        self.uv = _uv()
        self._origin = origin
        self._lock = lock

    def begin(self) -> None:
        """Make the environment, for the Python that the server runs on."""
        _log.info("making an environment of '%s' with %s", self._origin, "uv" if self.uv else "pip")
        if self.uv:
            options = ["--quiet", "--no-project", "--allow-existing", "--python", sys.executable]
            self.run([self.uv, "venv", *options, self.directory])
        else:
            self.run([sys.executable, "-m", "venv", self.directory])

    def install(self, packages: Sequence[str | Path]) -> None:
        """Install what pip would be told to."""
        if self.uv:
            self.run([self.uv, "pip", "install", "--python", self.python, *packages])
        else:
            self.install_with_pip(packages)

    def install_with_pip(self, packages: Sequence[str | Path]) -> None:
        """Install with pip even where there is uv, which does not read how pip is set up."""
        if self.uv:
            self.run([self.python, "-m", "ensurepip"])
        self.run([self.python, "-m", "pip", "--disable-pip-version-check", "install", "--no-input", *packages])

    def run(self, command: Sequence[str | Path], variables: Mapping[str, str] | None = None) -> None:
        """Run a step; ``variables`` are added to its environment."""
        run_installer(command, f"an environment of '{self._origin}'", self._origin.parent, self._lock, variables)


def run_installer(
    command: Sequence[str | Path],
    product: str,
    directory: Path,
    lock: int,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a step of what makes ``product``, in ``directory``, with what it says in the log.

    It holds the lock as well, so that it may outlive the server. Raises ``InvalidArgument`` if it fails.
    """
    # The server's own packages are none of the environment's.
    ours = ("PYTHON", "VIRTUAL_ENV")
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    with _lock:
        if stopped.is_set():
            raise Unavailable(f"{product} is not made: the server stops")
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**surroundings, **(variables or {})},
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
                _log.info("%s: %s", product, last[-1])
    finally:
        with _lock:
            _running.discard(process)
    if process.returncode:
        said = "\n".join(last) or f"exit status {process.returncode}"
        raise InvalidArgument(f"{product} cannot be made:\n{said}")


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")


# Environments that are made from a list of packages: requirements.txt, pyproject.toml or uv.lock.
#
# They are made (``installer.py``) for the Python that the server runs on. numpy, which every model needs, is
# installed with the rest.

_PROJECT: Final = "pyproject.toml"
_LOCK: Final = "uv.lock"
_NUMPY: Final = "numpy"
_FILES: Final = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)(?:\s+|=)(\S+)", re.MULTILINE)
_WHEELS: Final = re.compile(r"^\s*(?:file:)?([^\s#]+\.(?:whl|tar\.gz))\s*(?:$|[;#])", re.MULTILINE)
_HASHES: Final = "--hash="


def is_requirements(file: Path) -> bool:
    """Return whether a file is a list of packages, by its name."""
    return file.name in (_PROJECT, _LOCK) or file.suffix == ".txt"


def made_environment(file: Path, place: Path) -> Path:
    """Return the directory of the environment with what ``file`` lists; make it in ``place`` if it is not there.

    May take minutes. Raises ``InvalidArgument`` with the last words of the tool that could not do it.
    """
    file = file.absolute()  # the installer runs beside it
    return kept_environments(place, _key(file), file, lambda directory, lock: _make(file, directory, lock))


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


OLDEST = (3, 11)
"""The oldest Python that can run a model."""

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"

_REPORT = """
import json, sys
try:
    import numpy
    found = numpy.__version__
except Exception as error:
    found = ""
print(json.dumps({"python": sys.version_info[:3], "numpy": found}))
"""


def find_interpreter(context: ModelContext) -> Path | None:
    """Return the Python that a model asks for with ``EXECUTION_ENV_PATH``, or None if it does not ask.

    May have to make the environment, and starts that Python to ask what it is, so it blocks for a while. Raises
    ``InvalidArgument`` for an environment that is not there or cannot run a model: what was found, and what to do.
    """
    if not context.environment:
        return None
    environment = locate_environment(context)
    place = _place(environment, environments_folder(context.settings.get(SETTING, "")))
    interpreter = place / "bin" / "python"
    where = f"EXECUTION_ENV_PATH of model '{context.name}' is '{environment}'"
    if not interpreter.exists():
        found = ", ".join(sorted(os.listdir(place))[:8]) or "nothing"
        raise InvalidArgument(
            f"{where}, but that has no bin/python; it has: {found}. "
            "Give a virtual environment, an archive made by conda-pack, or a requirements.txt."
        )
    _check(interpreter, where)
    return interpreter


def locate_environment(context: ModelContext) -> Path:
    """Return where the environment is that a model brings. Raises ``InvalidArgument`` if it is not there."""
    environment = Path(context.environment.replace(_MODEL_DIRECTORY, str(context.directory)))
    if not environment.exists():
        raise InvalidArgument(
            f"Failed to get the canonical path for {environment}. It is the EXECUTION_ENV_PATH of model "
            f"'{context.name}', and there is no such file or directory."
        )
    return environment


def _place(environment: Path, folder: Path) -> Path:
    """Return the directory of an environment, which may be in ``folder`` then."""
    if environment.is_dir():
        return environment
    if is_requirements(environment):
        return made_environment(environment, folder)
    return unpacked_archive(environment, folder)


@functools.lru_cache(maxsize=64)
def _check(interpreter: Path, where: str) -> None:
    """Raise ``InvalidArgument`` if ``interpreter`` does not start, is too old or has no numpy.

    Starting it takes a while, and every instance of a model asks, so it is remembered that one is good.
    """
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    try:
        answer = subprocess.run(
            [interpreter, "-c", _REPORT], env=surroundings, capture_output=True, text=True, timeout=60, check=True
        )
        report = json.loads(answer.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise InvalidArgument(f"{where}, but its Python does not run: {last}") from None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise InvalidArgument(f"{where}, but its Python does not run: {error}") from None
    version = tuple(report["python"])
    if version < OLDEST:
        raise InvalidArgument(
            f"{where}, but its Python is {'.'.join(map(str, version))}. "
            f"Build it with Python {'.'.join(map(str, OLDEST))} or newer, and numpy."
        )
    if not report["numpy"]:
        raise InvalidArgument(f"{where}, but it has no numpy. Install it there: {interpreter} -m pip install numpy")
