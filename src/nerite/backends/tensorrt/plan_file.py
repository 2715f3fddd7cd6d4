"""The file of an engine: whether it is one, and which TensorRT made it. Pure, but for a look at the file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from nerite.backends.interface import ModelContext
from nerite.core.errors import InvalidArgument, Unavailable

_MARK: Final = b"ftrt"
"""At the beginning of every plan."""
_HEADER: Final = 28
_KNOWN_FORM: Final = b"\0\0\0\0"
"""After the mark: the one form in which the last four bytes of the header are known to be the version."""


def find(context: ModelContext) -> Path:
    """Return the plan of a model. Raises ``Unavailable`` where it is missing, ``InvalidArgument`` if it is no plan."""
    path = context.version_directory / (context.config.get("default_model_filename") or "model.plan")
    if not path.is_file():
        raise Unavailable(f"unable to find '{path}' for model instance '{context.name}'")
    if not _head(path).startswith(_MARK):
        raise InvalidArgument(
            f"unable to load model '{context.name}': '{path}' is no TensorRT engine. Make one: "
            "trtexec --onnx=model.onnx --saveEngine=model.plan"
        )
    return path


def version(path: Path) -> str:
    """Return the version of the TensorRT that made a plan; empty where its header has a form that we do not know."""
    head = _head(path)
    if len(head) < _HEADER or head[4:8] != _KNOWN_FORM:
        return ""
    return ".".join(map(str, head[24:28]))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEADER)
