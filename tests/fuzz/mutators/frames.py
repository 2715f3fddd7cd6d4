"""HTTP/2 on the wire: sessions of frames, in an order, with lengths, flags and header blocks that are wrong."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Final

from fuzz import tokens
from fuzz.mutators import octets

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 1, 1, 4, 8, 0x20
HEADER_SIZE: Final = 9
_STREAMS: Final = (0, 1, 1, 2, 3, 3, 5, 7, 101, 2**31 - 1, 2**31 + 1)
_BLOCKS: Final = (
    b"\x80", b"\xbf", b"\xff\xff\xff\xff\xff\x0f", b"\x3f\xe1\x1f", b"\x3f\xff\xff\xff\xff\x7f", b"\x20",
    b"\x00\x00\x00", b"\x40\x01:\x00", b"\x00\x05:path\x01/", b"\x00\x01A\x01b", b"\x00\x04te  \x01x",
    b"\x00\x82\xff\xff\x01x", b"\x82" * 300, b"\x00\x0econtent-length\x0299", b"\x00\x0econtent-length\x02-1",
    b"\x00\nconnection\x05close", b"\x00\x0cgrpc-timeout\x03x9S", b"\x00\x0cgrpc-timeout\x099999999H",
    b"\x00\rgrpc-encoding\x04gzip", b"\x00\rgrpc-encoding\x05snapp", b"\x00\x0ba-binary-bin\x02!!",
    b"\x00\x01x\x01\xff", b"\x00\x00\x01x", b"\x00\x01\x00\x01x", b"\x10\x01x\x7f\xe1\x1f" + b"v" * 4_192,
    b"\x00\x01x\x7f\x81\xf4\x03" + b"v" * 64_128,
)  # fmt: skip
"""Pieces of header blocks: names, indices and lengths that cannot be, and some that can."""


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int = -1) -> bytes:
    """Return a frame. ``length``: what its head says, if that is not true."""
    size = len(payload) if length < 0 else length
    return struct.pack(">IBI", (size & 0xFFFFFF) << 8 | kind, flags, stream & 0xFFFFFFFF) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Return a field of a header block, which no table remembers."""
    return b"\0" + _integer(len(name)) + name + _integer(len(value)) + value


def _integer(value: int) -> bytes:
    if value < 127:
        return bytes((value,))
    out, value = bytearray(b"\x7f"), value - 127
    while value > 127:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def header_block(path: bytes, fields: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    """Return the header block of a gRPC call."""
    general = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"localhost"))
    usual = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return b"".join(literal(name, value) for name, value in (*general, *usual, *fields))


def session(rng: random.Random, path: bytes, fields: Sequence[tuple[bytes, bytes]], body: bytes) -> list[bytes]:
    """Return frames in which one to three calls are made, all of them valid."""
    frames = [frame(SETTINGS, 0, 0, b"")]
    for stream in range(1, 2 * rng.randint(1, 3), 2):
        block = header_block(path, fields)
        if rng.random() < 0.3:
            cut = rng.randrange(len(block) + 1)
            frames += [frame(HEADERS, 0, stream, block[:cut]), frame(CONTINUATION, END_HEADERS, stream, block[cut:])]
        elif rng.random() < 0.3:
            pad = rng.randrange(20)
            payload = bytes((pad,)) + bytes(5) + block + bytes(pad)
            frames.append(frame(HEADERS, END_HEADERS | PADDED | PRIORITISED, stream, payload))
        else:
            frames.append(frame(HEADERS, END_HEADERS, stream, block))
        cut = rng.randrange(len(body) + 1) if rng.random() < 0.3 else len(body)
        if cut < len(body):
            frames.append(frame(DATA, 0, stream, body[:cut]))
            body_rest = body[cut:]
        else:
            body_rest = body
        frames.append(frame(DATA, END_STREAM, stream, body_rest))
    return frames


def answers(rng: random.Random, calls: int, body: bytes) -> list[bytes]:
    """Return the frames of a server that answers so many calls, all of them valid."""
    frames = [frame(SETTINGS, 0, 0, struct.pack(">HI", 4, rng.choice((0, 1, 65_535, 1 << 20))))]
    for stream in range(1, 2 * calls, 2):
        kind = rng.randrange(6)
        if kind == 0:
            frames.append(frame(HEADERS, END_HEADERS | END_STREAM, stream, b"\x88" + literal(b"grpc-status", b"14")))
            continue
        if kind == 1:
            frames.append(frame(HEADERS, END_HEADERS, stream, literal(b":status", b"103")))
        frames.append(frame(HEADERS, END_HEADERS, stream, b"\x88" + literal(b"content-type", b"application/grpc")))
        cut = rng.randrange(len(body) + 1)
        frames += [frame(DATA, 0, stream, body[:cut]), frame(DATA, 0, stream, body[cut:])]
        if kind == 2:
            frames.append(frame(GOAWAY, 0, 0, struct.pack(">II", rng.choice((0, stream, 2**31 - 1)), 0) + b"bye"))
        frames.append(frame(WINDOW_UPDATE, 0, rng.choice((0, stream)), struct.pack(">I", 100_000)))
        frames.append(frame(HEADERS, END_HEADERS | END_STREAM, stream, literal(b"grpc-status", b"0")))
    return frames


def mutated(rng: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """Return ``frames`` with one to four of them changed."""
    made = list(frames)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        kind = rng.randrange(10)
        if at == len(made) or kind <= 2:
            made.insert(at, any_frame(rng))
        elif kind == 3:
            del made[at]
        elif kind == 4:
            made[at:at] = [made[at]] * rng.choice((1, 2, 60))
        elif kind == 5:
            made.insert(rng.randrange(len(made)), made.pop(at))
        elif kind == 6:
            made[at] = _with_another_head(rng, made[at])
        elif kind == 7 and len(made[at]) >= HEADER_SIZE and made[at][3] in (HEADERS, CONTINUATION):
            made[at] = _with_another_block(rng, made[at])
        elif kind == 8:
            made[at] = made[at][: rng.randrange(len(made[at]) + 1)]
        else:
            payload = octets.mutated(rng, made[at][HEADER_SIZE:], 2)
            head = made[at][:HEADER_SIZE]
            made[at] = (len(payload).to_bytes(3, "big") + head[3:] if rng.random() < 0.8 else head) + payload
    size = 0
    for at, each in enumerate(made):
        size += len(each)
        if size > 2 * octets.LARGEST:
            del made[at:]
            break
    return [each for each in made if each][:200]


def _with_another_head(rng: random.Random, old: bytes) -> bytes:
    kind, flags, stream = (old[3], old[4], int.from_bytes(old[5:9], "big")) if len(old) >= HEADER_SIZE else (0, 0, 1)
    payload, length = old[HEADER_SIZE:], -1
    choice = rng.randrange(4)
    if choice == 0:
        kind = rng.randrange(12)
    elif choice == 1:
        flags ^= 1 << rng.randrange(8)
    elif choice == 2:
        stream = rng.choice(_STREAMS)
    else:
        length = rng.choice((0, 1, 4, 5, 8, 16_384, 16_385, 262_144, 262_145, 2**24 - 1, len(payload) + 1))
    return frame(kind, flags, stream, payload, length)


def _with_another_block(rng: random.Random, old: bytes) -> bytes:
    block = old[HEADER_SIZE:]
    piece = rng.choice(_BLOCKS)
    at = rng.choice((0, len(block), rng.randrange(len(block) + 1)))
    return frame(old[3], old[4], int.from_bytes(old[5:9], "big"), block[:at] + piece + block[at:])


def any_frame(rng: random.Random) -> bytes:
    """Return a frame of any kind, with a payload that such a frame may have, or nearly."""
    kind = rng.randrange(12)
    stream = rng.choice(_STREAMS)
    flags = rng.choice((0, 0, 1, 4, 5, 8, 0x20, 0xFF, rng.randrange(256)))
    if kind == SETTINGS:
        settings = [(rng.randrange(12), tokens.number(rng) % 2**32) for _ in range(rng.choice((0, 1, 3, 60)))]
        payload = b"".join(struct.pack(">HI", *each) for each in settings)
        stream, flags = (0, 0) if rng.random() < 0.8 else (stream, flags)
    elif kind in (PING, GOAWAY):
        payload = rng.randbytes(rng.choice((8, 8, 8, 7, 0, 20)))
        stream = 0 if rng.random() < 0.8 else stream
    elif kind in (WINDOW_UPDATE, RST_STREAM):
        payload = struct.pack(">I", rng.choice((0, 1, 8, 65_535, 2**31 - 1, 2**31, 2**32 - 1)))
    elif kind in (HEADERS, CONTINUATION, PUSH_PROMISE):
        payload = b"".join(rng.choice(_BLOCKS) for _ in range(rng.randint(1, 3)))
    else:
        payload = rng.randbytes(rng.choice((0, 1, 5, 9, 100)))
    return frame(kind, flags, stream, payload)
