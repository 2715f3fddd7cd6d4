"""The directory of the model that is asking.

One process may run several models, so the caller's code tells which it is: the innermost caller whose file lies in the
directory of a model that is open. The code of a backend lies in none, so it has to be alone in its process, as it is in
a worker.
"""

from __future__ import annotations

import sys
from pathlib import Path

from triton_python_backend_utils.errors import TritonModelException

_open: list[tuple[str, str]] = []


def opened(model: Path, version: Path) -> None:
    """Note that the model in directory ``model`` runs here, with its artifacts in ``version``. For who runs models."""
    _open.append((str(model), str(version)))


def closed(model: Path, version: Path) -> None:
    """Take back ``opened``."""
    _open.remove((str(model), str(version)))


def get_model_dir() -> str:
    """Return the directory of the running model's version: where its artifacts are.

    Raises ``TritonModelException`` if no model runs, or if several do and none of them is calling.
    """
    versions = {version for _, version in _open}
    if len(versions) == 1:
        return versions.pop()
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        # A version's own files before those that the versions of a model share, and the latest to open first.
        for place in (1, 0):
            for entry in reversed(_open):
                if file.startswith(f"{entry[place]}/"):
                    return entry[1]
        frame = frame.f_back  # type: ignore[assignment]  # ends with None
    message = "get_model_dir() can only be called by a model that is being served."
    if versions:
        message += " Several are in this process: take model_repository and model_version of initialize's arguments."
    raise TritonModelException(message)
