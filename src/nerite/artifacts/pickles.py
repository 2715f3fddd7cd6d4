"""What a pickle says it is made of, without running it: reading one can run any code."""

from __future__ import annotations

import bz2
import io
import lzma
import pickletools
import zlib
from collections.abc import Callable, Iterator

_PROTOCOLS = frozenset(bytes([0x80, number]) for number in range(2, 6))
_PACKED: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    (b"\x1f\x8b", lambda data: zlib.decompressobj(wbits=31).decompress(data)),
    (b"\x78", lambda data: zlib.decompressobj().decompress(data)),
    (b"BZh", lambda data: bz2.BZ2Decompressor().decompress(data)),
    (b"\xfd7zXZ", lambda data: lzma.LZMADecompressor().decompress(data)),
    (b"\x5d\x00\x00", lambda data: lzma.LZMADecompressor().decompress(data)),
)
"""How joblib packs, by the first bytes."""


def unpacked(head: bytes) -> bytes:
    """Return the beginning of what joblib may have packed, as far as ``head`` reaches."""
    for magic, unpack in _PACKED:
        if head.startswith(magic):
            try:
                return unpack(head)
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
                return b""
    return head


def is_pickle(head: bytes) -> bool:
    """Say whether the first bytes are those of a pickle."""
    return head[:2] in _PROTOCOLS


def names(head: bytes) -> list[str]:
    """Return the classes and functions that a pickle names, as far as ``head`` reaches: ``module.name``."""
    return list(dict.fromkeys(_names(head)))


def _names(head: bytes) -> Iterator[str]:
    stream = io.BytesIO(head)
    try:
        while stream.tell() < len(head):  # some files are several pickles, one behind the other
            yield from _names_in_one(stream)
    except Exception:  # the head ends somewhere, and joblib puts bare arrays between the parts of a pickle
        return


def _names_in_one(stream: io.BytesIO) -> Iterator[str]:
    texts: list[str] = []
    remembered: dict[int, str] = {}
    last = ""
    """The text that the operation before has put on the stack; empty if it was none."""
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "MEMOIZE":
            remembered[len(remembered)] = last
            continue
        last = ""
        if opcode.name == "GLOBAL":
            yield str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL" and len(texts) > 1:
            yield f"{texts[-2]}.{texts[-1]}"
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            last = remembered.get(int(argument or 0), "")
        elif isinstance(argument, str):
            last = argument
        if last:
            texts.append(last)
