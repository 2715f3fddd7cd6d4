"""Requests whose answers are known, for each kind of model: asked between inputs, and always to be answered rightly."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from fuzz import picking
from fuzz.lanes import Answer, Calls, Kept, request
from fuzz.mutators import frames
from fuzz.symptoms import Symptom
from nerite.wire.grpc_service import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

Right = Callable[[Any], bool]


class Canary(NamedTuple):
    """A request over HTTP, and whether an answer to it is right."""

    model: str
    raw: bytes
    right: Right


def _infer(
    model: str, values: list[Any], expected: list[Any], datatype: str = "FP32", *, one: bool = True, **more: Any
) -> Canary:
    shape = [1, len(values)] if one else [len(values)]
    name = f"IN_{datatype}" if model == "types" else "INPUT0"
    tensor = {"name": name, "shape": shape, "datatype": datatype, "data": values}
    return _post(
        model,
        f"/v2/models/{model}/infer",
        {"inputs": [tensor], **more},
        lambda said: said["outputs"][0]["data"] == expected,
    )


def _post(model: str, path: str, document: Any, right: Right) -> Canary:
    return Canary(model, request(f"POST {path}".encode(), json.dumps(document).encode()), right)


def _once(number: int) -> list[Canary]:
    """Return what is asked the same way every time but for a number, which makes it new."""
    value = float(number % 10_000)
    first, last = {"sequence_start": True}, {"sequence_end": True}
    asked = [_infer(model, [value, 2.0], [value, 2.0]) for model in ("worker", "inside", "pipeline", "calls", "cached")]
    asked.append(_infer("cached", [7.0], [7.0]))
    for model in ("direct", "oldest"):
        of = {"sequence_id": (1 << 40) + number}
        asked.append(_infer(model, [value], [value], parameters=of | first))
        asked.append(_infer(model, [3.0], [value + 3.0], parameters=of | last))
    asked.append(_infer("turns", [3.0], [3.0], parameters={"sequence_id": (1 << 41) + number} | first | last))
    return asked


_RECORDING: Final = (
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nhears\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    + b"RIFF\x2a\0\0\0WAVEfmt \x10\0\0\0" + struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16)
    + b"data\x06\0\0\0" + bytes(6)
    + b"\r\n--x--\r\n"
)  # fmt: skip
_SAME: Final = (
    _infer("onnx", [1.0, 2.0, 3.0, -4.0], [2.0, 4.0, 6.0, -8.0]),
    _infer("batched", [5, -6], [5, -6], "INT32"),
    _infer("text", ["é", ""], ["é", ""], "BYTES"),
    _infer("types", [2**64 - 1], [2**64 - 1], "UINT64", one=False),
    _infer("types", [True, False], [True, False], "BOOL", one=False),
    _infer("wrong", [9], [9], "INT32", one=False),
    _post(
        "words",
        "/v1/completions",
        {"model": "words", "prompt": "a b"},
        lambda said: said["choices"][0]["text"] == "a b",
    ),
    _post(
        "words",
        "/v1/chat/completions",
        {"model": "words", "messages": [{"role": "user", "content": "c d"}]},
        lambda said: said["choices"][0]["message"]["content"].strip() == "c d",
    ),
    _post(
        "engine",
        "/v1/completions",
        {"model": "engine", "prompt": "once", "max_tokens": 4},
        lambda said: said["choices"][0]["text"] == "abcd",
    ),
    _post(
        "vectors",
        "/v1/embeddings",
        {"model": "vectors", "input": "four"},
        lambda said: said["data"][0]["embedding"][0] == 4,
    ),
    _post(
        "ratings",
        "/v1/rerank",
        {"model": "ratings", "query": "q", "documents": ["a", "bbb"]},
        lambda said: said["results"][0]["index"] == 1,
    ),
    Canary(
        "hears",
        request(b"POST /v1/audio/transcriptions\nContent-Type: multipart/form-data; boundary=x", _RECORDING),
        lambda said: said["text"] == "3 samples",
    ),
    _post(
        "paints",
        "/v1/images/generations",
        {"model": "paints", "prompt": "a"},
        lambda said: said["data"][0]["b64_json"] == "UE5H",
    ),
    _post(
        "classes",
        "/v1/classify",
        {"model": "classes", "input": "four"},
        lambda said: said["data"][0]["probs"][0] == 4,
    ),
    Canary("worker", request(b"GET /v2/models/worker/ready", b""), lambda said: said is None),
    Canary("server", request(b"GET /v2/health/live", b""), lambda said: said is None),
    Canary("readiness", request(b"GET /v2/health/ready", b""), lambda said: said is None),
)


class Canaries:
    """Asks all of them."""

    def __init__(self, http: Kept, grpc: Calls) -> None:
        self._http = http
        self._grpc = grpc
        self._numbers = itertools.count(1)

    async def ask(self) -> list[Symptom]:
        """Ask each; return those whose answer is not right."""
        asked = [*_SAME, *_once(next(self._numbers))]
        answers, complaint = await self._http.ask([canary.raw for canary in asked])
        found = [
            Symptom("canary", canary.model, f"{answer.status} {answer.body[:1_000]!r}")
            for canary, answer in zip(asked, answers, strict=False)
            if not _is_right(canary, answer)
        ]
        if len(answers) < len(asked):
            found.append(Symptom("canary", asked[len(answers)].model, complaint or "the connection was closed"))
        if not found:
            found += [each for each in (await self._call(), await self._stream()) if each is not None]
        return found

    async def pick(self, endpoint: str) -> list[Symptom]:
        """Ask a picker for the place of a request, which is always the same."""
        messages = picking.plain("inside")
        block = frames.header_block(picking.PROCESS.encode())
        framed = b"".join(b"\0" + len(each).to_bytes(4, "big") + each for each in messages)
        call, complaint = await self._grpc.call(block, [framed])
        if complaint or call is None or call.status != "0":
            return [Symptom("canary", "picker", complaint or str(call and call.fields))]
        found = picking.endpoint(bytes(call.data))
        return [] if found == endpoint else [Symptom("canary", "picker", f"'{found}' instead of '{endpoint}'")]

    async def _call(self) -> Symptom | None:
        raw = struct.pack("<2f", 1.5, float(next(self._numbers)))
        call, complaint = await self._grpc.call(_block("ModelInfer"), [_framed("worker", [1, 2], "FP32", raw)])
        if complaint or call is None or call.status != "0":
            return Symptom("canary", "gRPC", complaint or str(call and call.fields))
        answer = ModelInferResponse.FromString(bytes(call.data[5:]))
        return None if answer.raw_output_contents[0] == raw else Symptom("canary", "gRPC", str(answer)[:500])

    async def _stream(self) -> Symptom | None:
        parts = [_framed("counts", [1, 1], "INT32", struct.pack("<i", 3))]
        call, complaint = await self._grpc.call(_block("ModelStreamInfer"), parts)
        if complaint or call is None or call.status != "0":
            return Symptom("canary", "counts", complaint or str(call and call.fields))
        numbers, data = [], bytes(call.data)
        while data:
            size = int.from_bytes(data[1:5], "big")
            answer = ModelStreamInferResponse.FromString(data[5 : 5 + size])
            numbers += [struct.unpack("<i", each)[0] for each in answer.infer_response.raw_output_contents]
            data = data[5 + size :]
        return None if numbers == [0, 1, 2] else Symptom("canary", "counts", str(numbers))


def _is_right(canary: Canary, answer: Answer) -> bool:
    try:
        return answer.status == 200 and canary.right(json.loads(answer.body) if answer.body else None)
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def _block(method: str) -> bytes:
    return frames.header_block(b"/inference.GRPCInferenceService/" + method.encode())


def _framed(model: str, shape: Sequence[int], datatype: str, raw: bytes) -> bytes:
    tensors = [{"name": "INPUT0", "datatype": datatype, "shape": shape}]
    message = ModelInferRequest(model_name=model, inputs=tensors, raw_input_contents=[raw]).SerializeToString()
    return b"\0" + len(message).to_bytes(4, "big") + message
