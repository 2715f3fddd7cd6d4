"""Writes infer responses: the JSON part, with binary tensors behind it uncopied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import orjson

from nerite.core import headers
from nerite.core.byte_budget import HTTP_REPLIES
from nerite.core.request import InferenceRequest, RequestedOutput
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec
from nerite.transports import output_parameters
from nerite.transports.http import json_tensors
from nerite.transports.http.handler import HTTP, HttpDialect
from nerite.transports.http.reply import head

_PLAIN = RequestedOutput("")
_BINARY = RequestedOutput("", binary=True)
_BASE64 = RequestedOutput("", base64=True)
JOINED = 16 * 1024
"""Largest reply in bytes that is copied into one buffer, which is cheaper than writing several."""


def write_infer_response(
    request: InferenceRequest,
    response: InferenceResponse,
    signature_of: Callable[[InferenceRequest], Signature],
    dialect: HttpDialect = HTTP,
    half: bool = False,
    most: int = sys.maxsize,
) -> list[Buffer]:
    """Return the whole HTTP reply to a successful request, or an empty list if it is too large to write here.

    It is too large if more than ``most`` bytes of tensors must be converted to JSON. Raises Triton's formatting errors.
    ``half``: FP16 and BF16 are allowed in JSON. If all outputs are binary and of known size, or in shared memory, the
    JSON part depends only on the headers of request and response, and is memoized.
    """
    header = response.header
    assert header is not None
    replies = request.header.replies
    known = replies.get(header)
    if known is not None and not request.id:
        beginning, small, elsewhere = known
        rest = output_parameters.write_all_to_regions(request, response, elsewhere) if elsewhere else response.buffers
        return [b"".join((beginning, *rest))] if small else [beginning, *rest]
    wanted = {output.name: output for output in request.header.outputs}
    default = _BINARY if request.header.binary_by_default else _BASE64 if request.header.base64_by_default else _PLAIN
    entries: list[bytes] = []
    binary: list[Buffer] = []
    placed: list[bool] = []
    fixed = not request.id
    converted = 0
    for spec, data in zip(header.outputs, response.buffers, strict=True):
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
