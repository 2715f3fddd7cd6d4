"""Python environments of models, configured with ``EXECUTION_ENV_PATH``.

An environment is given as a directory, an archive made by conda-pack, or a list of packages. An archive is unpacked
once, and a list is installed once, for all models and server starts that use the same one. Any supported Python will
do, provided that it has numpy.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nerite.backends.interface import ModelContext
from nerite.backends.python.archives import unpack_archive
from nerite.core.errors import InvalidArgument, Unavailable

# Store of environments made by the server: each is made once, shared, and kept across restarts. Other artifacts that
# take minutes to make for a model, such as converted files, are stored in the same way.
#
#     <folder>/<key>/        an environment; the file ``nerite-origin`` in it is written last and names its source
#     <folder>/<key>.lock    locked exclusively while it is made, and shared by processes that use it until they end
#
# A directory without ``nerite-origin`` was left by an interrupted process and is made again. Environments contain their
# own path, so they are made in their final place.

_log = logging.getLogger("nerite.python")

SETTING: Final = "environment-directory"
"""Key of the folder in ``ModelContext.settings``."""
_ORIGIN: Final = "nerite-origin"
LOCK_RETRY: Final = 0.2
"""Seconds between two attempts to take a lock that another process holds."""

PROGRESS_INTERVAL: Final = 1.0
"""Seconds between two reports of how far a tool is."""
_REPORTS_PER_LINE: Final = 30
"""Number of reports for each line in the log."""

Make = Callable[[Path, int], None]
"""Fills a directory. The integer is the descriptor of the lock, which a child process that inherits it also holds."""


@dataclass(frozen=True)
class KeptEnvironment:
    """An environment in the store."""

    directory: Path
    origin: str
    """The source that it was made from; empty if it is incomplete."""
    used: float
    """When a model that uses it was last loaded, in seconds since the epoch."""

    @property
    def size(self) -> int:
        """Total size of its files in bytes. Slow: walks the whole directory."""
        files = (Path(root, name) for root, _, names in os.walk(self.directory) for name in names)
        return sum(file.lstat().st_size for file in files)


def environments_folder(setting: str = "") -> Path:
    """Return the folder of the store: the flag's, or the default one in the user's cache directory."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nerite" / "environments"
    return Path(setting).absolute() if setting else usual


_progress: ContextVar[Callable[[str], None] | None] = ContextVar("progress", default=None)


@contextmanager
def progress_reported(report: Callable[[str], None]) -> Iterator[None]:
    """Tell ``report`` what is made in this context, and the output of the tools that make it."""
    before = _progress.set(report)
    try:
        yield
    finally:
        _progress.reset(before)


def _report_progress(text: str) -> None:
    report = _progress.get()
    if report is not None:
        report(text)


stopped = threading.Event()
"""Set when the server stops: nothing more is made in this process, and waits end."""
used_environments: dict[Path, int] = {}
"""Environments that this process uses, with the descriptors of their locks."""


def kept_environments(place: Path, key: str, origin: Path, make: Make, what: str = "an environment") -> Path:
    """Return the directory of the environment ``key``; let ``make`` create it from ``origin`` if it does not exist.

    It is protected from removal until this process ends. Waits if another process is making it. Raises what ``make``
    raises, and ``InvalidArgument`` for errors of the disk.
    """
    directory = place / key
    if _origin(directory) and not os.access(place, os.W_OK):
        return directory  # read-only, as in a container image: it cannot be removed meanwhile
    logged = False
    try:
        place.mkdir(parents=True, exist_ok=True)
        while not _is_used(directory):
            descriptor = _try_lock(directory, fcntl.LOCK_EX)
            if descriptor is not None:
                try:
                    if not _origin(directory):
                        _create(directory, origin, make, descriptor, what)
                finally:
                    os.close(descriptor)
                continue
            if not logged:
                _log.info("waiting for %s that another process is making: %s", what, directory)
                _report_progress(f"waiting for {what} that another process is making: {directory}")
                logged = True
            if stopped.wait(LOCK_RETRY):
                raise Unavailable(f"waiting for {what} in {directory} was cancelled: the server is stopping")
        os.utime(directory)
    except OSError as error:
        raise InvalidArgument(
            f"cannot store {what} made from '{origin}' in '{place}': {error.strerror or error}. Set "
            "--environment-directory to a directory with enough space."
        ) from None
    return directory


def find_environment(place: Path, key: str) -> Path | None:
    """Return the directory of the environment ``key``, or None if it does not exist or is incomplete."""
    return place / key if _origin(place / key) else None


def list_environments(place: Path) -> list[KeptEnvironment]:
    """Return the environments in a folder, least recently used first."""
    entries = [entry for entry in place.glob("*") if entry.is_dir()]
    found = [KeptEnvironment(entry, _origin(entry), entry.stat().st_mtime) for entry in entries]
    return sorted(found, key=lambda each: each.used)


def remove_environments(environment: KeptEnvironment) -> bool:
    """Remove an environment; return False if a process is making or using it."""
    directory = environment.directory
    descriptor = _try_lock(directory, fcntl.LOCK_EX)
    if descriptor is None:
        return False
    try:
        # First, so that a partially removed environment does not look complete.
        (directory / _ORIGIN).unlink(missing_ok=True)
        shutil.rmtree(directory)
        _lock_file(directory).unlink()
    finally:
        os.close(descriptor)
    return True


def _create(directory: Path, origin: Path, make: Make, descriptor: int, what: str) -> None:
    began = time.monotonic()
    _report_progress(f"making {what} from '{origin}'")
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir()
        make(directory, descriptor)
        (directory / _ORIGIN).write_text(str(origin))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    _log.info("made %s from '%s' in %.1f s: %s", what, origin, time.monotonic() - began, directory)


def _origin(directory: Path) -> str:
    try:
        return (directory / _ORIGIN).read_text()
    except OSError:
        return ""


def _lock_file(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.lock")


def _is_used(directory: Path) -> bool:
    """Take a shared lock on an environment if it is complete; return whether this process uses it."""
    if not _origin(directory):
        # If this process has used it, it was removed by hand. Releasing the lock lets it be made again.
        if (descriptor := used_environments.pop(directory, None)) is not None:
            os.close(descriptor)
        return False
    if directory in used_environments:
        return True
    descriptor = _try_lock(directory, fcntl.LOCK_SH)
    if descriptor is not None and not (
        _origin(directory) and used_environments.setdefault(directory, descriptor) == descriptor
    ):
        os.close(descriptor)
    return directory in used_environments


def _try_lock(directory: Path, how: int) -> int | None:
    """Lock the environment's lock file without waiting; return its descriptor, or None if another process holds it."""
    path = _lock_file(directory)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            # The previous holder may have removed the file, and a lock on a removed file excludes no one.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


# Environments in archives made by conda-pack.


def unpacked_archive(archive: Path, place: Path) -> Path:
    """Return the directory with the content of ``archive``, unpacking it into the store ``place`` if necessary.

    Raises ``InvalidArgument`` if it is not a tar archive, or would write outside its directory.
    """
    state = archive.stat()
    key = _digest(archive, state.st_size, state.st_mtime_ns)

    def make(directory: Path, lock: int) -> None:
        unpack_archive(archive, directory)
        script = directory / "bin" / "conda-unpack"
        if script.exists():  # it adjusts the environment to its new path
            run_installer(
                [directory / "bin" / "python", script], f"an environment of '{archive}'", archive.parent, lock
            )

    return kept_environments(place, key, archive, make)


@functools.lru_cache(maxsize=64)
def _digest(archive: Path, size: int, modified_ns: int) -> str:
    """Return the digest of the content; size and time are part of the cache key, to notice that the file changed."""
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Creating environments and installing packages into them: with uv if it is installed, else with venv and pip.


_TAIL: Final = 15
"""Number of last output lines of a failed tool that go into the error."""

_lock = threading.Lock()
_running: set[subprocess.Popen[str]] = set()


def permit_installers() -> None:
    """Let this process make environments, also if a server that ran in it has stopped."""
    stopped.clear()


def stop_installer() -> None:
    """Terminate running installers and prevent new ones in this process. Thread-safe."""
    with _lock:
        stopped.set()
        for process in _running:
            process.terminate()


class Installer:
    """Creates one environment. Its methods block, and raise ``InvalidArgument`` with the output of a failed tool."""

    def __init__(self, directory: Path, origin: Path, lock: int) -> None:
        """``origin`` is the environment's list of packages, ``lock`` the descriptor that ``Make`` gets."""
        self.directory = directory
        self.python = directory / "bin" / "python"
        self.uv = find_uv()
        self._origin = origin
        self._lock = lock

    def begin(self) -> None:
        """Create the empty environment, with the Python that the server runs on."""
        _log.info("making an environment from '%s' with %s", self._origin, "uv" if self.uv else "pip")
        if self.uv:
            options = ["--quiet", "--no-project", "--allow-existing", "--python", sys.executable]
            self.run([self.uv, "venv", *options, self.directory])
        else:
            self.run([sys.executable, "-m", "venv", self.directory])

    def install(self, packages: Sequence[str | Path]) -> None:
        """Install packages, given as arguments of ``pip install``."""
        if self.uv:
            self.run([self.uv, "pip", "install", "--python", self.python, *packages])
        else:
            self.install_with_pip(packages)

    def install_with_pip(self, packages: Sequence[str | Path]) -> None:
        """Install with pip even if uv is available, because uv does not read pip's configuration."""
        if self.uv:
            self.run([self.python, "-m", "ensurepip"])
        self.run([self.python, "-m", "pip", "--disable-pip-version-check", "install", "--no-input", *packages])

    def run(
        self, command: Sequence[str | Path], variables: Mapping[str, str] | None = None, *, quiet: bool = False
    ) -> None:
        """Run a tool; ``variables`` are added to its environment variables. ``quiet``: its output is not logged."""
        product = f"an environment of '{self._origin}'"
        run_installer(command, product, self._origin.parent, self._lock, variables, quiet=quiet)


def run_installer(
    command: Sequence[str | Path],
    product: str,
    directory: Path,
    lock: int,
    variables: Mapping[str, str] | None = None,
    *,
    quiet: bool = False,
) -> None:
    """Run a tool that makes ``product``, in ``directory``; log its output unless ``quiet``, and report progress.

    The process inherits the lock, so that it may outlive the server. Raises ``InvalidArgument`` if it fails.
    """
    # Keep the server's own packages out of the environment.
    ours = ("PYTHON", "VIRTUAL_ENV")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    with _lock:
        if stopped.is_set():
            raise Unavailable(f"{product} is not made: the server is stopping")
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**inherited, **(variables or {})},
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
        with process, _time_reported(product, last, quiet=quiet):
            for line in process.stdout or ():
                last.append(line.rstrip())
                if not quiet:
                    _log.info("%s: %s", product, last[-1])
    finally:
        with _lock:
            _running.discard(process)
    if process.returncode:
        output = "\n".join(last) or f"exit status {process.returncode}"
        raise InvalidArgument(f"{product} cannot be made:\n{output}")


@contextmanager
def _time_reported(product: str, last: Sequence[str], *, quiet: bool) -> Iterator[None]:
    """Report each second for how long a tool has been at work, with the last line of its output; log it more rarely."""
    report = _progress.get()
    ended = threading.Event()
    began = time.monotonic()

    def run() -> None:
        for count in itertools.count(1):
            if ended.wait(PROGRESS_INTERVAL):
                return
            done = f"making {product}, {time.monotonic() - began:.0f} s so far"
            if report is not None:
                report(f"{done}: {last[-1]}" if last and not quiet else done)
            if not count % _REPORTS_PER_LINE:
                _log.info("%s", done)

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def find_uv() -> str | None:
    """Return the program ``uv``: beside this Python, or on the path; None if there is none."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")


# Environments from a list of packages: requirements.txt, pyproject.toml or uv.lock.
#
# They use the Python that the server runs on. numpy, which every model needs, is installed in addition.

_PROJECT: Final = "pyproject.toml"
_LOCK: Final = "uv.lock"
_NUMPY: Final = "numpy"
_FILES: Final = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)(?:\s+|=)(\S+)", re.MULTILINE)
_WHEELS: Final = re.compile(r"^\s*(?:file:)?([^\s#]+\.(?:whl|tar\.gz))\s*(?:$|[;#])", re.MULTILINE)
_HASHES: Final = "--hash="


def is_requirements(file: Path) -> bool:
    """Return whether a file is a list of packages, judging by its name."""
    return file.name in (_PROJECT, _LOCK) or file.suffix == ".txt"


def made_environment(file: Path, place: Path) -> Path:
    """Return the directory of the environment with the packages in ``file``, creating it in ``place`` if necessary.

    May take minutes. Raises ``InvalidArgument`` with the last output of the tool that failed.
    """
    file = file.absolute()  # the installer runs in its directory
    return kept_environments(place, _key(file), file, lambda directory, lock: _make(file, directory, lock))


def _make(file: Path, directory: Path, lock: int) -> None:
    installer = Installer(directory, file, lock)
    packages = _packages(file, directory, installer)
    installer.begin()
    installer.install(packages)


def _packages(file: Path, directory: Path, installer: Installer) -> list[str | Path]:
    """Return the packages and options for the installer."""
    if file.name == _LOCK:
        if installer.uv is None:
            raise InvalidArgument(f"'{file}' can only be read by uv. Install it for the server: pip install uv")
        listed = directory / "requirements.txt"
        options = ["--quiet", "--frozen", "--no-dev", "--no-emit-project", "--project", str(file.parent)]
        installer.run([installer.uv, "export", *options, "--output-file", listed])
        # Unlike pip, uv accepts hashes for only some of the packages.
        return ["-r", listed, _NUMPY]
    if file.name == _PROJECT:
        try:
            dependencies: list[str] = tomllib.loads(file.read_text())["project"].get("dependencies", [])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"'{file}' has no list of packages at 'dependencies' of [project]: {error}") from None
        return [*dependencies, _NUMPY]
    # If one package has a hash, pip requires hashes for all.
    hashes = any(_HASHES in text for _, text in _texts(file))
    return ["-r", file, *([] if hashes else [_NUMPY])]


def _key(file: Path) -> str:
    """Return the key of the environment, derived from the lists, the local wheels that they name, and the Python."""
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
    """Return an identifier of the server's Python, for which environments are made."""
    return repr([sys.version, os.path.realpath(sys.executable), sysconfig.get_platform()]).encode()


def _texts(file: Path, seen: frozenset[Path] = frozenset()) -> Iterator[tuple[Path, str]]:
    """Yield a list and the lists that it includes. Missing files are left to the installer to report."""
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
    """Return the Python interpreter of a model's ``EXECUTION_ENV_PATH``, or None if it has none.

    Blocks: may have to create the environment, and starts the interpreter to check it. Raises ``InvalidArgument``,
    with the remedy, if the environment does not exist or cannot run a model.
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
    """Return the path in a model's ``EXECUTION_ENV_PATH``. Raises ``InvalidArgument`` if it does not exist."""
    environment = Path(context.environment.replace(_MODEL_DIRECTORY, str(context.directory)))
    if not environment.exists():
        raise InvalidArgument(
            f"Failed to get the canonical path for {environment}. It is the EXECUTION_ENV_PATH of model "
            f"'{context.name}', and there is no such file or directory."
        )
    return environment


def _place(environment: Path, folder: Path) -> Path:
    """Return the directory of an environment, in the store ``folder`` unless it is a directory itself."""
    if environment.is_dir():
        return environment
    if is_requirements(environment):
        return made_environment(environment, folder)
    return unpacked_archive(environment, folder)


@functools.lru_cache(maxsize=64)
def _check(interpreter: Path, where: str) -> None:
    """Raise ``InvalidArgument`` if ``interpreter`` does not start, is too old or has no numpy.

    Memoized, because starting it is slow and every instance of a model calls this.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    try:
        answer = subprocess.run(
            [interpreter, "-c", _REPORT], env=inherited, capture_output=True, text=True, timeout=60, check=True
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
