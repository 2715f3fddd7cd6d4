"""Inference with everything in the JSON: types, shapes, data, and every way to get it wrong."""

from conformance.exchange import Http, dumped, infer, post, tensor, wanted
from conformance.exchanges.scenes import GOOD

SCENE = GOOD

A = tensor("A", "INT32", [4], [1, 2, 3, 4])
B = tensor("B", "INT32", [4], [10, 20, 30, 40])
ROW = tensor("IN", "INT32", [1, 2], [1, 2])


def typed(datatype: str, data: object, shape: list[object] | None = None, name: str | None = None) -> Http:
    length = len(data) if isinstance(data, list) else 1
    return infer("types", tensor(name or f"IN_{datatype}", datatype, shape or [length], data))


def body(model: str, text: str | bytes) -> Http:
    return post(f"/v2/models/{model}/infer", text if isinstance(text, bytes) else text.encode())


def described(**fields: object) -> Http:
    """An inference whose only input has exactly these fields."""
    return infer("echo", fields)


INTEGERS = {
    "UINT8": (0, 255),
    "UINT16": (0, 65535),
    "UINT32": (0, 4294967295),
    "UINT64": (0, 18446744073709551615),
    "INT8": (-128, 127),
    "INT16": (-32768, 32767),
    "INT32": (-2147483648, 2147483647),
    "INT64": (-9223372036854775808, 9223372036854775807),
}

EXCHANGES = {
    # ---- What works ----
    "plain": infer("pair", A, B),
    "id": infer("pair", A, B, id="my id"),
    "empty id": infer("pair", A, B, id=""),
    "id that is not UTF-8": body("pair", infer("pair", A, B, id="me?").body.replace(b"?", b"\xff")),
    "id of 5,000 characters": infer("pair", A, B, id="x" * 5_000),
    "member that is not UTF-8": body("pair", infer("pair", A, B, more="?").body.replace(b"?", b"\xff")),
    "data that is not UTF-8": body(
        "types", infer("types", tensor("IN_BYTES", "BYTES", [1], ["me?"])).body.replace(b"?", b"\xff")
    ),
    "id of all kinds of letters": infer("pair", A, B, id='é "quoted" \\ \u2603 \U0001f600 </b>'),
    "id with a line end": infer("pair", A, B, id="a\nb"),
    "empty parameters": infer("pair", A, B, parameters={}),
    "unknown keys": infer("pair", A, {**B, "hint": 3}, comment="none of the protocol"),
    "inputs in another order": infer("pair", B, A),
    "nested data": infer("echo", tensor("IN", "INT32", [2, 2], [[1, 2], [3, 4]])),
    "flat data for two dimensions": infer("echo", tensor("IN", "INT32", [2, 2], [1, 2, 3, 4])),
    "data nested another way": infer("echo", tensor("IN", "INT32", [2, 2], [[1, 2, 3, 4]])),
    "unevenly nested data": infer("echo", tensor("IN", "INT32", [2, 2], [1, [2, 3], [[4]]])),
    "scalar data": infer("options", tensor("NEEDED", "INT32", [1], 5), tensor("ALSO_NEEDED", "INT32", [1], [5])),
    "a zero behind it": body("echo", infer("echo", ROW).body + b" \0\1, and more"),
    "zeros before its end": [
        body("echo", text)
        for text in (b"\0", b"[\0", b'{"inputs"\0', b'{"id":"a\0"}', b'["\\u12\0"]', b'["\\\0"]', b"[1\0]")
    ],
    "white space": body(
        "echo", ' \n{ "inputs" : [ { "name":"IN",\t"shape":[1,2],"datatype":"INT32","data":[1,2]}]}\r\n '
    ),
    "byte order mark": body("echo", b"\xef\xbb\xbf" + infer("echo", ROW).body),
    "keys twice": body(
        "echo",
        '{"inputs":[{"name":"IN","shape":[1,2],"datatype":"INT32","data":[1,2],"data":[3,4]}],"id":"a","id":"b"}',
    ),
    "one output": infer("pair", A, B, outputs=[wanted("DIFFERENCE")]),
    "outputs in another order": infer("pair", A, B, outputs=[wanted("DIFFERENCE"), wanted("SUM")]),
    "no outputs listed": infer("pair", A, B, outputs=[]),
    "content type of another kind": infer("echo", ROW, headers={"content_type": "text/plain"}),
    "version 1": infer("versions/versions/1", tensor("IN", "INT32", [1, 1], [0])),
    "version 3": infer("versions/versions/3", tensor("IN", "INT32", [1, 1], [0])),
    "newest version": infer("versions", tensor("IN", "INT32", [1, 1], [0])),
    "batch of two": infer(
        "batch", tensor("A", "FP32", [2, 2], [1, 2, 3, 4]), tensor("B", "FP32", [2, 3], [1, 2, 3, 4, 5, 6])
    ),
    "reshaped": infer("scalar", tensor("IN", "FP32", [3, 1], [1.5, 2.5, 3.5])),
    "optional input left out": infer(
        "options", tensor("NEEDED", "INT32", [1], [1]), tensor("ALSO_NEEDED", "INT32", [1], [1])
    ),
    "optional input given": infer(
        "options",
        *(tensor(name, "INT32", [1], [1]) for name in ("NEEDED", "ALSO_NEEDED", "MAYBE")),
    ),
    "no inputs where none is needed": infer("types"),
    "no inputs where none is needed for a batch": infer("free"),
    "some inputs where none is needed for a batch": infer("free", tensor("B", "INT32", [2, 1], [1, 2])),
    "inputs left out where none is needed": body("types", "{}"),
    # ---- Types ----
    **{f"{name} limits": typed(name, list(limits)) for name, limits in INTEGERS.items()},
    **{f"{name} too large": typed(name, [limits[1] + 1]) for name, limits in INTEGERS.items()},
    **{f"{name} too small": typed(name, [limits[0] - 1]) for name, limits in INTEGERS.items()},
    "BOOL": typed("BOOL", [True, False]),
    "BOOL as numbers": typed("BOOL", [1, 0]),
    "BOOL as text": typed("BOOL", ["true"]),
    "numbers as BOOL": typed("INT32", [True]),
    "FP32": typed("FP32", [0, 1, -1, 1.5, 0.1, 1e-40, 3.4028234663852886e38, 16777217, 1e10, -0.0]),
    "FP32 too large": typed("FP32", [1e39]),
    "FP64": typed("FP64", [0, 0.1, 1e300, -2.5e-300, 1 / 3, 12345678901234567890, 1e22, 123456.789]),
    "FP64 too large": body("types", '{"inputs":[{"name":"IN_FP64","shape":[1],"datatype":"FP64","data":[1e400]}]}'),
    "NaN and infinities": body(
        "types", '{"inputs":[{"name":"IN_FP32","shape":[3],"datatype":"FP32","data":[NaN,Infinity,-Infinity]}]}'
    ),
    "FP32 as text": typed("FP32", ["1.5"]),
    "null in data": typed("FP32", [None]),
    "object in data": typed("FP32", [{}]),
    "INT32 with a fraction": typed("INT32", [1.5]),
    "INT32 with an empty fraction": body(
        "types", '{"inputs":[{"name":"IN_INT32","shape":[1],"datatype":"INT32","data":[1.0]}]}'
    ),
    "INT32 with an exponent": body(
        "types", '{"inputs":[{"name":"IN_INT32","shape":[1],"datatype":"INT32","data":[1e2]}]}'
    ),
    "INT32 as text": typed("INT32", ["1"]),
    "FP16 in": typed("FP16", [1.5]),
    "FP16 in, empty": typed("FP16", [], [0]),
    "BF16 in": infer("types", tensor("IN_FP16", "BF16", [1], [1.5])),
    "FP16 out": infer("classes", tensor("IN", "FP32", [1, 4], [1, 2, 3, 4]), outputs=[wanted("HALF")]),
    "BYTES": infer("texts", tensor("IN", "BYTES", [4], ["", "a", "é\u2603\U0001f600", 'tab\t"quote" \\ / \x01\x7f'])),
    "BYTES with a zero": infer("texts", tensor("IN", "BYTES", [1], ["a\x00b"])),
    "BYTES with half a surrogate pair": body(
        "texts", '{"inputs":[{"name":"IN","shape":[1],"datatype":"BYTES","data":["\\ud83d"]}]}'
    ),
    "BYTES that are not UTF-8": body(
        "texts", b'{"inputs":[{"name":"IN","shape":[1],"datatype":"BYTES","data":["\xff\xfe"]}]}'
    ),
    "BYTES as numbers": infer("texts", tensor("IN", "BYTES", [1], [1])),
    "BYTES as objects": infer("texts", tensor("IN", "BYTES", [1], [{}])),
    "BYTES in base64": infer("texts", tensor("IN", "BYTES", [2], ["a", {"b64": "/wA="}])),
    "BYTES in base64 that is none": infer("texts", tensor("IN", "BYTES", [1], [{"b64": "abc"}])),
    "base64 for an output": infer("texts", tensor("IN", "BYTES", [1], ["a"]), outputs=[wanted("OUT", base64=True)]),
    "base64 for all outputs": infer("texts", tensor("IN", "BYTES", [1], ["a"]), parameters={"base64_output": True}),
    "STRING is no datatype": infer("texts", tensor("IN", "STRING", [1], ["a"])),
    # ---- Shapes ----
    "zero elements": typed("FP32", [], [0]),
    "zero rows": infer("grid", tensor("IN", "FP32", [0, 3], [])),
    "zero columns": infer("grid", tensor("IN", "FP32", [3, 0], [])),
    "batch of zero": infer("echo", tensor("IN", "INT32", [0, 2], [])),
    "batch too large": infer("echo", tensor("IN", "INT32", [9, 2], [0] * 18)),
    "full batch": infer("echo", tensor("IN", "INT32", [8, 2], [0] * 16)),
    "no batch dimension": infer("echo", tensor("IN", "INT32", [2], [1, 2])),
    "no dimension at all": infer("echo", tensor("IN", "INT32", [], [1])),
    "no dimension, no batch": infer("pair", tensor("A", "INT32", [], [1]), B),
    "no dimension and no data": infer("echo", tensor("IN", "INT32", [], [])),
    "no dimension, no data, no batch": infer("pair", tensor("A", "INT32", [], []), B),
    "no dimension and several values": infer("pair", tensor("A", "INT32", [], [1, 2]), B),
    "no dimension and a text": infer("pair", tensor("A", "INT32", [], ["a"]), B),
    "no dimension for texts": infer("texts", tensor("IN", "BYTES", [], [])),
    "no dimension for one text": infer("texts", tensor("IN", "BYTES", [], ["a"])),
    "no dimension, and a type that JSON has not": typed("FP16", [], []),
    "values beside zero elements": typed("FP32", [1.5], [0]),
    "texts beside zero elements": infer("texts", tensor("IN", "BYTES", [0], ["a"])),
    "no list beside zero elements": typed("FP32", 1.5, [0]),
    "FP16 beside zero elements": typed("FP16", [1.5], [0]),
    "no dimension for a variable one": infer("grid", tensor("IN", "FP32", [], [1])),
    "wrong dimension": infer("echo", tensor("IN", "INT32", [1, 3], [1, 2, 3])),
    "wrong dimension without batching": infer("pair", tensor("A", "INT32", [3], [1, 2, 3]), B),
    "too many dimensions": infer("echo", tensor("IN", "INT32", [1, 2, 1], [1, 2])),
    "wrong fixed dimension beside a variable one": infer("line", tensor("IN", "FP64", [3, 1], [1, 2, 3])),
    "different batches": infer("batch", tensor("A", "FP32", [1, 2], [1, 2]), tensor("B", "FP32", [2, 1], [1, 2])),
    "negative dimension": infer("echo", tensor("IN", "INT32", [1, -2], [1, 2])),
    "dimension of minus one": infer("grid", tensor("IN", "FP32", [-1, 2], [1, 2])),
    "dimension with a fraction": infer("echo", tensor("IN", "INT32", [1, 2.0], [1, 2])),
    "dimension as text": infer("echo", tensor("IN", "INT32", [1, "2"], [1, 2])),
    "dimension beyond 64 bits": infer("grid", tensor("IN", "FP32", [1, 18446744073709551616], [1])),
    "dimension of 2^63": infer("grid", tensor("IN", "FP32", [1, 9223372036854775808], [1])),
    "dimension of 2^63 - 1": infer("grid", tensor("IN", "FP32", [1, 9223372036854775807], [1])),
    "elements beyond 64 bits": infer("grid", tensor("IN", "FP32", [4294967296, 4294967296], [1])),
    "bytes beyond 64 bits": infer("grid", tensor("IN", "FP32", [1, 4611686018427387904], [1])),
    "nested shape": infer("echo", tensor("IN", "INT32", [[1, 2]], [1, 2])),
    "data too long": infer("pair", tensor("A", "INT32", [4], [1, 2, 3, 4, 5]), B),
    "data too short": infer("pair", tensor("A", "INT32", [4], [1, 2, 3]), B),
    "no elements": infer("pair", tensor("A", "INT32", [4], []), B),
    "text data too long": infer("texts", tensor("IN", "BYTES", [1], ["a", "b"])),
    "text data too short": infer("texts", tensor("IN", "BYTES", [2], ["a"])),
    # ---- Inputs and outputs ----
    "unknown model": infer("none", A),
    "unknown version": infer("versions/versions/2", A),
    "version that is no number": infer("versions/versions/x", A),
    "version zero": infer("versions/versions/0", A),
    "negative version": infer("versions/versions/-1", tensor("IN", "INT32", [1, 1], [0])),
    "input missing": infer("pair", B),
    "all inputs missing": infer("pair"),
    "both inputs unexpected": infer("pair", {**A, "name": "C"}, {**B, "name": "D"}),
    "input unexpected and one missing": infer("pair", A, {**B, "name": "C"}),
    "one input too many": infer("pair", A, B, {**B, "name": "C"}),
    "input twice": infer("pair", A, A),
    "input twice and complete": infer("pair", A, B, A),
    "needed input missing beside optional ones": infer(
        "options", tensor("NEEDED", "INT32", [1], [1]), tensor("MAYBE", "INT32", [1], [1])
    ),
    "needed inputs missing": infer("options", tensor("MAYBE", "INT32", [1], [1])),
    "unexpected input beside optional ones": infer(
        "options", *(tensor(name, "INT32", [1], [1]) for name in ("NEEDED", "ALSO_NEEDED", "OTHER"))
    ),
    "too many inputs beside optional ones": infer(
        "options", *(tensor(name, "INT32", [1], [1]) for name in ("NEEDED", "ALSO_NEEDED", "MAYBE", "OTHER"))
    ),
    "input twice and output twice": infer("pair", A, A, outputs=[wanted("SUM"), wanted("SUM")]),
    "output twice and input missing": infer("pair", A, outputs=[wanted("SUM"), wanted("SUM")], id="me"),
    "input twice and unexpected": infer("pair", {**A, "name": "C"}, {**A, "name": "C"}),
    "output unexpected": infer("pair", A, B, outputs=[wanted("PRODUCT")]),
    "output twice": infer("pair", A, B, outputs=[wanted("SUM"), wanted("SUM")]),
    "datatype of another kind": infer("pair", {**A, "datatype": "INT64"}, B),
    "datatype unknown": infer("pair", {**A, "datatype": "INT31"}, B),
    "datatype in small letters": infer("pair", {**A, "datatype": "int32"}, B),
    "datatype empty": infer("pair", {**A, "datatype": ""}, B),
    # ---- Which mistake is told first ----
    "unknown model and bad JSON": body("none", "{"),
    "unknown model and no body": body("none", b""),
    "wrong type and wrong shape": infer("pair", tensor("A", "FP32", [3], [1, 2, 3]), B),
    "wrong type and input missing": infer("pair", tensor("A", "FP32", [4], [1, 2, 3, 4])),
    "wrong shape and unexpected input": infer("pair", tensor("A", "INT32", [3], [1, 2, 3]), {**B, "name": "C"}),
    "wrong shape and unexpected output": infer(
        "pair", tensor("A", "INT32", [3], [1, 2, 3]), B, outputs=[wanted("PRODUCT")]
    ),
    "unexpected input and unexpected output": infer("pair", A, {**B, "name": "C"}, outputs=[wanted("PRODUCT")]),
    "both inputs of the wrong shape": infer(
        "pair", tensor("B", "INT32", [3], [1, 2, 3]), tensor("A", "INT32", [2], [1, 2])
    ),
    "error with an id": infer("pair", tensor("A", "INT32", [3], [1, 2, 3]), B, id="seven"),
    "error before the request with an id": infer("pair", A, {**B, "name": "C"}, id="seven"),
    "batch too large and different batches": infer(
        "batch", tensor("A", "FP32", [5, 2], [0] * 10), tensor("B", "FP32", [2, 1], [1, 2])
    ),
    "batch too large and wrong shape": infer("echo", tensor("IN", "INT32", [9, 3], [0] * 27)),
    # ---- Malformed ----
    "empty body": body("echo", b""),
    "not JSON": body("echo", "hello"),
    "half a JSON": body("echo", '{"inputs":['),
    "an array": body("echo", "[]"),
    "a string": body("echo", '"x"'),
    "null": body("echo", "null"),
    "empty object": body("echo", "{}"),
    "something after the JSON": body("echo", infer("echo", ROW).body + b" x"),
    "comment": body("echo", b"/* hello */" + infer("echo", ROW).body),
    "trailing comma": body("echo", '{"inputs":[],}'),
    "single quotes": body("echo", "{'inputs':[]}"),
    "inputs is no array": body("echo", '{"inputs":{}}'),
    "inputs is null": body("echo", '{"inputs":null}'),
    "input is no object": body("echo", '{"inputs":[1]}'),
    "no inputs": body("echo", '{"inputs":[]}'),
    "no name": described(shape=[1, 2], datatype="INT32", data=[1, 2]),
    "no shape": described(name="IN", datatype="INT32", data=[1, 2]),
    "no datatype": described(name="IN", shape=[1, 2], data=[1, 2]),
    "no data": described(name="IN", shape=[1, 2], datatype="INT32"),
    "nothing in an input": described(),
    "name is a number": described(name=1, shape=[1, 2], datatype="INT32", data=[1, 2]),
    "name is null": described(name=None, shape=[1, 2], datatype="INT32", data=[1, 2]),
    "shape is a number": described(name="IN", shape=2, datatype="INT32", data=[1, 2]),
    "shape is null": described(name="IN", shape=None, datatype="INT32", data=[1, 2]),
    "datatype is a number": described(name="IN", shape=[1, 2], datatype=32, data=[1, 2]),
    "data is text": described(name="IN", shape=[1, 2], datatype="INT32", data="12"),
    "data is null": described(name="IN", shape=[1, 2], datatype="INT32", data=None),
    "data is an object": described(name="IN", shape=[1, 2], datatype="INT32", data={"a": 1}),
    "id is a number": infer("echo", ROW, id=5),
    "id is null": infer("echo", ROW, id=None),
    "parameters is an array": infer("echo", ROW, parameters=[]),
    "parameters is null": infer("echo", ROW, parameters=None),
    "outputs is an object": infer("echo", ROW, outputs={}),
    "outputs is null": infer("echo", ROW, outputs=None),
    "output is a string": infer("echo", ROW, outputs=["OUT"]),
    "output without a name": infer("echo", ROW, outputs=[{}]),
    "output name is a number": infer("echo", ROW, outputs=[{"name": 3}]),
    "input parameters is an array": described(name="IN", shape=[1, 2], datatype="INT32", data=[1, 2], parameters=[]),
    "output parameters is an array": infer("echo", ROW, outputs=[{"name": "OUT", "parameters": []}]),
    "nested a hundred deep": infer("echo", tensor("IN", "INT32", [1, 2], eval("[" * 90 + "1,2" + "]" * 90))),
    "data nested too deep": infer("echo", tensor("IN", "INT32", [1, 2], eval("[" * 100 + "1,2" + "]" * 100))),
    "data almost nested too deep": infer("echo", tensor("IN", "INT32", [1, 2], eval("[" * 99 + "1,2" + "]" * 99))),
    "texts nested too deep": infer("texts", tensor("IN", "BYTES", [1], eval("[" * 100 + "'a'" + "]" * 100))),
    "an unknown member nested deeply": body(
        "echo", infer("echo", ROW).body[:-1] + b',"more":' + b"[" * 500 + b"]" * 500 + b"}"
    ),
    "nested too deep": body("echo", '{"inputs":' + "[" * 101 + "]" * 101 + "}"),
    "shape larger than the data could ever be": infer("texts", tensor("IN", "BYTES", [1000000], ["a"])),
    "plus sign": body("echo", '{"inputs":[{"name":"IN","shape":[1,2],"datatype":"INT32","data":[+1,2]}]}'),
    "leading zero": body("echo", '{"inputs":[{"name":"IN","shape":[1,2],"datatype":"INT32","data":[01,2]}]}'),
    "wrong content length": Http("POST", "/v2/models/echo/infer", infer("echo", ROW).body, (("Content-Length", "x"),)),
    "JSON in UTF-16": body("echo", dumped({"inputs": [ROW]}).decode().encode("utf-16")),
}
