"""What an endpoint picker answers a gateway: messages of external processing, and the names of the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import orjson

from nerite.wire import ext_proc as wire

ENDPOINT: Final = "x-gateway-destination-endpoint"
"""Header and metadata with the chosen endpoint, and after it others to which the gateway may turn."""
SERVED: Final = "x-gateway-destination-endpoint-served"
"""Metadata of a response: the endpoint that has answered."""
SUBSET: Final = "x-gateway-destination-endpoint-subset"
"""Metadata of a request: the endpoints among which to choose."""
WANTED: Final = "test-epp-endpoint-selection"
"""Header with which tests of conformance say which addresses may be chosen, in this order."""
TOLD: Final = "x-conformance-test-served-endpoint"
"""Header of a response that tells tests of conformance who has answered."""
NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_OVERWRITE: Final = "OVERWRITE_IF_EXISTS_OR_ADD"
_MAX_PIECE: Final = 62_000
"""Bytes of a body in one message; some versions of Envoy take no more than 64 KiB."""


def picked(endpoints: str) -> wire.ProcessingResponse:
    """Return the answer to the headers of a request: where it goes."""
    mutation = wire.HeaderMutation(set_headers=[_header(ENDPOINT, endpoints)])
    return wire.ProcessingResponse(
        request_headers=wire.HeadersResponse(
            response=wire.CommonResponse(header_mutation=mutation, clear_route_cache=True)
        ),
        dynamic_metadata=_metadata(endpoints),
    )


def picked_with_body(endpoints: str) -> wire.ProcessingResponse:
    """Return the answer to a body that the gateway has kept."""
    mutation = wire.HeaderMutation(set_headers=[_header(ENDPOINT, endpoints)])
    return wire.ProcessingResponse(
        request_body=wire.BodyResponse(response=wire.CommonResponse(header_mutation=mutation, clear_route_cache=True)),
        dynamic_metadata=_metadata(endpoints),
    )


def told_served(endpoint: str) -> wire.ProcessingResponse:
    """Return the answer to the headers of a response that tells who has answered."""
    mutation = wire.HeaderMutation(set_headers=[_header(TOLD, endpoint)])
    return wire.ProcessingResponse(
        response_headers=wire.HeadersResponse(response=wire.CommonResponse(header_mutation=mutation))
    )


def _metadata(endpoints: str) -> wire.Struct:
    inner = wire.Struct(fields={ENDPOINT: wire.Value(string_value=endpoints)})
    return wire.Struct(fields={NAMESPACE: wire.Value(struct_value=inner)})


def _header(name: str, value: str) -> wire.HeaderValueOption:
    return wire.HeaderValueOption(
        header=wire.HeaderValue(key=name, raw_value=value.encode("latin-1", "replace")), append_action=_OVERWRITE
    )


def refused(status: int, text: str, retry_after: int = 0) -> wire.ProcessingResponse:
    """Return the answer that ends a request at the gateway."""
    headers = [_header("content-type", "application/json")]
    if retry_after:
        headers.append(_header("retry-after", str(retry_after)))
    return wire.ProcessingResponse(
        immediate_response=wire.ImmediateResponse(
            status=wire.HttpStatus(code=status),
            headers=wire.HeaderMutation(set_headers=headers),
            body=orjson.dumps({"error": text}),
            details="nerite_pick",
        )
    )


def request_pieces(body: bytes | memoryview, end: bool) -> Iterator[wire.ProcessingResponse]:
    """Yield the answers that pass a body on, or a piece of one, unchanged."""
    for streamed in _pieces(body, end):
        yield wire.ProcessingResponse(request_body=streamed)


def response_pieces(body: bytes | memoryview, end: bool) -> Iterator[wire.ProcessingResponse]:
    """Yield the answers that pass the body of a response on."""
    for streamed in _pieces(body, end):
        yield wire.ProcessingResponse(response_body=streamed)


def _pieces(body: bytes | memoryview, end: bool) -> Iterator[wire.BodyResponse]:
    for start in range(0, max(len(body), 1), _MAX_PIECE):
        stop = start + _MAX_PIECE
        streamed = wire.StreamedBodyResponse(body=bytes(body[start:stop]), end_of_stream=end and stop >= len(body))
        yield wire.BodyResponse(
            response=wire.CommonResponse(body_mutation=wire.BodyMutation(streamed_response=streamed))
        )


def fields_of(headers: wire.HeaderMap) -> Mapping[str, str]:
    """Return the headers of a request or response by their lower-case names; of repeated ones the last."""
    return {
        each.key: (each.raw_value or each.value.encode("latin-1", "replace")).decode("latin-1")
        for each in headers.headers
    }


def subset_of(request: wire.ProcessingRequest) -> frozenset[str] | None:
    """Return the endpoints among which to choose; None: among all."""
    namespaces = request.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in namespaces:
        return None
    fields = namespaces[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    found = fields[SUBSET]
    if found.string_value:
        return frozenset(part.strip() for part in found.string_value.split(",") if part.strip())
    return frozenset(each.string_value for each in found.list_value.values)


def served_of(request: wire.ProcessingRequest) -> str:
    """Return the endpoint that has answered; empty if the gateway does not say."""
    namespaces = request.metadata_context.filter_metadata
    if NAMESPACE not in namespaces or SERVED not in namespaces[NAMESPACE].fields:
        return ""
    return str(namespaces[NAMESPACE].fields[SERVED].string_value)
