"""Hashes of the beginnings of a prompt, by bytes: a router needs no tokenizer to recognize what a member has cached.

The beginnings grow from 256 bytes to 16 MiB, first in steps of 256 bytes and then by four for each doubling, so there
are at most 60 for a prompt of any length. Each hash is made from the one before it and the bytes in between; of more
than 16 KiB in between, the first and the last 8 KiB count. So the time is bounded as well. Hashes are CRC-32: fast, and
alike in all routers. Equal hashes are a hint only: a request that is sent to a member by mistake, or by a
client who wants that, computes its prompt there, within the bounds of load.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Final
from zlib import crc32

_STEPS: Final = [256] * 4 + [256 * 2**octave for octave in range(14) for _ in range(4)]
SIZES: Final = tuple(accumulate(_STEPS))
"""Sizes in bytes of the beginnings that are hashed."""
_PIECES: Final = tuple(pairwise((0, *SIZES)))
_LARGE: Final = 16 * 1024
"""Size of a piece in bytes above which its middle is left out."""
_END: Final = _LARGE // 2
BYTES_PER_TOKEN: Final = 4.0
"""Of English text with the usual tokenizers; an estimate for work, not for bills."""
_TOKENS: Final = tuple(tuple(size / BYTES_PER_TOKEN for size in SIZES[:count]) for count in range(len(SIZES) + 1))


def prefix_hashes(text: bytes | bytearray | memoryview, salt: str = "") -> tuple[int, ...]:
    """Return the hashes of the beginnings of a prompt, from the shortest to the longest.

    ``text`` is the prompt as the request has it: the bytes of ``prompt`` or of ``messages``, JSON or not. ``salt`` is
    what else a cache depends on, such as the model.
    """
    size = len(text)
    view = memoryview(text)
    last = crc32(salt.encode())
    found = []
    for start, stop in _PIECES:
        if stop > size:
            break
        if stop - start <= _LARGE:
            last = crc32(view[start:stop], last)
        else:
            last = crc32(view[stop - _END : stop], crc32(view[start : start + _END], last))
        found.append(last)
    return tuple(found)


def prefix_tokens(count: int) -> tuple[float, ...]:
    """Return how many tokens the first ``count`` beginnings have, estimated."""
    return _TOKENS[count]
