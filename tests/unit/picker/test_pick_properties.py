"""Messages of a gateway in any order: a session never fails, and what it has begun ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from test_pick_session import CHAT, Gateway, header_map

from nerite.wire import ext_proc as wire

TEXT = st.one_of(
    st.sampled_from([
        "/v1/chat/completions", "/v2/models/m/infer", "/v2/models/%ff/generate", "/inference.GRPCInferenceService/X",
        "200", "503", "abc", "", "TEXT named_metrics.kv_cache_utilization=x", "application/grpc",
    ]),
    st.text(max_size=20),
)  # fmt: skip
NAMES = st.sampled_from([
    ":path", ":status", "content-type", "x-session-id", "x-nerite-class", "endpoint-load-metrics", "grpc-encoding",
])  # fmt: skip
HEADERS = st.builds(
    lambda fields, end: wire.HttpHeaders(headers=header_map(fields), end_of_stream=end),
    st.dictionaries(NAMES, TEXT, max_size=5),
    st.booleans(),
)
BODIES = st.builds(
    lambda body, end: wire.HttpBody(body=body, end_of_stream=end),
    st.one_of(st.just(CHAT), st.binary(max_size=40), st.just(bytes(9_000)), st.just(b"\0\0\0\0\3\x0a\1m")),
    st.booleans(),
)
MESSAGES = st.one_of(
    st.builds(lambda headers: {"request_headers": headers}, HEADERS),
    st.builds(lambda headers: {"response_headers": headers}, HEADERS),
    st.builds(lambda body: {"request_body": body}, BODIES),
    st.builds(lambda body: {"response_body": body}, BODIES),
    st.just({"request_trailers": wire.HttpTrailers()}),
    st.just({"response_trailers": wire.HttpTrailers()}),
    st.just({}),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(MESSAGES, max_size=10), st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_any_messages_in_any_order(messages, request_mode, response_mode, cancelled):
    gateway = Gateway(request_body_mode=request_mode, response_body_mode=response_mode)
    config = {"protocol_config": wire.ProtocolConfiguration(**gateway.modes)}
    for place, message in enumerate(messages):
        for answer in gateway.send(**message, **(config if place == 0 else {})):
            assert answer.ByteSize() < 64 * 1024 and answer.WhichOneof("response")
        assert sum(gateway.under_way.values()) in (0, 1)
    gateway.session.close(cancelled=cancelled)
    gateway.session.close()
    assert sum(gateway.under_way.values()) == 0 and gateway.pool.under_way == 0
