"""Files that take long to make, and that tests make once and keep from one run to the next."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def kept(config: pytest.Config, name: str, ingredients: str, make: Callable[[Path], None]) -> Path:
    """Return the folder that ``make`` has made, in pytest's cache; made by the first call with these ``ingredients``.

    ``ingredients``: all that the content depends on, such as programs and versions. ``make`` is given a path where
    nothing is.
    """
    assert config.cache is not None
    cache = config.cache.mkdir(name)
    key = hashlib.sha256(ingredients.encode()).hexdigest()[:12]
    folder = cache / key
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        if not folder.exists():
            unfinished = cache / f"{key}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(folder)
    return folder
