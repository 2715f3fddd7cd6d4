"""Finds the file of a tree model, and has treelite read and describe it, whatever engine computes it."""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import re
import struct
import threading
from ctypes import POINTER, byref, c_char_p, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.backends.interface import ModelContext
from nerite.core.errors import InvalidArgument, NotInstalled, Unavailable, Unsupported
from nerite.core.tensor import Array
from nerite.frameworks.trees import native
from nerite.frameworks.trees.native import Function, Library, MissingLibrary, NativeError

MODEL_TYPES: Final[dict[str, str]] = {
    "xgboost_ubj": "xgboost.ubj",
    "xgboost_json": "xgboost.json",
    "xgboost": "xgboost.model",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
"""Triton's names of the formats, and the default file name of each."""

_XGBOOST: Final = frozenset({"xgboost_ubj", "xgboost_json", "xgboost"})
_HEAD_BYTES: Final = 64
_CHECKPOINT_MAJOR: Final = range(2, 10)
_CONVERT: Final = (
    "A pickle can hold any program, and is not read. Convert it where the model was trained: "
    "treelite.sklearn.import_model(model).serialize('checkpoint.tl')"
)


class ForestArtifact(NamedTuple):
    """A model file, and the format of its content."""

    path: Path
    modified_ns: int
    """Distinguishes the file from an older one of the same name."""
    model_type: str

    @property
    def of_xgboost(self) -> bool:
        """Whether XGBoost wrote it."""
        return self.model_type in _XGBOOST

    def check_same(self, name: str) -> None:
        """Raise ``Unavailable`` if the file was replaced."""
        if not self.path.is_file() or self.path.stat().st_mtime_ns != self.modified_ns:
            raise Unavailable(f"'{self.path}' has changed since model '{name}' was loaded: load the model again")


def find_forest(context: ModelContext, model_type: str) -> ForestArtifact:
    """Return the file of a model. ``model_type`` is the parameter of the configuration, or empty.

    Raises ``Unavailable`` if there is none, ``Unsupported`` for a pickle, and ``InvalidArgument`` if the file has
    another format than the configuration declares, or is incomplete.
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
    return ForestArtifact(path, path.stat().st_mtime_ns, found)


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
    """Return the format of a file that begins with ``head``, or an empty string."""
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


_log = logging.getLogger("nerite.frameworks.trees")

_LOADERS: Final = {
    "xgboost_ubj": "TreeliteLoadXGBoostModelUBJSON",
    "xgboost_json": "TreeliteLoadXGBoostModelJSON",
    "xgboost": "TreeliteLoadXGBoostModelLegacyBinary",
    "lightgbm": "TreeliteLoadLightGBMModel",
}
_DAMAGED: Final = "The file is cut off or damaged: copy it again"
_REMEDIES: Final = {
    "boosted_rounds": "A model of booster 'gblinear' is not made of trees",
    "is not recognized": "A newer XGBoost than treelite knows wrote it: pip install -U treelite, or set parameter "
    "'xgboost_allow_unknown_field' to true",
    "Cannot load model": "Write it again with a newer treelite: model.serialize('checkpoint.tl')",
    **dict.fromkeys(("newbuf", "bad_alloc", "Parsing error", "sax_parse", "are expected"), _DAMAGED),
}
"""Remedies, by a part of treelite's message."""


class Task(IntEnum):
    """Task of a model, in treelite's numbers."""

    BINARY = 0
    REGRESSION = 1
    MULTICLASS = 2
    RANKING = 3
    ISOLATION = 4


@dataclass(frozen=True)
class ForestDescription:
    """Properties of a model that do not depend on its engine."""

    artifact: ForestArtifact
    features: int
    trees: int
    task: Task
    targets: int
    """Number of values that are predicted at once."""
    classes: int
    """1 for a regression, and if one number stands for two classes."""
    dtype: np.dtype[Any]
    """Type of treelite's rows and results."""

    @property
    def width(self) -> int:
        """Number of results per row."""
        return self.targets * self.classes


class Forest:
    """A model in memory until the last reference to it is gone. Thread-safe."""

    def __init__(self, name: str, artifact: ForestArtifact, *, allow_unknown_field: bool = False) -> None:
        """Read a file. Raises ``InvalidArgument`` with treelite's error message, and the remedy."""
        self._library = treelite()
        self._handle = c_void_p()
        messages: list[str] = []
        try:
            self._read(artifact, allow_unknown_field, messages)
        except NativeError as error:
            raise _refusal(name, artifact, " ".join([*messages, str(error)])) from error
        native.release(self, self._library.function("TreeliteFreeModel"), self._handle)
        for line in messages:
            _log.warning("model '%s': %s", name, line)
        if artifact.model_type == "treelite_checkpoint":
            self._check_complete(name, artifact)
        features, trees, dtype = c_size_t(), c_size_t(), c_char_p()
        self._library.call("TreeliteQueryNumFeature", self._handle, byref(features))
        self._library.call("TreeliteQueryNumTree", self._handle, byref(trees))
        self._library.call("TreeliteGetOutputType", self._handle, byref(dtype))
        self.description = ForestDescription(
            artifact=artifact,
            features=features.value,
            trees=trees.value,
            task=Task(int(self.header("task_type", "u1")[0])),
            targets=int(self.header("num_target", "i4")[0]),
            classes=int(self.header("num_class", "i4").max()),
            dtype=np.dtype((dtype.value or b"").decode()),
        )

    def predictor(self, threads: int) -> Function:
        """Return a function that takes the address of rows, their number, and the address of the results.

        Both have the description's ``dtype``; results are ``width`` zeros per row. Raises ``NativeError``.
        """
        configuration = c_void_p()
        text = json.dumps({"predict_type": "default", "nthread": threads}).encode()
        self._library.call("TreeliteGTILParseConfig", text, byref(configuration))
        predict = self._library.function(
            "TreeliteGTILPredict", c_void_p, c_void_p, c_char_p, c_uint64, c_void_p, c_void_p
        )
        kind = self.description.dtype.name.encode()

        def call(rows: int, count: int, results: int) -> None:
            predict(self._handle, rows, kind, count, results, configuration)

        native.release(call, self._library.function("TreeliteGTILDeleteConfig"), configuration)
        return call

    def header(self, field: str, kind: str) -> Array:
        """Return a copy of a field of the whole model, as an array of type ``kind``."""
        frame = _Frame()
        self._library.call("TreeliteGetHeaderField", self._handle, field.encode(), byref(frame))
        return frame.array(kind)

    def tree(self, index: int, field: str, kind: str) -> Array:
        """Return a copy of a field of one tree, as an array of type ``kind``."""
        frame = _Frame()
        self._library.call("TreeliteGetTreeField", self._handle, c_uint64(index), field.encode(), byref(frame))
        return frame.array(kind)

    def _read(self, artifact: ForestArtifact, allow_unknown_field: bool, messages: list[str]) -> None:
        """Have treelite read a file, and append its messages, which it would write to standard output, to a list."""
        _heard.lines = messages
        for function in ("TreeliteRegisterLogCallback", "TreeliteRegisterWarningCallback"):
            self._library.call(function, _LISTENER)
        path = str(artifact.path).encode()
        loader = _LOADERS.get(artifact.model_type)
        if loader is None:
            self._library.call("TreeliteDeserializeModelFromFile", path, byref(self._handle))
            return
        options = json.dumps({"allow_unknown_field": allow_unknown_field}).encode()
        self._library.call(loader, path, options, byref(self._handle))

    def _check_complete(self, name: str, artifact: ForestArtifact) -> None:
        """Raise if a checkpoint of this treelite's version is not as long as the same model written again.

        treelite reads a file that lacks its end, and invents the rest.
        """
        text, length = POINTER(ctypes.c_char)(), c_size_t()
        self._library.call("TreeliteSerializeModelToBytes", self._handle, byref(text), byref(length))
        path = artifact.path
        with path.open("rb") as file:
            same_version = file.read(8) == ctypes.string_at(text, 8)
        if same_version and path.stat().st_size != length.value:
            raise _refusal(name, artifact, f"{path.stat().st_size} bytes are there, {length.value} are expected")


class _Frame(ctypes.Structure):
    """Memory that holds the values of a field."""

    _fields_ = (("buf", c_void_p), ("format", c_char_p), ("itemsize", c_size_t), ("nitem", c_size_t))

    def array(self, kind: str) -> Array:
        """Return a copy of the values."""
        raw = ctypes.string_at(self.buf, self.itemsize * self.nitem) if self.nitem else b""
        return np.frombuffer(raw, np.dtype(kind))


def treelite() -> Library:
    """Return treelite's library. Raises ``NotInstalled`` with the package to install."""
    try:
        return native.library("treelite", "libtreelite", "TreeliteGetLastError")
    except (MissingLibrary, OSError) as error:
        raise NotInstalled(f"unable to open treelite ({error}): pip install 'nerite[fil]'") from error


_heard = threading.local()


def _hear(message: bytes) -> None:
    """Keep a message of treelite: what is wrong with a file is often not in its error."""
    _heard.lines.append(native.cleaned(message))


_LISTENER: Final = ctypes.CFUNCTYPE(None, c_char_p)(_hear)
"""Never released, because treelite may call it at any time."""


def _refusal(name: str, artifact: ForestArtifact, message: str) -> InvalidArgument:
    remedy = next((remedy for part, remedy in _REMEDIES.items() if part in message), "")
    return InvalidArgument(f"unable to load model '{name}': '{artifact.path}': {message}. {remedy}".rstrip(". "))
