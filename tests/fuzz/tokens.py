"""Values that programs get wrong: numbers at the edges of types, texts that are none, words of the protocols."""

from __future__ import annotations

import math
import random
from typing import Any, Final

NUMBERS: Final[tuple[int, ...]] = (
    0, 1, -1, 2, 3, 7, 127, 128, 255, 256, 1023, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1,
    2**63, 2**64 - 1, 2**64, 2**70, -2, -128, -(2**31), -(2**31) - 1, -(2**63), -(2**63) - 1, 10**30, -(10**400),
)  # fmt: skip
FLOATS: Final = (0.0, -0.0, 0.5, 1.5, -1.0, 1e-7, 5e-324, 1e38, 3.5e38, 1e308, -1e308, math.nan, math.inf, -math.inf)
TEXTS: Final[tuple[str, ...]] = (
    "", " ", "x", "0", "-1", "1e5", "0x10", "true", "null", "NaN", "9" * 400, "9" * 5_000, "\0", "a\0b", "\n",
    "a\r\nb: c", "\x1b[31m", "\ud800", "a\udfffb", "\udc80", "\ud83d\ude00", "\U0010ffff", "\ufeff", "\u202e", "é",
    "x" * 1_025, "x" * 20_000, "é" * 600, "../x", "/", "\\", "..", "/dev/null", "%s%n", "%ff", "${x}", "{{x}}",
    "'" * 300, '"', "a b", "__proto__", "__class__", "{}", "[]", "\t", "data:,", "*", "a,b", "a;b", "<!--", "=",
)  # fmt: skip
WORDS: Final[tuple[str, ...]] = (
    "INPUT0", "OUTPUT0", "inputs", "outputs", "parameters", "name", "datatype", "shape", "data", "id", "text_input",
    "text_output", "sampling_parameters", "stream", "model", "BOOL", "UINT8", "UINT64", "INT8", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BF16", "BYTES", "binary_data", "binary_data_size", "binary_data_output", "base64",
    "base64_output", "classification", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size",
    "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "triton_enable_empty_final_response",
    "triton_final_response", "triton_x", "headers", "headers_x", "max_tokens", "content", "role", "user", "assistant",
    "system", "tool", "messages",
)  # fmt: skip
BROKEN: Final[tuple[bytes, ...]] = (
    b"\xff", b"\x80", b"\xc0\x80", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf0\x9f\x98", b"a\xffb", b"\0",
    b"\r", b"\r\n", b"\n", b"\x7f", b"\xfe\xff", b"%00", b"\\ud800", b"\\u0000",
)  # fmt: skip
"""Bytes that are not UTF-8, or end something."""


def number(rng: random.Random) -> int:
    """Return a number at the edge of something, or near one."""
    return rng.choice(NUMBERS) if rng.random() < 0.8 else rng.choice(NUMBERS) + rng.randint(-2, 2)


def text(rng: random.Random) -> str:
    """Return a text that is special to some part of the server."""
    return rng.choice(TEXTS) if rng.random() < 0.6 else rng.choice(WORDS)


def scalar(rng: random.Random) -> Any:
    """Return a value of a random type, as JSON has them."""
    kind = rng.randrange(6)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice(FLOATS)
    return number(rng) if kind < 4 else text(rng)
