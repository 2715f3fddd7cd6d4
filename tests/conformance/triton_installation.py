"""NVIDIA's own server, installed on first use: the reference that the exam compares with.

The binary comes with the package nvidia-pytriton (about 400 MB with what it needs). It is kept in
``~/.cache/nerite-triton`` or in ``$NERITE_TRITON_HOME``, in one folder for each Python version.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGE = "nvidia-pytriton==0.7.0"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class TritonUnavailable(Exception):
    """Triton cannot run here, and why."""


def installation() -> Path:
    """Return the folder of the virtual environment that Triton is in, and make it first where there is none.

    Raises ``TritonUnavailable``.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise TritonUnavailable("its binary is for Linux on x86-64")
    home = Path(os.environ.get("NERITE_TRITON_HOME") or Path.home() / ".cache" / "nerite-triton")
    venv = home / f"python{PYTHON}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / f"{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        if not (venv / "ready").exists():
            install(venv)
    if not stub(venv).exists():
        raise TritonUnavailable(f"it has no Python backend for Python {PYTHON}")
    return venv


def install(venv: Path) -> None:
    shutil.rmtree(venv, ignore_errors=True)
    commands = (
        [sys.executable, "-m", "venv", str(venv)],
        [str(venv / "bin" / "pip"), "--quiet", "--disable-pip-version-check", "install", PACKAGE],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise TritonUnavailable(f"{' '.join(command)} failed: {done.stderr[-500:]}")
    (venv / "ready").touch()


def site(venv: Path) -> Path:
    return venv / "lib" / f"python{PYTHON}" / "site-packages"


def stub(venv: Path) -> Path:
    """The process that runs Python models: it is linked to one version of Python."""
    folder = site(venv) / "pytriton" / "tritonserver" / "python_backend_stubs" / PYTHON
    return folder / "triton_python_backend_stub"


def command(venv: Path, backends: Path) -> tuple[list[str], dict[str, str]]:
    """Return how to start Triton: the head of its command line, and its environment.

    Makes the Python backend in the folder ``backends``: the shared library and the stub have to lie together.
    """
    root = site(venv) / "pytriton" / "tritonserver"
    python = backends / "python"
    python.mkdir(parents=True)
    for source in (*(root / "backends" / "python").glob("*.py"), *(root / "backends" / "python").glob("*.so")):
        shutil.copy(source, python)
    shutil.copy(stub(venv), python)
    libraries = [sysconfig.get_config_var("LIBDIR"), str(site(venv) / "nvidia_pytriton.libs")]
    environment = {
        **os.environ,
        "PATH": f"{venv / 'bin'}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(site(venv)),
        "LD_LIBRARY_PATH": ":".join(libraries),
    }
    head = [str(root / "bin" / "tritonserver"), f"--backend-directory={backends}"]
    return [*head, f"--cache-directory={root / 'caches'}"], environment
