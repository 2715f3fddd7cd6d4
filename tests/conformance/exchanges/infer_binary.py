"""Inference with tensors behind the JSON, and with a body that is one tensor."""

import struct

from conformance.exchange import Http, binary_infer, dumped, infer, post, tensor, wanted
from conformance.exchanges.scenes import GOOD

SCENE = GOOD

BLOB = struct.pack("<4i", 1, 2, 3, 4)
ROW = struct.pack("<2i", 5, 6)
FORM = b'--x\r\nContent-Disposition: form-data; name="IN"\r\n\r\nhello\r\n--x--\r\n'
HEAD = dumped({"inputs": [tensor("IN", "INT32", [1, 2], binary_data_size=8)]})


def a() -> dict[str, object]:
    return tensor("A", "INT32", [4])


def b(data: object = None, **parameters: object) -> dict[str, object]:
    return tensor("B", "INT32", [4], data, **parameters)


def row(**parameters: object) -> dict[str, object]:
    return tensor("IN", "INT32", [1, 2], **parameters)


def text(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def raw(model: str, body: bytes, **headers: str) -> Http:
    return post(f"/v2/models/{model}/infer", body, **headers)


TYPES = {
    "BOOL": b"\x01\x00",
    "UINT8": b"\x00\xff",
    "UINT16": b"\x00\x00\xff\xff",
    "UINT64": b"\xff" * 16,
    "INT8": b"\x80\x7f",
    "INT64": b"\x80" * 16,
    "FP16": struct.pack("<2e", 1.5, -2),
    "FP32": struct.pack("<2f", 1.5, float("nan")),
    "FP64": struct.pack("<2d", 0.1, float("inf")),
}

EXCHANGES = {
    # ---- What works ----
    "binary in, JSON out": binary_infer("pair", [a(), b()], BLOB, BLOB),
    "binary in and out": binary_infer("pair", [a(), b()], BLOB, BLOB, parameters={"binary_data_output": True}),
    "binary and JSON mixed": binary_infer("pair", [a(), b([1, 1, 1, 1])], BLOB),
    "JSON first, then binary": binary_infer("pair", [b([1, 1, 1, 1]), a()], BLOB),
    "JSON in, binary out": infer(
        "pair",
        tensor("A", "INT32", [4], [1, 2, 3, 4]),
        tensor("B", "INT32", [4], [1, 2, 3, 4]),
        outputs=[wanted("SUM", binary_data=True), wanted("DIFFERENCE", binary_data=False)],
    ),
    "all binary by default, one listed": binary_infer(
        "pair", [a(), b()], BLOB, BLOB, parameters={"binary_data_output": True}, outputs=[wanted("SUM")]
    ),
    "all binary by default, one listed as JSON": binary_infer(
        "pair",
        [a(), b()],
        BLOB,
        BLOB,
        parameters={"binary_data_output": True},
        outputs=[wanted("SUM", binary_data=False), wanted("DIFFERENCE", binary_data=True)],
    ),
    "binary_data_output false": binary_infer("pair", [a(), b()], BLOB, BLOB, parameters={"binary_data_output": False}),
    "binary_data_output of another type": binary_infer(
        "pair", [a(), b()], BLOB, BLOB, parameters={"binary_data_output": 1}
    ),
    "binary_data of another type": binary_infer("pair", [a(), b()], BLOB, BLOB, outputs=[wanted("SUM", binary_data=1)]),
    "binary with an id": binary_infer("echo", [row()], ROW, id="7", outputs=[wanted("OUT", binary_data=True)]),
    "white space after the JSON": post(
        "/v2/models/echo/infer", HEAD + b"   " + ROW, Inference_Header_Content_Length=str(len(HEAD) + 3)
    ),
    **{
        f"{name} there and back": binary_infer(
            "types", [tensor(f"IN_{name}", name, [2])], blob, parameters={"binary_data_output": True}
        )
        for name, blob in TYPES.items()
    },
    "FP16 out as JSON": binary_infer("types", [tensor("IN_FP16", "FP16", [2])], TYPES["FP16"]),
    "NaN out as JSON": binary_infer("types", [tensor("IN_FP32", "FP32", [2])], TYPES["FP32"]),
    "infinity out as JSON": binary_infer("types", [tensor("IN_FP64", "FP64", [2])], TYPES["FP64"]),
    "BOOL of other bytes": binary_infer("types", [tensor("IN_BOOL", "BOOL", [3])], b"\x02\xff\x00"),
    "BYTES there and back": binary_infer(
        "texts", [tensor("IN", "BYTES", [3])], text(b"", b"\xff\x00", b"abc"), parameters={"binary_data_output": True}
    ),
    "BYTES that are not UTF-8, out as JSON": binary_infer("texts", [tensor("IN", "BYTES", [1])], text(b"\xff\x00")),
    "no elements": binary_infer("grid", [tensor("IN", "FP32", [0, 3])], b"", parameters={"binary_data_output": True}),
    "no texts": binary_infer("texts", [tensor("IN", "BYTES", [0])], b"", parameters={"binary_data_output": True}),
    # ---- Sizes ----
    "one byte too few": binary_infer("echo", [row()], ROW[:-1]),
    "one byte too many": binary_infer("echo", [row()], ROW + b"x"),
    "size smaller than the shape": binary_infer("echo", [row(binary_data_size=4)], ROW[:4]),
    "size larger than the shape": binary_infer("echo", [row(binary_data_size=12)], ROW + ROW[:4]),
    "size larger than the body": binary_infer("echo", [row(binary_data_size=80)], ROW),
    "size smaller than the body": binary_infer("echo", [row(binary_data_size=8)], ROW + ROW),
    "size of zero": binary_infer("echo", [row(binary_data_size=0)]),
    "size negative": binary_infer("echo", [row(binary_data_size=-8)], ROW),
    "size as text": binary_infer("echo", [row(binary_data_size="8")], ROW),
    "size with a fraction": binary_infer("echo", [row(binary_data_size=8.5)], ROW),
    "second input missing": binary_infer("pair", [a(), b(binary_data_size=16)], BLOB),
    "data and size": binary_infer("echo", [tensor("IN", "INT32", [1, 2], [1, 2], binary_data_size=8)], ROW),
    "data and no size": binary_infer("echo", [tensor("IN", "INT32", [1, 2], [1, 2])], ROW),
    "neither data nor size": post("/v2/models/echo/infer", dumped({"inputs": [row()]})),
    "size of zero and data": infer("echo", tensor("IN", "INT32", [1, 2], [1, 2], binary_data_size=0)),
    "wrong shape": binary_infer("echo", [tensor("IN", "INT32", [1, 3])], ROW + ROW[:4]),
    "wrong type": binary_infer("echo", [tensor("IN", "INT64", [1, 2])], ROW + ROW),
    # ---- BYTES ----
    "BYTES: one too few": binary_infer("texts", [tensor("IN", "BYTES", [2])], text(b"a")),
    "BYTES: one too many": binary_infer("texts", [tensor("IN", "BYTES", [1])], text(b"a", b"b")),
    "BYTES: half a length": binary_infer("texts", [tensor("IN", "BYTES", [2])], text(b"a") + b"\x01\x00"),
    "BYTES: half a text": binary_infer("texts", [tensor("IN", "BYTES", [1])], text(b"abc")[:-1]),
    "BYTES: empty": binary_infer("texts", [tensor("IN", "BYTES", [1])], b""),
    "BYTES: huge length": binary_infer("texts", [tensor("IN", "BYTES", [1])], b"\xff\xff\xff\xffabc"),
    # ---- The header's length ----
    "length of zero": binary_infer("echo", [row()], ROW, header_length="0"),
    "length left out": binary_infer("echo", [row()], ROW, header_length=None),
    "length left out for JSON with a size": post("/v2/models/echo/infer", HEAD),
    "length is text": binary_infer("echo", [row()], ROW, header_length="abc"),
    "length is text after digits": binary_infer("echo", [row()], ROW, header_length="12abc"),
    "length empty": binary_infer("echo", [row()], ROW, header_length=""),
    "length negative": binary_infer("echo", [row()], ROW, header_length="-5"),
    "length larger than the body": binary_infer("echo", [row()], ROW, header_length="5000"),
    "length of the whole body": binary_infer("echo", [row()], ROW, header_length=str(len(HEAD) + 8)),
    "length too short": binary_infer("echo", [row()], ROW, header_length=str(len(HEAD) - 1)),
    "length too long by one": binary_infer("echo", [row()], ROW, header_length=str(len(HEAD) + 1)),
    "length beyond 32 bits": binary_infer("echo", [row()], ROW, header_length="4294967296"),
    "length with blanks": binary_infer("echo", [row()], ROW, header_length=f" {len(HEAD)} "),
    "length twice": Http(
        "POST",
        "/v2/models/echo/infer",
        HEAD + ROW,
        (("Inference-Header-Content-Length", str(len(HEAD))), ("Inference-Header-Content-Length", "3")),
    ),
    "length in other letters": Http(
        "POST", "/v2/models/echo/infer", HEAD + ROW, (("INFERENCE-header-content-LENGTH", str(len(HEAD))),)
    ),
    # ---- A body that is one tensor ----
    "raw": raw("echo", ROW, Inference_Header_Content_Length="0"),
    "raw of a wrong size": raw("echo", ROW + b"x", Inference_Header_Content_Length="0"),
    "raw batch": raw("echo", ROW + ROW, Inference_Header_Content_Length="0"),
    "raw without the header": raw("echo", ROW),
    "raw and empty": raw("echo", b"", Inference_Header_Content_Length="0"),
    "raw text": raw("text", text(b"hello"), Inference_Header_Content_Length="0"),
    "raw text without its length": raw("text", b"hello", Inference_Header_Content_Length="0"),
    "raw text for a variable shape": raw("texts", text(b"hello"), Inference_Header_Content_Length="0"),
    "raw for two inputs": raw("pair", BLOB, Inference_Header_Content_Length="0"),
    "raw for optional inputs": raw("types", BLOB, Inference_Header_Content_Length="0"),
    "raw for two variable dimensions": raw("grid", BLOB, Inference_Header_Content_Length="0"),
    "raw for one variable dimension": raw("line", BLOB * 3, Inference_Header_Content_Length="0"),
    "raw for one variable dimension, odd size": raw("line", BLOB + BLOB[:8], Inference_Header_Content_Length="0"),
    "raw for a variable dimension of a batch": raw("ragged", BLOB, Inference_Header_Content_Length="0"),
    "raw for an unknown model": raw("none", ROW, Inference_Header_Content_Length="0"),
    "raw for a version": raw("versions/versions/1", ROW[:4], Inference_Header_Content_Length="0"),
    "raw as an image": raw("text", text(b"hello"), Inference_Header_Content_Length="0", content_type="image/png"),
    "JSON as an image": raw("text", b'{"inputs":[]}', content_type="image/png"),
    "a file": raw("text", b"\x89PNG", content_type="image/png"),
    "a form": raw("text", FORM, content_type="multipart/form-data; boundary=x"),
    "a form as curl sends one": raw(
        "echo",
        dumped({"inputs": [tensor("IN", "INT32", [1, 2], [5, 6])]}),
        content_type="application/x-www-form-urlencoded",
    ),
    "raw as octets": raw("echo", ROW, content_type="application/octet-stream"),
}
