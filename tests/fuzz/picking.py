"""What a gateway sends to an endpoint picker about one request: its head, its body in pieces, and the response."""

from __future__ import annotations

import gzip
import random
from collections.abc import Mapping
from typing import Any, Final

from fuzz import administration, inference, tokens
from fuzz.mutators import documents, heads, octets
from nerite.wire import ext_proc as wire

PROCESS: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_GRPC: Final = "/inference.GRPCInferenceService/ModelInfer"
_MODES: Final = (0, 1, 2, 3, 4, 4, 4, 4, 4, 4)
_ENDS: Final = ("200", "200", "200", "429", "503", "500", "", "abc", "99999")
_HINTS: Final = ("x-gateway-destination-endpoint-subset", "x-gateway-destination-endpoint-served", "x")


def session(rng: random.Random) -> list[wire.ProcessingRequest]:
    """Return the messages about a request, mostly in their order."""
    path, more, body = _request(rng)
    fields = {":method": "POST", ":path": path, ":authority": "a", "content-type": "application/json"} | more
    for name in rng.sample(("x-nerite-class", "x-session-id", "test-epp-endpoint-selection", "x-tenant"), 1):
        if rng.random() < 0.2:
            fields[name] = tokens.text(rng)
    pieces = _pieces(rng, body)
    mode = rng.choice(_MODES)
    config = wire.ProtocolConfiguration(request_body_mode=mode, response_body_mode=rng.choice((mode, 0, 4)))
    asked = wire.HttpHeaders(headers=_headers(fields), end_of_stream=not pieces)
    made = [wire.ProcessingRequest(request_headers=asked, protocol_config=config, metadata_context=_hint(rng))]
    for at, piece in enumerate(pieces, 1):
        part = wire.HttpBody(body=piece, end_of_stream=at == len(pieces) and rng.random() < 0.95)
        made.append(wire.ProcessingRequest(request_body=part))
    if rng.random() < 0.1:
        made.append(wire.ProcessingRequest(request_trailers=wire.HttpTrailers()))
    if rng.random() < 0.6:
        status = {":status": rng.choice(_ENDS), "endpoint-load-metrics": rng.choice(_REPORTS)}
        said = wire.HttpHeaders(headers=_headers(status), end_of_stream=rng.random() < 0.3)
        made.append(wire.ProcessingRequest(response_headers=said, metadata_context=_hint(rng)))
        part = wire.HttpBody(body=rng.randbytes(rng.choice((0, 9, 500))), end_of_stream=rng.random() < 0.8)
        made.append(wire.ProcessingRequest(response_body=part))
        made.append(wire.ProcessingRequest(response_trailers=wire.HttpTrailers()))
    if rng.random() < 0.1:
        rng.shuffle(made)
    return made


_REPORTS: Final = ("", "TEXT named_metrics.kv_cache_utilization=0.5", 'JSON {"cpu_utilization": 1e999}', "TEXT =,=")


def _request(rng: random.Random) -> tuple[str, dict[str, str], bytes]:
    """Return path, headers and body of a request that is to be routed."""
    kind = rng.randrange(8)
    if kind < 4:
        asked = administration.openai(rng)
        body = b"" if asked.body is None else documents.mutated(rng, asked.body)
        return asked.path, {":method": asked.method}, body
    what = inference.asked(rng)
    if kind < 6:
        verb = rng.choice(("infer", "generate", "generate_stream"))
        path = f"/v2/models/{what.model}/{verb}" if rng.random() < 0.9 else heads.target(rng).decode("latin-1")
        return path, {}, documents.mutated(rng, inference.document(rng, what))
    message, flag = inference.message(rng, what), 0
    more = {"content-type": "application/grpc"}
    if rng.random() < 0.4:
        more["grpc-encoding"] = rng.choice(("gzip", "gzip", "deflate", "snappy"))
        message, flag = gzip.compress(message, 1), rng.choice((1, 1, 1, 0, 2))
    if rng.random() < 0.4:
        message = octets.mutated(rng, message)
    return _GRPC, more, bytes((flag,)) + len(message).to_bytes(4, "big") + message


def _pieces(rng: random.Random, body: bytes) -> list[bytes]:
    if rng.random() < 0.1:
        return [body[at : at + 1] for at in range(min(len(body), 200))]
    return heads.pieces(rng, body) or ([b""] if rng.random() < 0.5 else [])


def _headers(fields: Mapping[str, str]) -> Any:
    pairs = [(name, value.encode(errors="surrogatepass")) for name, value in fields.items()]
    return wire.HeaderMap(headers=[wire.HeaderValue(key=name, raw_value=value) for name, value in pairs])


def _hint(rng: random.Random) -> Any:
    if rng.random() < 0.7:
        return None
    values = [wire.Value(string_value=rng.choice(("127.0.0.1:1", "x", ""))) for _ in range(rng.choice((0, 1, 3)))]
    value = wire.Value(string_value="127.0.0.1:1, ,")
    if rng.random() < 0.6:
        value = wire.Value(list_value=wire.ListValue(values=values))
    namespace = rng.choice(("envoy.lb.subset_hint", "envoy.lb"))
    return wire.Metadata(filter_metadata={namespace: wire.Struct(fields={rng.choice(_HINTS): value})})


def plain(model: str) -> list[bytes]:
    """Return the messages about a request that a picker has to place."""
    fields = {":path": f"/v2/models/{model}/infer", ":method": "POST"}
    asked = wire.HttpHeaders(headers=_headers(fields), end_of_stream=True)
    return [wire.ProcessingRequest(request_headers=asked).SerializeToString()]


def endpoint(answer: bytes) -> str:
    """Return the endpoint that the first answer of a picker names."""
    said = wire.ProcessingResponse.FromString(answer[5 : 5 + int.from_bytes(answer[1:5], "big")])
    fields = said.request_headers.response.header_mutation.set_headers
    return fields[0].header.raw_value.decode() if fields else ""
