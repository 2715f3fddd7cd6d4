"""A model as treelite reads it: what it is like, and its predictions."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import re
import struct
import threading
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.backends.interface import ModelContext
from nerite.core.errors import InvalidArgument, NotInstalled, Unavailable, Unsupported
from nerite.core.tensor import Array
from nerite.frameworks.trees import native
from nerite.frameworks.trees.native import Function, Library, NativeError

# The file of a model: where it is, and in which format. What it holds decides, before what it is called.

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


class ForestArtifact(NamedTuple):
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


def find_forest(context: ModelContext, model_type: str) -> ForestArtifact:
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
"""What to do, by what treelite says."""


class Task(IntEnum):
    """What a model is for, in treelite's numbers."""

    BINARY = 0
    REGRESSION = 1
    MULTICLASS = 2
    RANKING = 3
    ISOLATION = 4


@dataclass(frozen=True)
class ForestDescription:
    """What a model is like, whatever computes it."""

    artifact: ForestArtifact
    features: int
    trees: int
    task: Task
    targets: int
    """How many things are predicted at once."""
    classes: int
    """1 for a regression, and where one number tells of two classes."""
    dtype: np.dtype[Any]
    """Of treelite's rows and results."""

    @property
    def width(self) -> int:
        """How many numbers the model gives for a row."""
        return self.targets * self.classes


class Sums(NamedTuple):
    """What becomes of the values of the leaves that a row comes to: a sum or mean, plus the base, then a function."""

    averaged: bool
    base: Array
    postprocessor: str
    """treelite's name of the function."""
    sigmoid_alpha: float
    ratio_c: float


class Tree(NamedTuple):
    """The nodes of a tree, as arrays: a node is a place in them. The first is the root."""

    leaf: Array
    """Whether a node is one; nodes that are not have a test, and go left where it is true."""
    left: Array
    right: Array
    feature: Array
    threshold: Array
    comparison: Array
    """In treelite's numbers, the same for all nodes of most forests."""
    missing_left: Array
    """Whether rows without the feature go left."""
    categorical: bool
    """Some nodes test for membership in a list, which is not in here."""
    values: Array
    """Of leaves: one value for each node, or a row of them."""
    targets: tuple[int, int]
    """Which thing is predicted, and which class; -1 for each of them."""


class Forest:
    """A model in memory, until the last reference to it is gone. Any number of threads may use it at once."""

    def __init__(self, name: str, artifact: ForestArtifact, *, allow_unknown_field: bool = False) -> None:
        """Read a file. Raises ``InvalidArgument`` with what treelite says is wrong with it, and the remedy."""
        self._library = treelite()
        self._handle = c_void_p()
        said: list[str] = []
        try:
            with _listening(self._library, said):
                self._read(artifact, allow_unknown_field)
        except NativeError as error:
            raise _refusal(name, artifact, " ".join([*said, str(error)])) from error
        native.release(self, self._library.function("TreeliteFreeModel", c_void_p), self._handle)
        for line in said:
            _log.warning("model '%s': %s", name, line)
        if artifact.model_type == "treelite_checkpoint":
            self._check_complete(name, artifact)
        self.description = ForestDescription(
            artifact=artifact,
            features=self._size("TreeliteQueryNumFeature"),
            trees=self._size("TreeliteQueryNumTree"),
            task=Task(int(self._numbers("task_type", "u1")[0])),
            targets=int(self._numbers("num_target", "i4")[0]),
            classes=int(self._numbers("num_class", "i4").max()),
            dtype=np.dtype(self._word("TreeliteGetOutputType")),
        )

    def predictor(self, threads: int) -> Function:
        """Return a function of addresses: rows, how many, and what they become (zeros, ``width`` for each).

        Rows and results are of the description's ``dtype``. Raises ``NativeError``.
        """
        configuration = c_void_p()
        text = json.dumps({"predict_type": "default", "nthread": threads}).encode()
        self._library.function("TreeliteGTILParseConfig", c_char_p, c_void_p)(text, byref(configuration))
        predict = self._library.function(
            "TreeliteGTILPredict", c_void_p, c_void_p, c_char_p, c_uint64, c_void_p, c_void_p
        )
        kind = self.description.dtype.name.encode()

        def call(rows: int, count: int, results: int) -> None:
            predict(self._handle, rows, kind, count, results, configuration)

        native.release(call, self._library.function("TreeliteGTILDeleteConfig", c_void_p), configuration)
        return call

    def trees(self) -> Iterator[Tree]:
        """Yield the trees, copied out of treelite's memory."""
        targets, classes = self._numbers("target_id", "i4"), self._numbers("class_id", "i4")
        value = self.description.dtype.str
        for index in range(self.description.trees):
            read = partial(self._numbers_of_tree, index)
            begin, end = read("leaf_vector_begin", "u8"), read("leaf_vector_end", "u8")
            leaf = read("node_type", "i1") == 0
            vectors = read("leaf_vector", value)
            values = read("leaf_value", value)[:, None]
            if len(vectors):
                width = int((end - begin)[leaf][0])
                values = np.zeros((len(leaf), width), vectors.dtype)
                values[leaf] = vectors[begin[leaf].astype(int)[:, None] + np.arange(width)]
            yield Tree(
                leaf=leaf,
                left=read("cleft", "i4"),
                right=read("cright", "i4"),
                feature=read("split_index", "i4"),
                threshold=read("threshold", value),
                comparison=read("cmp", "i1"),
                missing_left=read("default_left", "?"),
                categorical=bool(read("has_categorical_split", "?")[0]),
                values=values,
                targets=(int(targets[index]), int(classes[index])),
            )

    def sums(self) -> Sums:
        """Return what becomes of the values of the leaves that a row comes to."""
        return Sums(
            averaged=bool(self._numbers("average_tree_output", "?")[0]),
            base=self._numbers("base_scores", "f8"),
            postprocessor=self._text("postprocessor"),
            sigmoid_alpha=float(self._numbers("sigmoid_alpha", "f4")[0]),
            ratio_c=float(self._numbers("ratio_c", "f4")[0]),
        )

    def _read(self, artifact: ForestArtifact, allow_unknown_field: bool) -> None:
        path = str(artifact.path).encode()
        loader = _LOADERS.get(artifact.model_type)
        if loader is None:
            self._library.function("TreeliteDeserializeModelFromFile", c_char_p, c_void_p)(path, byref(self._handle))
            return
        options = json.dumps({"allow_unknown_field": allow_unknown_field}).encode()
        self._library.function(loader, c_char_p, c_char_p, c_void_p)(path, options, byref(self._handle))

    def _check_complete(self, name: str, artifact: ForestArtifact) -> None:
        """Raise if a checkpoint of this treelite's version is not as long as the same model written again.

        treelite reads a file that lacks its end, and makes up the rest.
        """
        text, length = POINTER(ctypes.c_char)(), c_size_t()
        self._library.function("TreeliteSerializeModelToBytes", c_void_p, c_void_p, c_void_p)(
            self._handle, byref(text), byref(length)
        )
        path = artifact.path
        with path.open("rb") as file:
            same_version = file.read(8) == ctypes.string_at(text, 8)
        if same_version and path.stat().st_size != length.value:
            raise _refusal(name, artifact, f"{path.stat().st_size} bytes are there, {length.value} are expected")

    def _size(self, function: str) -> int:
        size = c_size_t()
        self._library.function(function, c_void_p, c_void_p)(self._handle, byref(size))
        return size.value

    def _word(self, function: str) -> str:
        word = c_char_p()
        self._library.function(function, c_void_p, c_void_p)(self._handle, byref(word))
        return (word.value or b"").decode()

    def _numbers(self, field: str, kind: str) -> Array:
        frame = _Frame()
        self._library.function("TreeliteGetHeaderField", c_void_p, c_char_p, c_void_p)(
            self._handle, field.encode(), byref(frame)
        )
        return frame.array(kind)

    def _numbers_of_tree(self, tree: int, field: str, kind: str) -> Array:
        frame = _Frame()
        self._library.function("TreeliteGetTreeField", c_void_p, c_uint64, c_char_p, c_void_p)(
            self._handle, tree, field.encode(), byref(frame)
        )
        return frame.array(kind)

    def _text(self, field: str) -> str:
        return self._numbers(field, "S1").tobytes().decode()


class _Frame(ctypes.Structure):
    """Where the values of a field are."""

    _fields_ = (("buf", c_void_p), ("format", c_char_p), ("itemsize", c_size_t), ("nitem", c_size_t))

    def array(self, kind: str) -> Array:
        """Return the values, copied."""
        raw = ctypes.string_at(self.buf, self.itemsize * self.nitem) if self.nitem else b""
        return np.frombuffer(raw, np.dtype(kind))


@cache
def treelite() -> Library:
    """Return treelite's library. Raises ``Unsupported`` with what to install."""
    path = native.find("treelite", "libtreelite")
    try:
        if path is None:
            raise OSError("no library in the package 'treelite'")
        return native.open_library(path, "TreeliteGetLastError")
    except OSError as error:
        raise NotInstalled(f"unable to open treelite ({error}): pip install 'nerite[fil]'") from error


_heard = threading.local()


def _hear(message: bytes) -> None:
    """Keep what treelite says besides its errors: what is wrong with a file is often only there."""
    _heard.lines.append(native.cleaned(message))


_LISTENER: Final = ctypes.CFUNCTYPE(None, c_char_p)(_hear)
"""Kept for ever: treelite may have something to say at any time."""


@contextlib.contextmanager
def _listening(library: Library, said: list[str]) -> Iterator[None]:
    """Have what treelite says in this thread in ``said``, and not on standard output."""
    _heard.lines = said
    for function in ("TreeliteRegisterLogCallback", "TreeliteRegisterWarningCallback"):
        library.function(function, type(_LISTENER))(_LISTENER)
    yield


def _refusal(name: str, artifact: ForestArtifact, said: str) -> InvalidArgument:
    remedy = next((remedy for part, remedy in _REMEDIES.items() if part in said), "")
    return InvalidArgument(f"unable to load model '{name}': '{artifact.path}': {said}. {remedy}".rstrip(". "))
