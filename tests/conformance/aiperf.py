"""NVIDIA's client for benchmarks of language models, installed on first use in an environment of its own.

It is kept in ``~/.cache/nerite-aiperf`` or in ``$NERITE_AIPERF_HOME``, in one folder for each Python version. What it
needs for plots, data sets and searches is left out: 500 MB instead of 840.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = "aiperf==0.13.0"
LEFT_OUT = (
    "alembic", "dash", "dash-bootstrap-components", "datasets", "kaleido", "matplotlib", "optuna", "plotly", "pyarrow",
    "seaborn", "sqlalchemy",
)  # fmt: skip


class AiperfUnavailable(Exception):
    """It cannot be had here, and why."""


def program() -> Path:
    """Return the program; install it first where it is not. Raises ``AiperfUnavailable``."""
    home = Path(os.environ.get("NERITE_AIPERF_HOME") or Path.home() / ".cache" / "nerite-aiperf")
    venv = home / f"python{sys.version_info.major}.{sys.version_info.minor}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / f"{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        if not (venv / "ready").exists():
            _install(venv)
    return venv / "bin" / "aiperf"


def _install(venv: Path) -> None:
    shutil.rmtree(venv, ignore_errors=True)
    uv = Path(sys.executable).with_name("uv")
    overrides = venv.with_suffix(".overrides")
    overrides.write_text("".join(f"{name}; python_version < '3'\n" for name in LEFT_OUT))
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, venv],
        [uv, "pip", "install", "--quiet", "--python", venv / "bin" / "python", "--overrides", overrides, PACKAGE],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AiperfUnavailable(f"{PACKAGE} could not be installed: {error}") from error
        if done.returncode:
            raise AiperfUnavailable(f"{PACKAGE} could not be installed: {done.stderr[-500:]}")
    (venv / "ready").touch()
