"""The tensors of a checkpoint's safetensors files, mapped into memory, so that they take none of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.core.bounded_files import json_of
from nerite.core.errors import Unsupported
from nerite.core.tensor import Array
from nerite.llm import checkpoint

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_ELEMENTS: Final[Mapping[str, int]] = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the types of weights."""
_NUMPY: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_LONGEST_HEAD: Final = 100 << 20
"""The longest description of tensors, in bytes: what the library of the format accepts."""
_SURPLUS: Final = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors that some checkpoints have, but no model reads."""


class StoredTensor(NamedTuple):
    """A tensor of a file."""

    type: str
    """``F32``, ``F16`` or ``BF16``."""
    shape: tuple[int, ...]
    file: Path
    begin: int
    """Position of its first byte in the file."""

    def raw(self) -> Array:
        """Return its bytes, mapped into memory. They are read from the disk when they are used."""
        size = math.prod(self.shape) * _ELEMENTS[self.type]
        # Private and writable, because OpenVINO takes no others; nothing is written.
        return np.memmap(self.file, np.uint8, "c", self.begin, (size,))

    def floats(self, rows: slice = slice(None)) -> Array:
        """Return a copy of some rows with 32 bits per element."""
        whole = self.raw().view(_NUMPY[self.type]).reshape(self.shape)[rows]
        if self.type == "BF16":
            return (whole.astype(np.uint32) << 16).view(np.float32)
        return whole.astype(np.float32)


def read_tensors(directory: Path, shapes: Mapping[str, tuple[int, ...]], spare: str) -> Mapping[str, StoredTensor]:
    """Return the tensors of a checkpoint, which must be those in ``shapes``, and may be that with the name ``spare``.

    Raises ``Unsupported`` if they are not.
    """
    found: dict[str, StoredTensor] = {}
    for file, wanted in _files(directory).items():
        for name, tensor in _read_head(file).items():
            if wanted is None or name in wanted:
                found[name] = tensor
    for name, shape in shapes.items():
        if name not in found:
            raise Unsupported(f"it has no tensor '{name}'")
        if found[name].shape != shape:
            raise Unsupported(f"its tensor '{name}' has the shape {found[name].shape}, and not {shape}")
    for name in found.keys() - shapes.keys():
        if name != spare and not _SURPLUS.fullmatch(name):
            raise Unsupported(f"it has a tensor '{name}', which is not known")
    return {name: found[name] for name in shapes}


def _files(directory: Path) -> Mapping[Path, frozenset[str] | None]:
    """Return the files that have the weights, with the names of the tensors that are read from each; None: all."""
    single = directory / _SINGLE
    if single.is_file():
        return {single: None}
    index = checkpoint.describe_content(directory, _INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise Unsupported(f"it has neither a {_SINGLE} nor a {_INDEX}")
    files: dict[Path, set[str]] = {}
    for name, file in index.items():
        if not isinstance(file, str) or Path(file).name != file or not (directory / file).is_file():
            raise Unsupported(f"{_INDEX} names the file '{file}', which is not there")
        files.setdefault(directory / file, set()).add(name)
    return {file: frozenset(names) for file, names in files.items()}


def _read_head(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a file describes. Raises ``Unsupported`` if it cannot be one of the format."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size - 8, _LONGEST_HEAD):
                raise ValueError(f"a head of {length} bytes in a file of {size}")
            head = json_of(opened.read(length))
            return {
                name: _tensor(described, file, 8 + length, size)
                for name, described in head.items()
                if name != "__metadata__"
            }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unsupported(f"'{file.name}' is not a safetensors file of floating-point numbers: {error}") from None


def _tensor(described: Mapping[str, Any], file: Path, data: int, size: int) -> StoredTensor:
    kind, shape = described["dtype"], tuple(described["shape"])
    begin, end = described["data_offsets"]
    if kind not in _ELEMENTS:
        raise ValueError(f"it has tensors of the type {kind}")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError("a size is not a number")
    if end - begin != math.prod(shape) * _ELEMENTS[kind] or data + end > size:
        raise ValueError("a tensor is not where it is said to be")
    return StoredTensor(kind, shape, file, data + begin)
