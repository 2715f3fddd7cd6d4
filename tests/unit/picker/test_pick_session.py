"""What an endpoint picker answers a gateway, message by message."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from nerite.balancing.member import Member
from nerite.balancing.policy import PoolPolicy
from nerite.cluster.settings import MemberSource, PoolSettings
from nerite.picker.endpoints import EndpointTable
from nerite.picker.session import PickSession
from nerite.router.pools import PoolTable, RouterPool
from nerite.wire import ext_proc as wire

ONE, TWO = "10.0.0.1:8000", "10.0.0.2:8000"
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()


class Gateway:
    """A picker with two endpoints, and what a gateway sends to it."""

    def __init__(
        self, models: Mapping[str, set[str] | None] | None = None, policy: PoolPolicy | None = None, **modes: int
    ) -> None:
        members = (Member(ONE, ONE, "10.0.0.1:8001"), Member(TWO, TWO, "10.0.0.2:8001"))
        self.pool = RouterPool(PoolSettings("main", MemberSource(members=members), balancing=policy or PoolPolicy()))
        self.pool.set_members(members)
        for name in (ONE, TWO):
            self.pool.set_ready(name, True, (models or {}).get(name))
        self.table = EndpointTable(PoolTable([self.pool]))
        self.modes = modes
        self.session = PickSession(self.table, 10_000, ("x-session-id",))

    def begin(self) -> None:
        self.session = PickSession(self.table, 10_000, ("x-session-id",))

    def send(self, **fields: Any) -> list[wire.ProcessingResponse]:
        return list(self.session.take(wire.ProcessingRequest(**fields)))

    def headers(
        self,
        path: str = "/v1/chat/completions",
        *,
        end: bool = False,
        subset: list[str] | None = None,
        **more: str,
    ) -> list[wire.ProcessingResponse]:
        fields: dict[str, Any] = {
            "request_headers": wire.HttpHeaders(headers=header_map({":path": path, **more}), end_of_stream=end)
        }
        if subset is not None:
            values = wire.ListValue(values=[wire.Value(string_value=each) for each in subset])
            hint = wire.Struct(fields={"x-gateway-destination-endpoint-subset": wire.Value(list_value=values)})
            fields["metadata_context"] = wire.Metadata(filter_metadata={"envoy.lb.subset_hint": hint})
        if self.modes:
            fields["protocol_config"] = wire.ProtocolConfiguration(**self.modes)
        return self.send(**fields)

    def body(self, body: bytes, *, end: bool = True) -> list[wire.ProcessingResponse]:
        return self.send(request_body=wire.HttpBody(body=body, end_of_stream=end))

    def respond(self, status: str = "200", *, served: str = "", **more: str) -> list[wire.ProcessingResponse]:
        fields: dict[str, Any] = {"response_headers": wire.HttpHeaders(headers=header_map({":status": status, **more}))}
        if served:
            told = wire.Struct(fields={"x-gateway-destination-endpoint-served": wire.Value(string_value=served)})
            fields["metadata_context"] = wire.Metadata(filter_metadata={"envoy.lb": told})
        return self.send(**fields)

    @property
    def under_way(self) -> dict[str, float]:
        return {load.member.name: load.requests for load in self.pool.balancer.members}


def header_map(fields: Mapping[str, str]) -> wire.HeaderMap:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return wire.HeaderMap(
        headers=[wire.HeaderValue(key=name, raw_value=value.encode()) for name, value in named.items()]
    )


def endpoints(answer: wire.ProcessingResponse) -> list[str]:
    """Return what an answer picks; the header and the metadata have to say the same."""
    told = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"].string_value
    kind = answer.WhichOneof("response")
    common = getattr(answer, kind).response
    (header,) = common.header_mutation.set_headers
    assert header.header.key == "x-gateway-destination-endpoint"
    assert header.header.raw_value.decode() == told and common.clear_route_cache
    return told.split(",")


def passed(answers: list[wire.ProcessingResponse], kind: str = "request_body") -> tuple[bytes, list[bool]]:
    """Return the body that the answers pass on, and which of them ends it."""
    pieces = [getattr(answer, kind).response.body_mutation.streamed_response for answer in answers]
    return b"".join(piece.body for piece in pieces), [piece.end_of_stream for piece in pieces]


def test_a_body_is_kept_until_its_end_and_passed_on_unchanged():
    gateway = Gateway()
    assert gateway.headers() == []
    assert gateway.body(CHAT[:20], end=False) == []
    picked, *rest = gateway.body(CHAT[20:])
    assert sorted(endpoints(picked)) == [ONE, TWO]
    assert passed(rest) == (CHAT, [True])
    assert sum(gateway.under_way.values()) == 1


def test_large_bodies_are_passed_on_in_pieces():
    gateway = Gateway()
    gateway.session = PickSession(gateway.table, 1_000_000)
    body = json.dumps({"model": "m", "prompt": "x" * 200_000}).encode()
    gateway.headers("/v1/completions")
    _, *rest = gateway.body(body)
    assert passed(rest) == (body, [False, False, False, True])
    assert max(answer.ByteSize() for answer in rest) < 64 * 1024


def test_a_request_without_a_body():
    gateway = Gateway()
    (picked,) = gateway.headers("/v2/models/m/ready", end=True)
    assert len(endpoints(picked)) == 2


def test_trailers_end_a_body():
    gateway = Gateway()
    gateway.headers()
    assert gateway.body(CHAT, end=False) == []
    picked, piece, trailers = gateway.send(request_trailers=wire.HttpTrailers())
    assert endpoints(picked) and passed([piece]) == (CHAT, [False])
    assert trailers.WhichOneof("response") == "request_trailers"


def test_the_models_of_members_count():
    gateway = Gateway({ONE: {"a"}, TWO: {"m"}})
    gateway.headers()
    assert endpoints(gateway.body(CHAT)[0]) == [TWO]
    gateway.begin()
    assert endpoints(gateway.headers("/v2/models/a/infer", end=True)[0]) == [ONE]
    gateway.begin()
    (refused,) = gateway.headers("/v2/models/none/infer", end=True)
    assert refused.immediate_response.status.code == 404
    assert "none" in json.loads(refused.immediate_response.body)["error"]


@pytest.mark.parametrize(("subset", "found"), [([TWO], [TWO]), ([ONE, "10.9.9.9:1"], [ONE]), ([], []), (["x"], [])])
def test_only_endpoints_of_the_subset(subset, found):
    gateway = Gateway()
    (answer,) = gateway.headers("/v2/models/m/infer", end=True, subset=subset)
    if found:
        assert endpoints(answer) == found
    else:
        assert answer.immediate_response.status.code == 503


def test_nobody_is_ready():
    gateway = Gateway()
    for name in (ONE, TWO):
        gateway.pool.set_ready(name, False)
    gateway.headers()
    (refused,) = gateway.body(CHAT)
    assert refused.immediate_response.status.code == 503
    names = {header.header.key for header in refused.immediate_response.headers.set_headers}
    assert names == {"content-type", "retry-after"}
    assert sum(gateway.under_way.values()) == 0


def test_all_endpoints_are_full():
    gateway = Gateway(policy=PoolPolicy(max_requests=1))
    for _ in range(2):
        gateway.begin()
        gateway.headers()
        assert len(gateway.body(CHAT)) == 2
    gateway.begin()
    gateway.headers()
    (refused,) = gateway.body(CHAT)
    assert refused.immediate_response.status.code == 429
    assert "retry-after" in {header.header.key for header in refused.immediate_response.headers.set_headers}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/v1/chat/completions", b"no json", 400), ("/v1/chat/completions", b"{}", 400), ("/v1/x", bytes(20_000), 413)],
)
def test_bodies_that_cannot_be_routed(path, body, status):
    gateway = Gateway()
    gateway.headers(path)
    (refused,) = gateway.body(body)
    assert refused.immediate_response.status.code == status
    assert gateway.body(b"more") == []


def test_load_is_spread_and_ends():
    gateway = Gateway()
    sessions = []
    for _ in range(4):
        gateway.begin()
        gateway.headers()
        gateway.body(CHAT)
        sessions.append(gateway.session)
    assert set(gateway.under_way.values()) == {2}
    for session in sessions:
        session.close()
        session.close()
    assert set(gateway.under_way.values()) == {0}


def test_a_response_passes_and_ends_the_request():
    gateway = Gateway()
    gateway.headers()
    gateway.body(CHAT)
    (headers,) = gateway.respond()
    assert headers.WhichOneof("response") == "response_headers"
    first = gateway.send(response_body=wire.HttpBody(body=b"data: 1\n\n"))
    assert passed(first, "response_body") == (b"data: 1\n\n", [False])
    assert sum(gateway.under_way.values()) == 1
    last = gateway.send(response_body=wire.HttpBody(body=b"", end_of_stream=True))
    assert passed(last, "response_body") == (b"", [True])
    assert sum(gateway.under_way.values()) == 0
    assert sum(count for (_, code), count in gateway.pool.answers.items() if code == "200") == 1


@pytest.mark.parametrize("status", ["", "abc", "2000", "\x85", "200 \u2028", "\u0662\u0660\u0660", "x" * 5_000])
def test_a_status_that_is_none_is_no_label(status):
    gateway = Gateway()
    gateway.headers()
    gateway.body(CHAT)
    gateway.respond(status)
    gateway.session.close()
    assert {code for (_, code), count in gateway.pool.answers.items() if count} == {"lost"}


def test_another_endpoint_has_served():
    gateway = Gateway()
    gateway.headers()
    first, second = endpoints(gateway.body(CHAT)[0])
    assert gateway.under_way[first] == 1
    gateway.respond(served=second)
    assert (gateway.under_way[first], gateway.under_way[second]) == (0, 1)
    (trailers,) = gateway.send(response_trailers=wire.HttpTrailers())
    assert trailers.WhichOneof("response") == "response_trailers"
    assert sum(gateway.under_way.values()) == 0


def test_the_load_report_of_a_member_is_taken():
    gateway = Gateway()
    gateway.headers()
    first, _ = endpoints(gateway.body(CHAT)[0])
    gateway.respond(endpoint_load_metrics="TEXT named_metrics.kv_cache_utilization=0.75")
    (load,) = (load for load in gateway.pool.balancer.members if load.member.name == first)
    assert load.report.kv_used == 0.75


def test_a_gateway_that_keeps_bodies():
    gateway = Gateway({ONE: {"a"}, TWO: {"m"}}, request_body_mode=2, response_body_mode=0)
    (plain,) = gateway.headers()
    assert plain == wire.ProcessingResponse(request_headers=wire.HeadersResponse())
    (picked,) = gateway.body(CHAT)
    assert picked.WhichOneof("response") == "request_body" and endpoints(picked) == [TWO]


@pytest.mark.parametrize("mode", [0, 1, 3])
def test_a_gateway_that_needs_the_headers_first(mode):
    gateway = Gateway(request_body_mode=mode, response_body_mode=mode)
    (picked,) = gateway.headers()
    assert len(endpoints(picked)) == 2
    if mode:
        (plain,) = gateway.body(CHAT)
        assert plain == wire.ProcessingResponse(request_body=wire.BodyResponse())
        gateway.respond()
        (plain,) = gateway.send(response_body=wire.HttpBody(body=b"x"))
        assert plain == wire.ProcessingResponse(response_body=wire.BodyResponse())


def test_a_grpc_call_is_routed_as_soon_as_it_names_its_model():
    gateway = Gateway({ONE: {"a"}, TWO: {"m"}})
    message = b"\x0a\x01m\x1a\x011"
    framed = b"\0" + len(message).to_bytes(4) + message
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    assert gateway.headers(path, content_type="application/grpc") == []
    assert gateway.body(framed[:4], end=False) == []
    picked, piece = gateway.body(framed[4:], end=False)
    assert endpoints(picked) == ["10.0.0.2:8001"]
    assert passed([piece]) == (framed, [False])
    assert passed(gateway.body(framed, end=False)) == (framed, [False])


def test_a_grpc_call_that_names_another_model_later_is_ended():
    gateway = Gateway({ONE: {"a"}, TWO: {"m"}})
    message = b"\x0a\x01m\x3a\x01x"
    framed = b"\0" + (len(message) + 3).to_bytes(4) + message
    gateway.headers("/inference.GRPCInferenceService/ModelInfer", content_type="application/grpc")
    assert endpoints(gateway.body(framed, end=False)[0]) == ["10.0.0.2:8001"]
    (refused,) = gateway.body(b"\x0a\x01a", end=True)
    assert refused.immediate_response.status.code == 400
    assert gateway.under_way == {ONE: 0, TWO: 0}
    assert gateway.body(b"more", end=True) == []


def test_a_compressed_grpc_call_in_pieces_is_unpacked_once():
    gateway = Gateway({ONE: {"a"}, TWO: {"m"}})
    message = gzip.compress(b"\x0a\x01m\x3a\xc8\x01" + random.Random(1).randbytes(200))
    framed = b"\1" + len(message).to_bytes(4) + message
    fields = {"content_type": "application/grpc", "grpc_encoding": "gzip"}
    gateway.headers("/inference.GRPCInferenceService/ModelInfer", **fields)
    answers = [
        each for at in range(len(framed)) for each in gateway.body(framed[at : at + 1], end=at == len(framed) - 1)
    ]
    assert endpoints(answers[0]) == ["10.0.0.2:8001"]
    assert b"".join(piece.request_body.response.body_mutation.streamed_response.body for piece in answers[1:]) == framed


def test_a_form_names_its_model():
    gateway = Gateway({ONE: {"a"}, TWO: {"m"}})
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
    gateway.headers("/v1/audio/transcriptions", content_type="multipart/form-data; boundary=x")
    assert endpoints(gateway.body(form)[0]) == [TWO]


def test_messages_that_are_only_watched():
    gateway = Gateway()
    assert gateway.send(observability_mode=True, request_headers=wire.HttpHeaders()) == []
    assert gateway.send() == []


def test_a_session_stays():
    gateway = Gateway()
    chosen = set()
    for _ in range(6):
        gateway.begin()
        gateway.headers(x_session_id="alice")
        chosen.add(endpoints(gateway.body(CHAT)[0])[0])
        gateway.respond()
        gateway.session.close()
    assert len(chosen) == 1


def test_tests_of_conformance_choose_their_endpoint():
    gateway = Gateway()
    header = {"test_epp_endpoint_selection": "10.0.0.2, 10.9.9.9,10.0.0.1:8000,10.0.0.2"}
    (ignored,) = gateway.headers("/v2/models/m/infer", end=True, **header)
    assert len(endpoints(ignored)) == 2
    for wanted, found in (
        ("10.0.0.2, 10.9.9.9,10.0.0.1:8000,10.0.0.2", [TWO, ONE]),
        ("10.0.0.1", [ONE]),
        ("10.9.9.9", []),
    ):
        gateway.session = PickSession(gateway.table, 10_000, conformance=True)
        (answer,) = gateway.headers("/v2/models/m/infer", end=True, test_epp_endpoint_selection=wanted)
        if not found:
            assert answer.immediate_response.status.code == 503
            continue
        assert endpoints(answer) == found
        (told,) = gateway.respond(served=found[-1])
        (header,) = told.response_headers.response.header_mutation.set_headers
        assert header.header.key == "x-conformance-test-served-endpoint"
        assert header.header.raw_value.decode() == found[-1]
