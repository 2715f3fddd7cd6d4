"""Writing an infer response: the JSON part, and the tensors behind it as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final

import orjson

from nerite.core import headers
from nerite.core.byte_budget import HTTP_REPLIES
from nerite.core.engine_report import EngineReport
from nerite.core.request import InferenceRequest, RequestedOutput
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec
from nerite.observability.token_metrics import kv_utilization
from nerite.transports import output_parameters
from nerite.transports.http import json_tensors
from nerite.transports.http.handler import HTTP, HttpDialect
from nerite.transports.http.head import RequestHead
from nerite.transports.http.reply import head

_PLAIN = RequestedOutput("")
_BINARY = RequestedOutput("", binary=True)
_BASE64 = RequestedOutput("", base64=True)
JOINED = 16 * 1024
"""Up to this size a reply is copied into one piece: cheaper than writing several."""


def write_infer_response(
    request: InferenceRequest,
    response: InferenceResponse,
    signature_of: Callable[[InferenceRequest], Signature],
    dialect: HttpDialect = HTTP,
    half: bool = False,
    most: int = sys.maxsize,
) -> list[Buffer]:
    """Return the whole HTTP reply to a request that succeeded; nothing if there is too much to be written.

    That is so if more than ``most`` bytes of tensors are to be converted. Raises Triton's errors of formatting.
    ``half``: FP16 and BF16 are given in the JSON.
    Where everything is binary and of known size, or in shared memory, the text part depends only on the two headers,
    and is remembered.
    """
    header = response.header
    assert header is not None
    replies = request.header.replies
    known = replies.get(header)
    if known is not None and not request.id:
        beginning, small, elsewhere = known
        rest = output_parameters.write_all_to_regions(request, response, elsewhere) if elsewhere else response.data
        return [b"".join((beginning, *rest))] if small else [beginning, *rest]
    wanted = {output.name: output for output in request.header.outputs}
    default = _BINARY if request.header.binary_by_default else _BASE64 if request.header.base64_by_default else _PLAIN
    entries: list[bytes] = []
    binary: list[Buffer] = []
    placed: list[bool] = []
    fixed = not request.id
    converted = 0
    for spec, data in zip(header.outputs, response.data, strict=True):
        how = wanted.get(spec.name, default)
        placed.append(how.place is not None)
        if how.place is not None:
            output_parameters.write_to_region(request, spec, data)
            entries.append(_entry(spec))
            continue
        if how.classification or not how.binary:
            converted += len(data)
            if converted > most:
                return []
        if how.classification:
            signature = signature_of(request)
            labels = signature.outputs[spec.name].labels
            spec, data = output_parameters.top_classes(
                spec, data, how.classification, labels, signature.max_batch_size > 0
            )
        if how.binary:
            entries.append(_entry(spec, b',"parameters":{"binary_data_size":%d}' % len(data)))
            binary.append(data)
            fixed = fixed and spec.byte_size >= 0
        else:
            entries.append(_entry(spec, b',"data":' + json_tensors.write_tensor(spec, data, half, how.base64)))
            fixed = False
    parts = [b'"id":' + orjson.dumps(request.id)] if request.id else []
    parts.append(b'"model_name":' + orjson.dumps(header.model_name))
    parts.append(b'"model_version":' + orjson.dumps(header.model_version))
    if header.parameters:
        parts.append(b'"parameters":' + orjson.dumps(header.parameters))
    parts.append(b'"outputs":[' + b",".join(entries) + b"]")
    text = b"{" + b",".join(parts) + b"}"
    size = sum(map(len, binary))
    start = dialect.binary_head(len(text), len(text) + size) if size else head(200, "application/json", len(text))
    if fixed:
        kept = (start + text, len(text) + size <= JOINED, placed if any(placed) else None)
        HTTP_REPLIES.put(replies, header, kept, len(start) + len(text) + headers.response_header_bytes(header))
    return [start + text, *binary]


def _entry(spec: TensorSpec, rest: bytes = b"") -> bytes:
    return b'{"name":%b,"datatype":"%b","shape":%b%b}' % (
        orjson.dumps(spec.name),
        spec.datatype.name.encode(),
        _shape(spec.shape),
        rest,
    )


def _shape(shape: Sequence[int]) -> bytes:
    return b"[" + b",".join(b"%d" % size for size in shape) + b"]"


# The load of engines, told with a reply to a balancer that asks for it (ORCA): a header for a header.
#
# What is told, and in which words, is Triton's. Of a path without a model it is that of all engines of the server.

_WANTED: Final = "endpoint-load-metrics-format"
_LINE: Final = b"endpoint-load-metrics: "


def load_report_of(head: RequestHead, reports: Callable[[], Sequence[EngineReport]]) -> Callable[[], bytes] | None:
    """Return what makes the header line of a reply, empty where there is no engine; None if nobody asks.

    ``reports`` are those of the engines that are meant, as they are at the time.
    """
    form = _FORMS.get(head.headers.get(_WANTED, ""))
    if form is None:
        return None

    def line() -> bytes:
        latest = reports()
        if not latest:
            return b""
        return _LINE + form(kv_utilization(latest), sum(each.total_blocks * each.block_size for each in latest))

    return line


def _json(used: float, capacity: int) -> bytes:
    return b"JSON " + orjson.dumps({"named_metrics": {"kv_cache_utilization": used, "max_token_capacity": capacity}})


def _text(used: float, capacity: int) -> bytes:
    return b"TEXT named_metrics.kv_cache_utilization=%f, named_metrics.max_token_capacity=%d" % (used, capacity)


_FORMS: Final[dict[str, Callable[[float, int], bytes]]] = {"json": _json, "text": _text}
