"""Bytes of any kind: flipped, cut, repeated, overwritten."""

from __future__ import annotations

import random

from fuzz import tokens

LARGEST = 64 * 1024
"""Bytes of the largest input that is made."""


def mutated(rng: random.Random, data: bytes, most: int = 4) -> bytes:
    """Return ``data`` with one to ``most`` things wrong, no longer than ``LARGEST``."""
    raw = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(raw) + 1)
        span = min(len(raw) - at, rng.choice((1, 1, 2, 4, 8, 64, 1_000)))
        kind = rng.randrange(9)
        if kind == 0 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(raw):
            raw[at] = rng.randrange(256)
        elif kind == 2:
            del raw[at : at + span]
        elif kind == 3:
            raw[at:at] = raw[at : at + span] * rng.choice((1, 2, 10))
        elif kind == 4:
            raw[at:at] = rng.choice(tokens.BROKEN)
        elif kind == 5:
            width = rng.choice((1, 2, 4, 8))
            number = tokens.number(rng) % (1 << 8 * width)
            raw[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
        elif kind == 6:
            raw[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 7:
            raw[at:at] = bytes((rng.randrange(256),)) * rng.choice((1, 16, 300, 4_000))
        elif rng.random() < 0.5:
            del raw[at:]
        else:
            raw[at:at] = tokens.text(rng).encode(errors="surrogatepass")
    return bytes(raw[:LARGEST])
