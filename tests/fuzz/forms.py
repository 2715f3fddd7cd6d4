"""Forms: recordings to transcribe, files to store, and tensors of plain requests, each with something wrong or not."""

from __future__ import annotations

import random
import struct
from typing import Final, NamedTuple

from fuzz import configurations, tokens
from fuzz.mutators import octets


class Field(NamedTuple):
    """A part of a form."""

    name: bytes
    value: bytes
    more: bytes = b""
    """What follows the name in the head of the part."""


class Form(NamedTuple):
    """A form, and where it is sent."""

    path: str
    content_type: bytes
    body: bytes


_FILE: Final = b'; filename="a.wav"\r\nContent-Type: audio/wav'
_TEXTS: Final[tuple[Field, ...]] = (
    Field(b"language", b"en"), Field(b"prompt", "Grüße".encode()), Field(b"temperature", b"0.5"), Field(b"user", b"me"),
    Field(b"response_format", b"json"), Field(b"response_format", b"text"), Field(b"response_format", b"srt"),
    Field(b"response_format", b"vtt"), Field(b"response_format", b"verbose_json"), Field(b"stream", b"true"),
    Field(b"timestamp_granularities[]", b"word"), Field(b"timestamp_granularities[]", b"segment"),
    Field(b"include[]", b"logprobs"), Field(b"chunking_strategy", b"auto"), Field(b"files", b"other"),
)  # fmt: skip
_BOUNDARIES: Final = (
    b"x", b"----form7", b"a b", b'"a b"', b'"', b'""', b"", b"-", b"--", b"x" * 71, b"x" * 5_000, b"\xff", b"x;y=z",
    b'"x"; boundary=y', b"'()+_,-./:=?",
)  # fmt: skip
_HEADS: Final = (
    b"", b"X-Y: z", b"Content-Disposition: form-data", b'Content-Disposition: form-data; filename="a"', b"no colon",
    b"content-disposition: form-data; name=file", b'Content-Disposition: form-data; name=""', b"\xff: \xff",
    b"Content-Disposition: form-data; name*=UTF-8''%e2%82", b"Content-Transfer-Encoding: base64", b"X: " + b"y" * 9_000,
    b" folded",
)  # fmt: skip


def form(rng: random.Random) -> Form:
    """Return a form that is valid, or nearly."""
    kind = rng.random()
    if kind < 0.2:
        path, fields = "/v1/files", _upload(rng)
    elif kind < 0.8:
        verb = rng.choice(("transcriptions", "transcriptions", "translations"))
        path, fields = f"/v1/audio/{verb}", _transcription(rng)
    else:
        model = rng.choice(("text", "worker", "batched", "hears", "types"))
        path, fields = f"/v2/models/{model}/infer", _tensors(rng)
    if rng.random() < 0.4:
        fields = _changed(rng, fields)
    boundary = b"form7"
    named = rng.choice(_BOUNDARIES) if rng.random() < 0.1 else boundary
    if rng.random() < 0.5:
        boundary = named.strip(b'"') or boundary
    body = _joined(rng, fields, boundary)
    if rng.random() < 0.2:
        body = octets.mutated(rng, body)
    kind = (
        b"multipart/form-data; boundary=" if rng.random() < 0.97 else rng.choice((b"multipart/mixed; boundary=", b"a="))
    )
    return Form(path, kind + named, body[: octets.LARGEST])


def _transcription(rng: random.Random) -> list[Field]:
    model = rng.choice((b"hears", b"hears", b"hears", b"words", b"nowhere"))
    file = Field(b"file", recording(rng), _FILE if rng.random() < 0.8 else b"")
    fields = [file, Field(b"model", model), *rng.sample(_TEXTS, rng.choice((0, 0, 1, 1, 2, 3)))]
    rng.shuffle(fields)
    return fields


def _upload(rng: random.Random) -> list[Field]:
    name = rng.choice((b"a.jsonl", b"a.jsonl", b"a.txt", b"../a.jsonl", b"", b"\xff.jsonl", b"n" * 1_100 + b".jsonl"))
    purpose = Field(b"purpose", rng.choice((b"batch", b"batch", b"user_data", b"fine-tune", b"x")))
    expiry = [Field(b"expires_after[anchor]", b"created_at"), Field(b"expires_after[seconds]", b"3600")]
    file = Field(b"file", configurations.batch(rng), b'; filename="' + name + b'"')
    return [file, purpose, *(expiry if rng.random() < 0.3 else ())]


def _tensors(rng: random.Random) -> list[Field]:
    value = rng.choice((b"[1, 2]", b"1", b'["a"]', b"text", struct.pack("<2f", 1.0, 2.0)))
    more = rng.choice((b"", b"\r\nContent-Type: application/json", b"\r\nContent-Type: application/octet-stream"))
    return [Field(rng.choice((b"INPUT0", b"audio", b"IN_INT64")), value, more)]


def recording(rng: random.Random) -> bytes:
    """Return a WAV file of a few samples; half of them with something wrong."""
    channels, bits = rng.choice((1, 1, 2, 8)), rng.choice((8, 16, 16, 24, 32))
    kind, rate = rng.choice((1, 1, 1, 1, 1, 1, 3, 0xFFFE)), rng.choice((16_000, 16_000, 8_000, 44_100, 48_000, 11_025))
    samples = rng.randbytes(channels * bits // 8 * rng.choice((0, 1, 399, 399, 2_000, 2_000)))
    if rng.random() < 0.2:
        kind, channels, rate, bits = (tokens.number(rng) % (1 << 16) for _ in range(4))
    described = struct.pack("<HHIIHH", kind, channels, rate, rate * 2, 2, bits)
    chunks = [
        b"fmt " + struct.pack("<I", len(described)) + described,
        b"data" + struct.pack("<I", len(samples)) + samples,
    ]
    if rng.random() < 0.1:
        chunks.insert(
            rng.randrange(3), rng.choice((b"LIST\x04\0\0\0abcd", b"LIST\xff\xff\xff\xff", b"LIST\x03\0\0\0abc"))
        )
    if rng.random() < 0.05:
        rng.shuffle(chunks)
    content = b"WAVE" + b"".join(chunks)
    file = b"RIFF" + struct.pack("<I", len(content)) + content
    if rng.random() < 0.1:
        file = rng.choice((b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"RIFF", b"")) + rng.randbytes(
            rng.choice((0, 9, 500))
        )
    return octets.mutated(rng, file) if rng.random() < 0.3 else file


def _changed(rng: random.Random, fields: list[Field]) -> list[Field]:
    at = rng.randrange(len(fields))
    kind = rng.randrange(6)
    if kind == 0:
        return [*fields[:at], *fields[at + 1 :]] or fields
    if kind == 1:
        return [*fields, fields[at]]
    if kind == 2:
        return [*fields, *(Field(b"f%d" % number, b"") for number in range(rng.choice((20, 1_023, 1_100))))]
    text = tokens.text(rng).encode(errors="surrogatepass") if rng.random() < 0.7 else rng.choice(tokens.BROKEN)
    old = fields[at]
    changed = old._replace(name=text[:300]) if kind == 3 else old._replace(value=text)
    return [*fields[:at], changed, *fields[at + 1 :]]


def _joined(rng: random.Random, fields: list[Field], boundary: bytes) -> bytes:
    made = []
    for field in fields:
        head = b'Content-Disposition: form-data; name="' + field.name + b'"' + field.more
        if rng.random() < 0.03:
            head = rng.choice(_HEADS)
        made.append(b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + field.value + b"\r\n")
    end = b"--" + boundary + (b"--\r\n" if rng.random() < 0.95 else rng.choice((b"", b"\r\n", b"--", b"--x", b"-")))
    return b"".join([*made, end])
