"""Y = relu(X) in formats of frameworks that are too large to have for this: TFLite and PaddlePaddle, byte for byte."""

from __future__ import annotations

import flatbuffers

# ---- TFLite: a flat buffer. Numbers of fields are those of its schema. ----

RELU = 19


def tflite(rows: int = 1, columns: int = 4) -> bytes:
    builder = flatbuffers.Builder()
    empty = _table(builder, {})
    tensors = []
    for number, name in enumerate((b"X", b"Y")):
        shape = _numbers(builder, [rows, columns])
        tensors.append(_table(builder, {0: shape, 3: builder.CreateString(name)}, {2: number + 1}))
    inputs, outputs = _numbers(builder, [0]), _numbers(builder, [1])
    operators = _vector(builder, [_table(builder, {1: inputs, 2: outputs})])
    subgraph = _table(builder, {0: _vector(builder, tensors), 1: inputs, 2: outputs, 3: operators})
    codes = _vector(builder, [_table(builder, {}, {2: 1, 3: RELU}, {0: RELU})])
    buffers = _vector(builder, [empty, empty, empty])
    subgraphs = _vector(builder, [subgraph])
    model = _table(builder, {1: codes, 2: subgraphs, 4: buffers}, {0: 3})
    builder.Finish(model, b"TFL3")
    return bytes(builder.Output())


def _table(
    builder: flatbuffers.Builder,
    offsets: dict[int, int],
    numbers: dict[int, int] | None = None,
    small: dict[int, int] | None = None,
) -> int:
    builder.StartObject(8)
    for field, offset in offsets.items():
        builder.PrependUOffsetTRelativeSlot(field, offset, 0)
    for field, number in (numbers or {}).items():
        builder.PrependInt32Slot(field, number, 0)
    for field, number in (small or {}).items():
        builder.PrependInt8Slot(field, number, 0)
    return int(builder.EndObject())


def _vector(builder: flatbuffers.Builder, offsets: list[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def _numbers(builder: flatbuffers.Builder, numbers: list[int]) -> int:
    builder.StartVector(4, len(numbers), 4)
    for number in reversed(numbers):
        builder.PrependInt32(number)
    return int(builder.EndVector())


# ---- PaddlePaddle: a protobuf message, `ProgramDesc` of its framework.proto. ----

FP32, LOD_TENSOR, FEED_MINIBATCH, FETCH_LIST = 5, 7, 9, 10


def paddle(columns: int = 4, *, weights: bool = False) -> bytes:
    """``weights``: one more variable stands in it that is kept beside it, and that nothing takes."""
    variables = [_variable(name, [-1, columns]) for name in ("X", "Y")]
    if weights:
        variables.append(_variable("W", [columns]) + _number(3, 1))
    variables += [_holder("feed", FEED_MINIBATCH), _holder("fetch", FETCH_LIST)]
    operators = [
        _operator("feed", {"X": "feed"}, {"Out": "X"}, column=True),
        _operator("relu", {"X": "X"}, {"Out": "Y"}),
        _operator("fetch", {"X": "Y"}, {"Out": "fetch"}, column=True),
    ]
    block = _number(1, 0) + _number(2, 0)
    block += b"".join(_message(3, one) for one in variables) + b"".join(_message(4, one) for one in operators)
    return _message(1, block) + _message(4, _number(1, 0))


def _variable(name: str, dims: list[int]) -> bytes:
    tensor = _number(1, FP32) + b"".join(_number(2, dim) for dim in dims)
    kind = _number(1, LOD_TENSOR) + _message(3, _message(1, tensor))
    return _text(1, name) + _message(2, kind)


def _holder(name: str, kind: int) -> bytes:
    return _text(1, name) + _message(2, _number(1, kind)) + _number(3, 1)


def _operator(kind: str, inputs: dict[str, str], outputs: dict[str, str], *, column: bool = False) -> bytes:
    sides = b"".join(
        _message(field, _text(1, parameter) + _text(2, argument))
        for field, side in ((1, inputs), (2, outputs))
        for parameter, argument in side.items()
    )
    attribute = _message(4, _text(1, "col") + _number(2, 0) + _number(3, 0)) if column else b""
    return sides + _text(3, kind) + attribute


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, content: str) -> bytes:
    return _message(field, content.encode())
