"""Content codings: gzip and deflate, both ways."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.core.tensor import Buffer
from nerite.transports import unpacking

_WINDOW = {"gzip": 31, "deflate": 15}
_EITHER = 47
"""A window of zlib's that takes both codings, whichever the body is: clients confuse them."""
_LEVEL = 1


def known(encoding: str) -> bool:
    """Return whether there is code for a coding."""
    return encoding == "identity" or encoding in _WINDOW


def check(encoding: str) -> None:
    """Raise ``Unsupported`` for a coding that there is no code for."""
    if not known(encoding):
        raise Unsupported("Unsupported compression type")


def decompress(body: memoryview, limit: int, take: Callable[[int], None] | None = None) -> memoryview:
    """Return the body as it was before compression. Raises ``InvalidArgument`` if it is none, or beyond ``limit``.

    ``take`` is told of bytes before there is memory for them; what it raises ends the work.
    """
    if not body:
        raise InvalidArgument("nothing to be decompressed")
    try:
        return unpacking.unpack(body, _EITHER, limit, take)
    except (unpacking.TooLarge, unpacking.Broken) as error:
        raise _refusal(error, limit) from None


def decompress_small(body: memoryview, limit: int) -> memoryview | None:
    """Return the body as ``decompress`` does, or None if it is so large that this would hold up the event loop."""
    if not body:
        raise InvalidArgument("nothing to be decompressed")
    try:
        return unpacking.unpack_small(body, _EITHER, limit)
    except (unpacking.TooLarge, unpacking.Broken) as error:
        raise _refusal(error, limit) from None


def _refusal(error: Exception, limit: int) -> NeriteError:
    if isinstance(error, unpacking.TooLarge):
        return InvalidArgument(
            f"Decompressed data size exceeds the maximum allowed value of {limit} bytes. "
            "Use --http-max-input-size to increase the limit."
        )
    return InvalidArgument(f"failed to decompress request body: {error}")


def accepted(header: str) -> str:
    """Return the coding to use for a reply, by ``Accept-Encoding``; empty for none."""
    best, best_weight = "", 0.0
    identity = 0.0
    for item in header.split(","):
        name, _, parameter = item.strip().partition(";")
        weight = 1.0
        if parameter.strip().startswith("q="):
            try:
                weight = float(parameter.strip()[2:])
            except ValueError:
                weight = 0.0
        name = name.strip()
        if name == "identity":
            identity = weight
        elif name in _WINDOW and weight > best_weight:
            best, best_weight = name, weight
    return best if best_weight > 0 and best_weight >= identity else ""


def compress(encoding: str, pieces: Iterable[Buffer]) -> bytes:
    """Return what the pieces are together, compressed."""
    encoder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[encoding])
    return b"".join([*map(encoder.compress, pieces), encoder.flush()])


def coding_line(encoding: str) -> bytes:
    """Return the header line that says how a body is compressed."""
    return b"Content-Encoding: %b\r\n" % encoding.encode()


def compress_reply(encoding: str, parts: Sequence[Buffer]) -> list[Buffer]:
    """Return an encoded reply with its body compressed."""
    whole = b"".join(parts)
    head, _, body = whole.partition(b"\r\n\r\n")
    packed = compress(encoding, [body])
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length:")]
    lines.append(coding_line(encoding)[:-2])
    lines.append(b"Content-Length: %d" % len(packed))
    return [b"\r\n".join(lines) + b"\r\n\r\n" + packed]
