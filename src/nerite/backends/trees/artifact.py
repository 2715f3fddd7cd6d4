"""The file of a model: where it is, and in which format. What it holds decides, before what it is called."""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Final, NamedTuple

from nerite.backends.interface import ModelContext
from nerite.core.errors import InvalidArgument, Unavailable, Unsupported

MODEL_TYPES: Final[dict[str, str]] = {
    "xgboost_ubj": "xgboost.ubj",
    "xgboost_json": "xgboost.json",
    "xgboost": "xgboost.model",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
"""Triton's names of the formats, and the file name of each."""

_XGBOOST: Final = frozenset({"xgboost_ubj", "xgboost_json", "xgboost"})
_HEAD_BYTES: Final = 64
_CHECKPOINT_MAJOR: Final = range(2, 10)
_CONVERT: Final = (
    "A pickle can hold any program, and is not read. Convert it where the model was trained: "
    "treelite.sklearn.import_model(model).serialize('checkpoint.tl')"
)


class Artifact(NamedTuple):
    """A model file, and the format of what is in it."""

    path: Path
    modified_ns: int
    """So that a forest of an older file is not taken for this one."""
    model_type: str

    @property
    def of_xgboost(self) -> bool:
        """Whether XGBoost wrote it."""
        return self.model_type in _XGBOOST

    def check_same(self, name: str) -> None:
        """Raise ``Unavailable`` if the file is another one by now."""
        if not self.path.is_file() or self.path.stat().st_mtime_ns != self.modified_ns:
            raise Unavailable(f"'{self.path}' has changed since model '{name}' was loaded: load the model again")


def find(context: ModelContext, model_type: str) -> Artifact:
    """Return the file of a model. ``model_type`` is what its configuration says, or empty.

    Raises ``Unavailable`` if there is none, ``Unsupported`` for a pickle and ``InvalidArgument`` where the file is of
    another format than the configuration says, or incomplete.
    """
    path = _path(context, model_type)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    found = _format(head) or model_type
    where = f"unable to load model '{context.name}': '{path}'"
    if found == "pickle":
        raise Unsupported(f"{where} is a pickle. {_CONVERT}")
    if not found:
        raise InvalidArgument(
            f"{where} is in no format that is recognised. Set parameter 'model_type': {', '.join(MODEL_TYPES)}"
        )
    if model_type and found != model_type and not {found, model_type} <= _XGBOOST:
        raise InvalidArgument(f"{where} is of model_type '{found}', the configuration says '{model_type}'")
    if found == "lightgbm":
        _check_complete(path, where)
    return Artifact(path, path.stat().st_mtime_ns, found)


def _path(context: ModelContext, model_type: str) -> Path:
    named = context.config.get("default_model_filename")
    names = [named] if named else [MODEL_TYPES[model_type]] if model_type else list(MODEL_TYPES.values())
    directory = context.version_directory
    for name in names:
        path = directory / name
        if path.is_file():
            return path
    text = f"unable to find '{directory / names[0]}' for model '{context.name}'"
    if len(names) > 1:
        text += f", nor any of {', '.join(names[1:])}"
    there = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    if there:
        text += f". There is: {', '.join(there[:5])}. Rename it, or set default_model_filename"
        if any(name.endswith((".pkl", ".pickle", ".joblib")) for name in there):
            text += f". {_CONVERT}"
    raise Unavailable(text)


def _format(head: bytes) -> str:
    """Return the format of a file that begins like this, or an empty string."""
    if re.match(rb"\{\s*[\"}]", head):
        return "xgboost_json"
    if head[:1] == b"{":
        return "xgboost_ubj"
    if re.match(rb"\s*tree\s*\n", head):
        return "lightgbm"
    if head[:4] == b"binf":
        return "xgboost"
    if len(head) > 1 and head[0] == 0x80 and head[1] <= 5:
        return "pickle"
    if len(head) >= 12:
        major, minor, patch = struct.unpack_from("<3i", head)
        if major in _CHECKPOINT_MAJOR and 0 <= minor < 1000 and 0 <= patch < 1000:
            return "treelite_checkpoint"
    return ""


def _check_complete(path: Path, where: str) -> None:
    """Raise if the end of a LightGBM file is missing: it would be read as a model of fewer trees."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        if re.search(rb"^version=v[3-9]", text[:_HEAD_BYTES], re.MULTILINE) and text.rfind(b"\nend of trees") < 0:
            raise InvalidArgument(f"{where} is cut off: the line 'end of trees' is missing. Copy the file again")
