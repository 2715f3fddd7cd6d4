"""The environment that the exam runs in on a machine without a network: what the machine has, and a kit beside it.

Imports the standard library alone, as the machine's Python is all that there is when it starts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import site
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
EXTRAS = ("gpu", "pytriton")
"""Extras of Nerite in the kit: what reads the cards, and NVIDIA's client."""
_COMMAND = """\
#!{python}
import sys

from nerite.cli.main import main

sys.exit(main())
"""


class Kit(NamedTuple):
    """A folder that ``make gpu-kit`` has filled."""

    folder: Path

    @property
    def wheels(self) -> Path:
        """Packages of Python."""
        return self.folder / "wheels"

    @property
    def programs(self) -> Path:
        """Folder for the path: load generators."""
        return self.folder / "programs" / "bin"

    @property
    def certificate(self) -> Path:
        """A certificate of this host, with its key."""
        return self.folder / "localhost.pem"

    @property
    def description(self) -> Path:
        """The commit it was made at, and the digest of the sources then."""
        return self.folder / "kit.json"


def requirements() -> list[str]:
    """Return what Nerite and ``EXTRAS`` require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]


def without_pip_settings() -> dict[str, str]:
    """Return the environment of this process, without what says where pip is to look for packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def created(kit: Kit, folder: Path, more_wheels: Iterable[Path] = (), *, isolated: bool = False) -> Path:
    """Make a virtual environment from the kit alone; return its Python. Raises ``RuntimeError`` with what pip says.

    Packages of this Python are seen, and taken where their version will do, unless it is ``isolated``.
    """
    options = [] if isolated else ["--system-site-packages"]
    pip = importlib.util.find_spec("pip") is not None
    _run([sys.executable, "-m", "venv", *options, *(["--without-pip"] if pip else []), str(folder)])
    python = folder / "bin" / "python"
    if not isolated and sys.prefix != sys.base_prefix:
        # This Python is one of a virtual environment itself, of which the new one would see nothing.
        lines = [f"import site; site.addsitedir({place!r})" for place in site.getsitepackages()]
        purelib = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
        Path(purelib, "machine.pth").write_text("\n".join(lines) + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python)] if pip else [str(python), "-m", "pip"]
    places = [f"--find-links={place}" for place in (kit.wheels, *more_wheels)]
    _run([*install, "--quiet", "install", "--no-compile", "--no-index", *places, *requirements()])
    command = folder / "bin" / "nerite"
    command.write_text(_COMMAND.format(python=python))
    command.chmod(0o755)
    return python


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=without_pip_settings(), check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def write_certificate(file: Path) -> None:
    """Write a certificate of this host, and its key. Raises ``RuntimeError`` with what openssl says."""
    options = ["-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "3650"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    _run(["openssl", "req", "-x509", *options, *names, "-keyout", str(file), "-out", f"{file}.cert"])
    certificate = Path(f"{file}.cert")
    with file.open("a") as both:
        both.write(certificate.read_text())
    certificate.unlink()


def revision(kit: Kit | None = None) -> str:
    """Return the commit that is measured, and the digest of its sources. A commit that is not known is left out.

    A copy without its history is at the commit of the kit, if its sources are those of the kit.
    """
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCE)}\0".encode() + path.read_bytes())
    sources = f"sources {digest.hexdigest()[:12]}"
    try:
        commit = _git("rev-parse", "HEAD")
        changed = "-changed" if _git("status", "--porcelain", "--untracked-files=no") else ""
        return f"{commit[:12]}{changed}, {sources}"
    except (OSError, subprocess.CalledProcessError):
        described = json.loads(kit.description.read_text())["revision"] if kit is not None else ""
        return described if described.endswith(sources) else sources


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
