"""Protobuf on the wire, without its schema: fields are dropped, doubled, renumbered, retyped, their lengths wrong."""

from __future__ import annotations

import random
from typing import Any

from fuzz import tokens
from fuzz.mutators import octets

VARINT, EIGHT, NESTED, FOUR = 0, 1, 2, 5
Field = list[Any]
"""Number, wire type, and the value: a number, bytes, or the fields of a message."""


def varint(value: int) -> bytes:
    """Return a number, seven bits a byte; one below zero as its 64 bits."""
    value %= 1 << 70
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def parsed(data: bytes) -> list[Field] | None:
    """Return the fields of a message; None if it is none."""
    fields: list[Field] = []
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire, number = key & 7, key >> 3
        if at < 0 or not number or wire not in (VARINT, EIGHT, NESTED, FOUR):
            return None
        if wire == VARINT:
            value, at = _varint(data, at)
            if at < 0:
                return None
            fields.append([number, wire, value])
            continue
        size = {EIGHT: 8, FOUR: 4}.get(wire, 0)
        if wire == NESTED:
            size, at = _varint(data, at)
        if at < 0 or at + size > len(data):
            return None
        part = data[at : at + size]
        at += size
        fields.append([number, wire, (parsed(part) or part) if wire == NESTED else part])
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends; -1 if it does not."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, -1


def dumped(fields: list[Field]) -> bytes:
    """Return a message."""
    out = []
    for number, wire, value in fields:
        out.append(varint(number << 3 | wire))
        if isinstance(value, list):
            value = dumped(value)
        if isinstance(value, int):
            out.append(varint(value))
        elif wire == NESTED:
            out += [varint(len(value)), value]
        else:
            out.append(bytes(value))
    return b"".join(out)


def mutated(rng: random.Random, message: bytes, most: int = 3) -> bytes:
    """Return ``message`` with one to ``most`` of its fields changed, anywhere in it, mostly one."""
    fields = parsed(message)
    if fields is None:
        return octets.mutated(rng, message)
    for _ in range(rng.choice((1, 1, 1, 2, most))):
        _change(rng, fields)
    made = dumped(fields)
    if rng.random() < 0.1:
        made = octets.mutated(rng, made, 2)
    return made[: octets.LARGEST]


def _messages(fields: list[Field]) -> list[list[Field]]:
    """Return a message and all that are in it."""
    found = [fields]
    for each in found:
        found += [field[2] for field in each if isinstance(field[2], list)]
    return found


def _change(rng: random.Random, fields: list[Field]) -> None:
    message = rng.choice(_messages(fields))
    kind = rng.randrange(10)
    if not message or kind == 0:
        message.insert(rng.randrange(len(message) + 1), _any_field(rng))
        return
    at = rng.randrange(len(message))
    field = message[at]
    if kind == 1:
        del message[at]
    elif kind == 2:
        message[at:at] = [list(field)] * rng.choice((1, 2, 100))
    elif kind == 3:
        message.insert(rng.randrange(len(message)), message.pop(at))
    elif kind == 4:
        field[0] = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 99, 19_000, 2**29 - 1, 2**29))
    elif kind == 5:
        field[1] = rng.choice((VARINT, EIGHT, NESTED, FOUR, 3, 4, 6, 7))
    elif kind == 6:
        field[2] = _deep(rng) if field[1] == NESTED else tokens.number(rng)
    else:
        field[2] = _another_value(rng, field)


def _another_value(rng: random.Random, field: Field) -> Any:
    _, wire, value = field
    if wire == VARINT:
        return tokens.number(rng)
    if wire != NESTED:
        return rng.randbytes(8 if wire == EIGHT else 4)
    data = dumped(value) if isinstance(value, list) else bytes(value) if isinstance(value, bytes) else b""
    choice = rng.randrange(4)
    if choice == 0:
        return tokens.text(rng).encode(errors="surrogatepass")
    if choice == 1:
        return data + rng.choice(tokens.BROKEN)
    return octets.mutated(rng, data, 2) if choice == 2 else b""


def _any_field(rng: random.Random) -> Field:
    wire = rng.choice((VARINT, NESTED, NESTED, EIGHT, FOUR))
    return [rng.randint(1, 12), wire, _another_value(rng, [0, wire, b""])]


def _deep(rng: random.Random) -> bytes:
    made = b"\x08\x01"
    for _ in range(rng.choice((5, 99, 101, 400))):
        made = bytes((rng.randint(1, 6) << 3 | NESTED,)) + varint(len(made)) + made
    return made
