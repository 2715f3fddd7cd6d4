"""A model archive as SageMaker unpacks it: which folder of it is the repository, and which the model.

There are two shapes: a folder that is the model, with its configuration in it; or a folder of models, one of which is
meant: the only one, or the ensemble that the others are parts of.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from nerite.core.errors import InvalidArgument

_SHUT: Final = ("/dev/", "/proc/", "/sys/")
_ENSEMBLE: Final = re.compile(r'platform\s*:\s*"ensemble"')


class Archive(NamedTuple):
    """Where a model is."""

    repository: Path
    directory: str
    """The model's, in the repository; empty if there is none."""


def find(url: str) -> Archive:
    """Return where the model of an unpacked archive is. Raises ``InvalidArgument``."""
    root = Path(os.path.abspath(url)) if url else Path()
    if f"{root}/".startswith(_SHUT):
        raise InvalidArgument(
            f'Invalid URL: {url}. "url" property value cannot start with {", ".join(_SHUT[:-1])}, or {_SHUT[-1]}.'
        )
    # Not ``Path.is_dir``, which raises an error for a name that no file can have.
    if not url or not os.path.isdir(root):
        raise InvalidArgument(f"failed to register '{url}', repository not found")
    if (root / "config.pbtxt").is_file():
        return Archive(root.parent, root.name)
    models = sorted(child.name for child in root.iterdir() if child.is_dir() and not child.name.startswith("."))
    ensembles = [name for name in models if _is_ensemble(root / name / "config.pbtxt")]
    candidates = ensembles or models
    if len(candidates) > 1:
        raise InvalidArgument(
            f"'{root}' has {len(candidates)} models, and nothing says which one is meant: {', '.join(candidates)}. "
            "Put one model into an archive, or an ensemble and its parts."
        )
    return Archive(root, candidates[0] if candidates else "")


def _is_ensemble(config: Path) -> bool:
    return config.is_file() and _ENSEMBLE.search(config.read_text(errors="replace")) is not None
