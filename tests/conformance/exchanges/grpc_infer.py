"""Inference over gRPC: raw and typed tensors, and every way to get them wrong."""

import struct
from typing import Any

from conformance.exchange import Grpc, grpc_infer, grpc_tensor, grpc_wanted
from conformance.exchanges.scenes import GOOD
from nerite.wire import grpc_service as pb

SCENE = GOOD

BLOB = struct.pack("<4i", 1, 2, 3, 4)
ROW = struct.pack("<2i", 5, 6)
INTS = {"int_contents": [1, 2, 3, 4]}


def a(**fields: Any) -> Any:
    return grpc_tensor("A", "INT32", [4], **fields)


def b(**fields: Any) -> Any:
    return grpc_tensor("B", "INT32", [4], **fields)


def row(shape: tuple[int, ...] = (1, 2), datatype: str = "INT32", **fields: Any) -> Any:
    return grpc_tensor("IN", datatype, shape, **fields)


def text(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def typed(datatype: str, field: str, values: list[Any]) -> Grpc:
    return grpc_infer("types", grpc_tensor(f"IN_{datatype}", datatype, [len(values)], {field: values}))


EXCHANGES = {
    # ---- What works ----
    "raw": grpc_infer("pair", a(), b(), raw=[BLOB, BLOB]),
    "typed": grpc_infer("pair", a(contents=INTS), b(contents=INTS)),
    "id": grpc_infer("echo", row(), raw=[ROW], id="my \u2603 id"),
    "one output": grpc_infer("pair", a(), b(), raw=[BLOB, BLOB], outputs=[grpc_wanted("DIFFERENCE")]),
    "outputs in another order": grpc_infer(
        "pair", a(), b(), raw=[BLOB, BLOB], outputs=[grpc_wanted("DIFFERENCE"), grpc_wanted("SUM")]
    ),
    "version 1": grpc_infer("versions", row((1, 1)), raw=[ROW[:4]], model_version="1"),
    "newest version": grpc_infer("versions", row((1, 1)), raw=[ROW[:4]]),
    "full batch": grpc_infer("echo", row((8, 2)), raw=[ROW * 8]),
    "texts": grpc_infer("texts", row((3,), "BYTES"), raw=[text(b"", b"\xff\x00", b"abc")]),
    "typed texts": grpc_infer("texts", row((2,), "BYTES", contents={"bytes_contents": [b"\xff\x00", b"abc"]})),
    "BOOL": typed("BOOL", "bool_contents", [True, False]),
    "UINT8": typed("UINT8", "uint_contents", [0, 255]),
    "UINT8 too large": typed("UINT8", "uint_contents", [256]),
    "UINT16": typed("UINT16", "uint_contents", [0, 65535]),
    "UINT32": typed("UINT32", "uint_contents", [4294967295]),
    "UINT64": typed("UINT64", "uint64_contents", [18446744073709551615]),
    "INT8": typed("INT8", "int_contents", [-128, 127]),
    "INT8 too large": typed("INT8", "int_contents", [128]),
    "INT16": typed("INT16", "int_contents", [-32768, 32767]),
    "INT64": typed("INT64", "int64_contents", [-9223372036854775808]),
    "FP32": typed("FP32", "fp32_contents", [0.5, float("inf")]),
    "FP64": typed("FP64", "fp64_contents", [0.1]),
    "FP16 raw": grpc_infer("types", grpc_tensor("IN_FP16", "FP16", [2]), raw=[b"\x00\x3e\x00\xc0"]),
    "FP16 typed": typed("FP16", "fp32_contents", [0.5]),
    "no inputs where none is needed": grpc_infer("types"),
    "no inputs where none is needed for a batch": grpc_infer("free"),
    "zero elements raw": grpc_infer("grid", row((0, 3), "FP32"), raw=[b""]),
    "zero elements typed": grpc_infer("grid", row((0, 3), "FP32", contents={"fp32_contents": []})),
    "zero elements without anything": grpc_infer("grid", row((0, 3), "FP32")),
    "optional input left out": grpc_infer(
        "options", *(grpc_tensor(name, "INT32", [1], {"int_contents": [1]}) for name in ("NEEDED", "ALSO_NEEDED"))
    ),
    # ---- Model and version ----
    "unknown model": grpc_infer("none", row(), raw=[ROW]),
    "no model": grpc_infer("", row(), raw=[ROW]),
    **{f"a model called '{name}'": grpc_infer(name, row(), raw=[ROW]) for name in (".", "..", " ", "/", "../echo")},
    **{
        f"is a model called '{name}' ready": Grpc("ModelReady", pb.ModelReadyRequest(name=name))
        for name in (".", "..", " ", "ech", "echo ")
    },
    "what is a model called '.'": Grpc("ModelMetadata", pb.ModelMetadataRequest(name=".")),
    "unknown version": grpc_infer("versions", row((1, 1)), raw=[ROW[:4]], model_version="2"),
    "version that is no number": grpc_infer("versions", row((1, 1)), raw=[ROW[:4]], model_version="x"),
    "version zero": grpc_infer("versions", row((1, 1)), raw=[ROW[:4]], model_version="0"),
    "version negative": grpc_infer("versions", row((1, 1)), raw=[ROW[:4]], model_version="-1"),
    # ---- Inputs and outputs ----
    "input missing": grpc_infer("pair", a(), raw=[BLOB]),
    "all inputs missing": grpc_infer("pair"),
    "input unexpected": grpc_infer("pair", a(), grpc_tensor("C", "INT32", [4]), raw=[BLOB, BLOB]),
    "one input too many": grpc_infer("pair", a(), b(), grpc_tensor("C", "INT32", [4]), raw=[BLOB] * 3),
    "input twice": grpc_infer("pair", a(), a(), raw=[BLOB, BLOB]),
    "input without a name": grpc_infer("echo", grpc_tensor("", "INT32", [1, 2]), raw=[ROW]),
    "output unexpected": grpc_infer("pair", a(), b(), raw=[BLOB, BLOB], outputs=[grpc_wanted("PRODUCT")]),
    "output twice": grpc_infer("echo", row(), raw=[ROW], outputs=[grpc_wanted("OUT"), grpc_wanted("OUT")]),
    "datatype of another kind": grpc_infer("echo", row(datatype="INT64"), raw=[ROW + ROW]),
    "datatype unknown": grpc_infer("echo", row(datatype="INT31"), raw=[ROW]),
    "datatype empty": grpc_infer("echo", row(datatype=""), raw=[ROW]),
    "error with an id": grpc_infer("echo", row((1, 3)), raw=[ROW + ROW[:4]], id="seven"),
    # ---- Shapes and sizes ----
    "wrong shape": grpc_infer("echo", row((1, 3)), raw=[ROW + ROW[:4]]),
    "no shape": grpc_infer("echo", row(()), raw=[ROW]),
    "negative dimension": grpc_infer("echo", row((1, -2)), raw=[ROW]),
    "dimension of minus one": grpc_infer("grid", row((-1, 2), "FP32"), raw=[ROW]),
    "elements beyond 64 bits": grpc_infer("grid", row((2**62, 2**62), "FP32"), raw=[ROW]),
    "bytes beyond 64 bits": grpc_infer("grid", row((1, 2**62), "FP32"), raw=[ROW]),
    "batch of zero": grpc_infer("echo", row((0, 2)), raw=[b""]),
    "batch too large": grpc_infer("echo", row((9, 2)), raw=[ROW * 9]),
    "different batches": grpc_infer(
        "batch", grpc_tensor("A", "FP32", [1, 2]), grpc_tensor("B", "FP32", [2, 1]), raw=[ROW, ROW]
    ),
    "one byte too few": grpc_infer("echo", row(), raw=[ROW[:-1]]),
    "one byte too many": grpc_infer("echo", row(), raw=[ROW + b"x"]),
    "typed: one too few": grpc_infer("echo", row(contents={"int_contents": [1]})),
    "typed: one too many": grpc_infer("echo", row(contents={"int_contents": [1, 2, 3]})),
    "texts: one too few": grpc_infer("texts", row((2,), "BYTES"), raw=[text(b"a")]),
    "texts: one too many": grpc_infer("texts", row((1,), "BYTES"), raw=[text(b"a", b"b")]),
    "texts: half a length": grpc_infer("texts", row((2,), "BYTES"), raw=[text(b"a") + b"\x01"]),
    "texts: half a text": grpc_infer("texts", row((1,), "BYTES"), raw=[text(b"abc")[:-1]]),
    "typed texts: one too few": grpc_infer("texts", row((2,), "BYTES", contents={"bytes_contents": [b"a"]})),
    "typed texts: one too many": grpc_infer("texts", row((1,), "BYTES", contents={"bytes_contents": [b"a", b"b"]})),
    # ---- Where the data is ----
    "no data": grpc_infer("echo", row()),
    "raw data missing for the second input": grpc_infer("pair", a(), b(), raw=[BLOB]),
    "raw data for one input too many": grpc_infer("echo", row(), raw=[ROW, ROW]),
    "raw and typed": grpc_infer("echo", row(contents={"int_contents": [1, 2]}), raw=[ROW]),
    "raw for one, typed for the other": grpc_infer("pair", a(), b(contents=INTS), raw=[BLOB]),
    "typed for one, nothing for the other": grpc_infer("pair", a(contents=INTS), b()),
    "typed in another field": grpc_infer("echo", row(contents={"int64_contents": [1, 2]})),
    "typed in two fields": grpc_infer("echo", row(contents={"int_contents": [1, 2], "fp32_contents": [1, 2]})),
    "empty contents": grpc_infer("echo", row(contents={})),
    "shared memory of no such region": grpc_infer("echo", row(shared_memory_region="r", shared_memory_byte_size=8)),
    "shared memory without a size": grpc_infer("echo", row(shared_memory_region="r")),
    "shared memory and raw": grpc_infer("echo", row(shared_memory_region="r", shared_memory_byte_size=8), raw=[ROW]),
    "shared memory region as number": grpc_infer("echo", row(shared_memory_region=3, shared_memory_byte_size=8)),
    "shared memory and classification": grpc_infer(
        "echo",
        row(),
        raw=[ROW],
        outputs=[grpc_wanted("OUT", shared_memory_region="r", shared_memory_byte_size=8, classification=1)],
    ),
    "unknown parameter of an input": grpc_infer("echo", row(colour="red"), raw=[ROW]),
    "unknown parameter of an output": grpc_infer("echo", row(), raw=[ROW], outputs=[grpc_wanted("OUT", colour="red")]),
    "binary_data of an output": grpc_infer("echo", row(), raw=[ROW], outputs=[grpc_wanted("OUT", binary_data=False)]),
    # ---- Which mistake is told first ----
    "unknown model and reserved parameter": grpc_infer("none", parameters={"triton_x": 1}),
    "wrong parameter and input missing": grpc_infer("pair", a(), raw=[BLOB], parameters={"priority": "high"}),
    "wrong type and wrong shape": grpc_infer("pair", grpc_tensor("A", "FP32", [3]), b(), raw=[BLOB, BLOB]),
    "no data and wrong shape": grpc_infer("pair", grpc_tensor("A", "INT32", [3]), b()),
}
