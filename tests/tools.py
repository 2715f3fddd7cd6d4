"""Programs that some tests drive. Where one is missing the test is skipped; in CI, where all are there, it fails."""

from __future__ import annotations

import os
import shutil

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
