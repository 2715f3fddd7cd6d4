"""Readers of pickles, protobuf messages and MLflow's ``MLmodel`` files that need neither frameworks nor schemas.

Pickles are inspected without unpickling them, because that can run arbitrary code.
"""

from __future__ import annotations

import bz2
import io
import lzma
import pickletools
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.artifacts.artifact import Candidate, Unusable
from nerite.core.tensor import Buffer

_PROTOCOLS = frozenset(bytes([0x80, number]) for number in range(2, 6))
_PACKED: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    (b"\x1f\x8b", lambda data: zlib.decompressobj(wbits=31).decompress(data)),
    (b"\x78", lambda data: zlib.decompressobj().decompress(data)),
    (b"BZh", lambda data: bz2.BZ2Decompressor().decompress(data)),
    (b"\xfd7zXZ", lambda data: lzma.LZMADecompressor().decompress(data)),
    (b"\x5d\x00\x00", lambda data: lzma.LZMADecompressor().decompress(data)),
)
"""Compression formats of joblib: magic number and decompressor."""


def unpacked_pickle(head: bytes) -> bytes:
    """Return the head of a file that joblib may have compressed, decompressed as far as ``head`` reaches."""
    for magic, unpack in _PACKED:
        if head.startswith(magic):
            try:
                return unpack(head)
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
                return b""
    return head


def is_pickle(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a pickle."""
    return head[:2] in _PROTOCOLS


def pickle_names(head: bytes) -> list[str]:
    """Return the classes and functions that a pickle names, as far as ``head`` reaches: ``module.name``."""
    return list(dict.fromkeys(_names(head)))


def _names(head: bytes) -> Iterator[str]:
    stream = io.BytesIO(head)
    try:
        while stream.tell() < len(head):  # some files are a sequence of several pickles
            yield from _names_in_one(stream)
    except Exception:  # the head may end inside a pickle, and joblib puts raw arrays between the parts of one
        return


def _names_in_one(stream: io.BytesIO) -> Iterator[str]:
    texts: list[str] = []
    memo: dict[int, str] = {}
    last = ""
    """The text that the previous operation pushed onto the stack; empty if it pushed none."""
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "MEMOIZE":
            memo[len(memo)] = last
            continue
        last = ""
        if opcode.name == "GLOBAL":
            yield str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL" and len(texts) > 1:
            yield f"{texts[-2]}.{texts[-1]}"
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            last = memo.get(int(argument or 0), "")
        elif isinstance(argument, str):
            last = argument
        if last:
            texts.append(last)


# Fields of a protobuf message without its schema: enough to identify a file and to see that it is complete.
# Zero-copy: field values are views on the message, which may be a memory-mapped file.

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


class NoMessage(ValueError):
    """The bytes are not a protobuf message."""


class CutOff(NoMessage):
    """The message ends before it is complete."""

    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing:,} bytes are missing")
        self.missing = missing


class Field(NamedTuple):
    """A field of a message."""

    number: int
    value: int | memoryview
    """A number, or the bytes of a string, a submessage or a field of fixed size."""


def message_fields(message: Buffer) -> Iterator[Field]:
    """Yield the fields of a message. Raises ``NoMessage`` if the bytes are not one, ``CutOff`` if it is truncated."""
    data = memoryview(message)
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        number, form = tag >> 3, tag & 7
        if number == 0:
            raise NoMessage("it has a field with the number 0")
        if form == _VARINT:
            value, at = _varint(data, at)
            yield Field(number, value)
            continue
        if form == _BYTES:
            size, at = _varint(data, at)
        elif form in (_FIXED64, _FIXED32):
            size = 8 if form == _FIXED64 else 4
        else:
            raise NoMessage(f"it has a field with the unknown wire type {form}")
        if at + size > end:
            raise CutOff(at + size - end)
        yield Field(number, data[at : at + size])
        at += size


def submessages(message: Buffer, number: int) -> Iterator[memoryview]:
    """Yield the values of the field ``number`` that are not varints."""
    for found, value in message_fields(message):
        if found == number and isinstance(value, memoryview):
            yield value


def text_field(message: Buffer, number: int) -> str:
    """Return the text in the field ``number``, or "" if the message has no such field."""
    return next((bytes(value).decode(errors="replace") for value in submessages(message, number)), "")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_VARINT):
        if at + place >= len(data):
            raise CutOff(1)
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise NoMessage("it has a varint of more than 10 bytes")


# MLflow's model directories: an MLmodel file lists the flavours in which the model was saved.

_FILE: Final = "MLmodel"
_PLACES: Final = {
    "triton": "data",
    "onnx": "data",
    "xgboost": "data",
    "lightgbm": "data",
    "catboost": "data",
    "tensorflow": "data",
    "transformers": "model_binary",
    "pytorch": "model_data",
    "sklearn": "pickled_model",
}
"""Flavours that can be served, best first, and the key of each flavour's entry that holds the path of the model."""
_DEEPER: Final = {"pytorch": ("model.pt2", "model.pth"), "tensorflow": ("model", "tfmodel", "model.keras")}
"""Files or directories to prefer inside the directory that a flavour names."""
_LINE: Final = re.compile(r"( *)([^\s:#][^:]*):(?: (.*))?")


class LoggedModel(NamedTuple):
    """A model that MLflow has logged; the model itself is at ``place``."""

    flavor: str
    place: Path
    config: Path | None
    """The config.pbtxt that was logged with the model, if any."""


def logged_model(candidate: Candidate) -> LoggedModel | None:
    """Return the model of an MLflow directory in the requested or else the best flavour; None for other directories.

    Raises ``Unusable`` if it has no flavour that can be served.
    """
    path = candidate.path
    if not candidate.is_directory or not (path / _FILE).is_file():
        return None
    flavors = read_yaml((path / _FILE).read_text(errors="replace")).get("flavors") or {}
    wanted = [candidate.flavor] if candidate.flavor else [name for name in _PLACES if name in flavors]
    if not wanted or wanted[0] not in flavors or wanted[0] not in _PLACES:
        what = f"servable flavour '{candidate.flavor}'" if candidate.flavor else "flavour that can be served"
        remedy = (
            "Log it in another flavour as well, for example with mlflow.onnx.log_model(...). "
            f"Flavours that can be served: {', '.join(_PLACES)}. "
            "Or load it in a model.py: mlflow.pyfunc.load_model(...)"
        )
        raise Unusable(path, f"this MLflow model has no {what}; it has: {', '.join(flavors)}", remedy)
    flavor = wanted[0]
    place = path / str(flavors[flavor].get(_PLACES[flavor]) or "data")
    place = next((place / name for name in _DEEPER.get(flavor, ()) if (place / name).exists()), place)
    if not place.exists():
        raise Unusable(path, f"{place}, named in {_FILE}, is missing", "Download the whole directory again.")
    config = path / "config.pbtxt"
    return LoggedModel(flavor, place, config if config.is_file() else None)


def read_yaml(text: str) -> dict[str, Any]:
    """Parse an MLmodel file, in the subset of YAML that MLflow writes: nested mappings of strings. Skips lists."""
    document: dict[str, Any] = {}
    open_mappings: list[tuple[int, dict[str, Any]]] = [(-1, document)]
    for line in text.splitlines():
        found = _LINE.fullmatch(line.rstrip())
        if found is None:
            continue
        indent, key, value = len(found[1]), found[2].strip("'\""), (found[3] or "").strip()
        while open_mappings[-1][0] >= indent:
            open_mappings.pop()
        mapping = open_mappings[-1][1]
        if value:
            mapping[key] = value.strip("'\"") if value not in ("null", "{}", "[]") else None
        else:
            mapping[key] = {}
            open_mappings.append((indent, mapping[key]))
    return document
