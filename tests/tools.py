"""Programs that some tests drive. Where one is missing the test is skipped; in CI, where all are there, it fails."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest


def require(*names: str) -> None:
    """Skip the test, or fail it in CI, unless each program is on the path."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        unavailable(f"{', '.join(missing)} is not installed")


def unavailable(reason: str) -> None:
    """Skip the test for ``reason``; in CI fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def install_node_packages(folder: Path) -> None:
    """Install what the package.json in a folder asks for, once. Skip the test, or fail it in CI, if that fails."""
    require("node", "npm")
    with (folder / "package.json").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        wanted = json.load(lock)["dependencies"]
        if not all((folder / "node_modules" / name).exists() for name in wanted):
            command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
            installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False)
            if installed.returncode:
                unavailable(f"npm install failed: {installed.stderr[-500:]}")
