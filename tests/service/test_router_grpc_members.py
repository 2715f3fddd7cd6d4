"""gRPC through the router to members that misbehave: resets, GOAWAY, refusals, slowness, few streams."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import h2.events
import h2.exceptions

from grpc_stand_in import GrpcStandIn, StandInCall, at_end, grpc_stand_ins
from nerite.wire import grpc_service as wire
from raw_grpc import INFER, STREAM, RawGrpc, framed
from routing import ROUTER, routing, samples
from serving import Serving, eventually

REQUEST = wire.ModelInferRequest(model_name="m", id="1").SerializeToString()
ANSWER = wire.ModelInferResponse(model_name="m", id="1").SerializeToString()


@contextmanager
def routed(folder: Path, *members: GrpcStandIn, router: str = ROUTER, **keys: str) -> Iterator[Serving]:
    rows = ", ".join(f'{{ http = "{each.address}", grpc = "127.0.0.1:{each.grpc_port}" }}' for each in members)
    more = "".join(f"{key.replace('_', '-')} = {value}\n" for key, value in keys.items())
    text = f'[[pool]]\nname = "main"\nmembers = [{rows}]\nhealth-interval = "200ms"\n{more}'
    with routing(folder, text, router=router) as running:
        yield running


def answering(call: StandInCall) -> None:
    call.answer(ANSWER)


def sequence_request(name: int) -> bytes:
    request = wire.ModelInferRequest(model_name="m")
    request.parameters["sequence_id"].int64_param = name
    request.parameters["sequence_start"].bool_param = True
    return request.SerializeToString()


def test_what_the_member_gets_and_the_client_gets(tmp_path: Path) -> None:
    def answer(call: StandInCall) -> None:
        call.connection.h2.send_headers(
            call.stream_id, [(":status", "200"), ("content-type", "application/grpc"), ("x-member", "yes")]
        )
        call.send(ANSWER)
        call.connection.h2.send_headers(
            call.stream_id, [("grpc-status", "0"), ("x-trailer-bin", "AAE")], end_stream=True
        )

    with grpc_stand_ins(at_end(answer)) as (member,), routed(tmp_path, member) as router:
        raw = RawGrpc(router)
        stream = raw.begin(traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01", x_tenant="acme", grpc_encoding="gzip")
        raw.send(stream, framed(REQUEST), end=True)
        assert raw.status(stream)[0] == 0
        assert raw.headers[stream][b"x-member"] == b"yes" and raw.headers[stream][b"x-trailer-bin"] == b"AAE"
        (call,) = member.calls
        assert call.body == framed(REQUEST)
        assert call.headers[":path"] == INFER and call.headers["te"] == "trailers"
        assert call.headers["x-tenant"] == "acme" and call.headers["traceparent"].startswith("00-1111")
        assert call.headers["grpc-encoding"] == "gzip"
        raw.close()


def test_an_answer_without_a_status_is_none(tmp_path: Path) -> None:
    def end(call: StandInCall) -> None:
        fields = [(":status", "200"), ("content-type", "application/grpc")]
        call.connection.h2.send_headers(call.stream_id, fields, end_stream=True)

    with (
        grpc_stand_ins(at_end(end), at_end(answering)) as members,
        routed(tmp_path, *members, policy='"round-robin"') as router,
    ):
        raw = RawGrpc(router)
        assert [raw.ask(REQUEST)[0] for _ in range(4)] == [0] * 4
        assert len(members[0].calls) >= 1
        raw.close()


def test_a_refused_call_goes_to_another_member(tmp_path: Path) -> None:
    def refuse(call: StandInCall) -> None:
        call.fail(14, "busy")

    with (
        grpc_stand_ins(at_end(refuse), at_end(answering)) as members,
        routed(tmp_path, *members, policy='"round-robin"') as router,
    ):
        raw = RawGrpc(router)
        assert [raw.ask(REQUEST)[0] for _ in range(4)] == [0] * 4
        assert len(members[0].calls) >= 1
        assert sum(samples(router, "nerite_router_retries_total").values()) >= 1
        raw.close()


def test_a_sequence_is_never_sent_twice(tmp_path: Path) -> None:
    def lose(call: StandInCall) -> None:
        call.connection.h2.reset_stream(call.stream_id, 2)

    with grpc_stand_ins(at_end(lose), at_end(lose)) as members, routed(tmp_path, *members) as router:
        raw = RawGrpc(router)
        status, text = raw.ask(sequence_request(5))
        assert status == 14 and "INTERNAL_ERROR" in text and "main" in text
        assert sum(len(member.calls) for member in members) == 1
        raw.close()


def test_refused_streams_are_sent_again_even_for_sequences(tmp_path: Path) -> None:
    def refuse(call: StandInCall) -> None:
        call.connection.h2.reset_stream(call.stream_id, 7)

    with (
        grpc_stand_ins(at_end(refuse), at_end(answering)) as members,
        routed(tmp_path, *members) as router,
    ):
        raw = RawGrpc(router)
        assert [raw.ask(sequence_request(number))[0] for number in range(1, 5)] == [0] * 4
        raw.close()


def test_goaway_moves_calls_to_another_connection(tmp_path: Path) -> None:
    def leave(call: StandInCall) -> None:
        call.answer(ANSWER)
        if len(call.connection.calls) == 3:
            call.connection.h2.close_connection(last_stream_id=call.stream_id)

    with grpc_stand_ins(at_end(leave)) as (member,), routed(tmp_path, member) as router:
        raw = RawGrpc(router)
        assert [raw.ask(REQUEST)[0] for _ in range(9)] == [0] * 9
        assert len(member.connections) == 3
        raw.close()


def test_more_calls_than_a_connection_allows(tmp_path: Path) -> None:
    waiting: list[StandInCall] = []

    def wait(call: StandInCall) -> None:
        waiting.append(call)

    with (
        grpc_stand_ins(at_end(wait), MAX_CONCURRENT_STREAMS=4) as (member,),
        routed(tmp_path, member) as router,
    ):
        raw = RawGrpc(router)
        streams = []
        for _ in range(10):
            streams.append(raw.begin())
            raw.send(streams[-1], framed(REQUEST), end=True)
        eventually(lambda: len(waiting) == 10)
        assert len(member.connections) >= 3
        for call in waiting:
            with call.connection.lock:
                call.answer(ANSWER)
                call.connection.flush()
        assert [raw.status(stream)[0] for stream in streams] == [0] * 10
        raw.close()


def test_a_cancelled_call_is_cancelled_at_the_member(tmp_path: Path) -> None:
    with grpc_stand_ins(lambda call, event: None) as (member,), routed(tmp_path, member) as router:
        raw = RawGrpc(router)
        stream = raw.begin()
        raw.send(stream, framed(REQUEST), end=True)
        eventually(lambda: bool(member.calls) and member.calls[0].ended)
        raw.http2.reset_stream(stream, 8)
        raw.socket.sendall(raw.http2.data_to_send())
        eventually(lambda: member.calls[0].reset)
        second = raw.begin(STREAM)
        raw.send(second, framed(REQUEST))
        eventually(lambda: len(member.calls) == 2)
        raw.close()
        eventually(lambda: member.calls[1].reset)


def test_a_deadline_is_kept_and_cancels(tmp_path: Path) -> None:
    with grpc_stand_ins(lambda call, event: None) as (member,), routed(tmp_path, member) as router:
        raw = RawGrpc(router)
        for path in (INFER, STREAM):
            stream = raw.begin(path, grpc_timeout="300m")
            began = time.monotonic()
            raw.send(stream, framed(REQUEST), end=path == INFER)
            status, text = raw.status(stream)
            assert status == 4 and time.monotonic() - began < 20, text
            eventually(lambda: member.calls[-1].reset)
        raw.close()


def test_a_lost_connection_in_an_answer_is_told(tmp_path: Path) -> None:
    def die(call: StandInCall) -> None:
        call.begin()
        call.send(ANSWER)
        call.connection.flush()
        call.connection.raw.close()

    with grpc_stand_ins(at_end(die)) as (member,), routed(tmp_path, member) as router:
        raw = RawGrpc(router)
        status, text = raw.ask(REQUEST)
        assert status == 14 and "connection" in text and member.address in text
        raw.close()


def test_an_index_that_is_none_is_left_out(tmp_path: Path) -> None:
    index = wire.RepositoryIndexResponse()
    index.models.add(name="m", version="1", state="READY")
    right = [index.SerializeToString()]
    path = "/inference.GRPCInferenceService/RepositoryIndex"
    handlers = [at_end(lambda call: call.answer(b"\xff\xff\xff")), at_end(lambda call: call.answer(right[-1]))]
    with grpc_stand_ins(*handlers) as members, routed(tmp_path, *members) as router:
        raw = RawGrpc(router)
        assert raw.ask(b"", path) == (0, "")
        right.append(b"\xff")
        status, told = raw.ask(b"", path)
        assert (status, "sent what is no repository index" in told) == (14, True)
        raw.close()


def test_a_member_without_a_grpc_port(tmp_path: Path) -> None:
    with grpc_stand_ins(at_end(answering)) as (member,):
        text = f'[[pool]]\nname = "main"\nmembers = ["{member.address}"]\n'
        with routing(tmp_path, text) as router:
            raw = RawGrpc(router)
            status, told = raw.ask(REQUEST)
            assert status == 14 and "grpc-port" in told
            raw.close()


def test_a_client_that_does_not_read_stops_the_member(tmp_path: Path) -> None:
    sent: list[int] = []

    def flood(call: StandInCall, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.StreamEnded):
            call.begin()
        http2 = call.connection.h2
        while len(sent) < 2_000 and http2.local_flow_control_window(call.stream_id) > 20_000:
            http2.send_data(call.stream_id, bytes(16_000))
            sent.append(16_000)

    with grpc_stand_ins(flood) as (member,), routed(tmp_path, member) as router:
        raw = RawGrpc(router)
        stream = raw.begin()
        raw.send(stream, framed(REQUEST), end=True)
        eventually(lambda: sum(sent) > 1_000_000 or raw.closed)
        steady: Any = -1
        while steady != sum(sent):
            steady = sum(sent)
            time.sleep(0.2)
        assert steady < 16_000_000, "the router would keep all of it"
        raw.close()
        eventually(lambda: member.calls[0].reset)


def test_a_member_that_does_not_read_stops_the_client(tmp_path: Path) -> None:
    with grpc_stand_ins(lambda call, event: None) as (member,), routed(tmp_path, member) as router:
        member.reads = False
        raw = RawGrpc(router)
        stream = raw.begin(STREAM)
        raw.send(stream, framed(REQUEST))
        piece, sent = bytes(100_000), 0
        raw.socket.settimeout(1.0)
        try:
            while sent < 64_000_000:
                raw.send(stream, piece)
                sent += len(piece)
        except TimeoutError:
            pass
        assert sent < 32_000_000
        raw.close()


def test_the_access_log(tmp_path: Path) -> None:
    router_table = ROUTER + "access-log = true\n"
    with grpc_stand_ins(at_end(answering)) as (member,), routed(tmp_path, member, router=router_table) as router:
        raw = RawGrpc(router)
        assert raw.ask(REQUEST)[0] == 0
        assert raw.ask(b"", "/inference.GRPCInferenceService/ServerLive")[0] == 0
        assert raw.ask(b"", "/inference.GRPCInferenceService/LogSettings")[0] == 12
        eventually(lambda: router.text.count("gRPC /") == 3)
        infer, live, refused = (line for line in router.text.splitlines() if "gRPC /" in line)
        assert f"gRPC {INFER} OK {len(REQUEST) + 5} {len(ANSWER) + 5} " in infer and infer.endswith(' m"')
        assert "ServerLive OK" in live and "LogSettings UNIMPLEMENTED" in refused
        raw.close()


def test_quotas_hold_for_calls_and_streams(tmp_path: Path) -> None:
    policy = 'header = "x-tenant"\n[tenants.small]\nheader_values = ["small"]\nrequests_per_minute = 2\n'
    (tmp_path / "policy.toml").write_text(policy)
    table = f'{ROUTER}policy-file = "policy.toml"\n'
    with grpc_stand_ins(at_end(answering)) as (member,), routed(tmp_path, member, router=table) as router:
        raw = RawGrpc(router)
        statuses = []
        for path in (INFER, STREAM, INFER, STREAM):
            stream = raw.begin(path, x_tenant="small")
            raw.send(stream, framed(REQUEST), end=True)
            statuses.append(raw.status(stream))
        assert [status for status, _ in statuses] == [0, 0, 8, 8]
        assert "tenant 'small'" in statuses[2][1]
        assert raw.ask(REQUEST)[0] == 0, "other tenants are not concerned"
        raw.close()


def test_what_is_admitted_is_what_the_member_reads(tmp_path: Path) -> None:
    table = f'{ROUTER}ledger = "ledger.db"\n'
    dear = wire.ModelInferRequest(model_name="dear").SerializeToString()
    large = wire.ModelInferRequest(model_name="m", raw_input_contents=[bytes(1_000_000)]).SerializeToString()
    with grpc_stand_ins(at_end(answering)) as (member,), ExitStack() as stack:
        member.models = ("m", "dear")
        router = stack.enter_context(routed(tmp_path, member, router=table))
        raw = RawGrpc(router)
        for message in (REQUEST + dear, large + dear):
            assert raw.ask(message)[0] == 0
            assert raw.ask(gzip.compress(message), compressed=True)[0] == 0
        for more in (framed(REQUEST) + framed(dear), framed(large + dear)):
            stream = raw.begin(STREAM)
            raw.send(stream, more, end=True)
            status, told = raw.status(stream)
            assert status == 3 and "use a call for each model" in told
        report = router.json("GET", "/v2/usage?group_by=model,ending")
        raw.close()
    rows = {(row["model"], row["ending"]): row["requests"] for row in report["data"]}
    assert rows.pop(("dear", "answered")) == 4
    assert set(rows) <= {("m", "cancelled")}


def test_a_call_waits_for_its_turn(tmp_path: Path) -> None:
    policy = 'header = "x-tenant"\n[tenants.one]\nheader_values = ["one"]\n[models.m]\nmax_requests = 1\n'
    (tmp_path / "policy.toml").write_text(policy)
    table = f'{ROUTER}policy-file = "policy.toml"\n'
    waiting: list[StandInCall] = []
    with grpc_stand_ins(at_end(waiting.append)) as (member,), routed(tmp_path, member, router=table) as router:
        raw = RawGrpc(router)
        streams = []
        for path in (INFER, STREAM, STREAM):
            streams.append(raw.begin(path, x_tenant="one"))
            raw.send(streams[-1], framed(REQUEST) * 3 if path == STREAM else framed(REQUEST), end=True)
        for place in range(3):
            eventually(lambda count=place: len(waiting) == count + 1)
            call = waiting[place]
            with call.connection.lock:
                call.answer(ANSWER)
                call.connection.flush()
            assert raw.status(streams[place])[0] == 0
        assert [len(call.body) for call in waiting] == [len(REQUEST) + 5, *[3 * (len(REQUEST) + 5)] * 2]
        raw.close()


HEDGED = {"hedge_quantile": "0.9", "retry_share": "1.0", "retry_floor": "1000"}


def later(call: StandInCall, seconds: float) -> None:
    """Answer after a while."""

    def answer() -> None:
        with call.connection.lock, suppress(h2.exceptions.ProtocolError, OSError):
            call.answer(ANSWER)
            call.connection.flush()

    threading.Timer(seconds, answer).start()


def test_a_late_call_is_sent_to_a_second_member(tmp_path: Path) -> None:
    late = threading.Event()

    def answer(call: StandInCall) -> None:
        if not late.is_set():
            call.answer(ANSWER)

    with (
        grpc_stand_ins(at_end(answer), at_end(answering)) as (first, second),
        routed(tmp_path, first, second, **HEDGED) as router,
    ):
        raw = RawGrpc(router)
        assert {raw.ask(REQUEST)[0] for _ in range(300)} == {0}
        late.set()
        before = len(second.calls)
        assert [raw.ask(REQUEST)[0] for _ in range(10)] == [0] * 10
        assert len(second.calls) >= before + 10
        hedged = 'nerite_router_retries_total{pool="main",reason="hedged"}'
        assert samples(router, "nerite_router_retries_total")[hedged] > 0
        eventually(lambda: all(call.reset for call in first.calls[-1:]))
        eventually(lambda: samples(router, "nerite_router_under_way")['nerite_router_under_way{pool="main"}'] == 0)
        raw.close()


def test_a_second_member_that_refuses_leaves_the_answer_to_the_first(tmp_path: Path) -> None:
    late = threading.Event()

    def first_answer(call: StandInCall) -> None:
        later(call, 0.3) if late.is_set() else call.answer(ANSWER)

    def second_answer(call: StandInCall) -> None:
        call.fail(14, "busy") if late.is_set() else call.answer(ANSWER)

    with (
        grpc_stand_ins(at_end(first_answer), at_end(second_answer)) as members,
        routed(tmp_path, *members, policy='"round-robin"', **HEDGED) as router,
    ):
        raw = RawGrpc(router)
        assert {raw.ask(REQUEST)[0] for _ in range(300)} == {0}
        late.set()
        assert [raw.ask(REQUEST)[0] for _ in range(4)] == [0] * 4
        raw.close()


def test_the_load_of_a_member_is_asked_for_and_kept_from_those_who_did_not_ask(tmp_path: Path) -> None:
    def answer(call: StandInCall) -> None:
        call.begin()
        call.send(ANSWER)
        fields = [("grpc-status", "0"), ("endpoint-load-metrics-bin", "QhQKCXJlcXVlc3RzEQAAAAAAAPA/")]
        call.connection.h2.send_headers(call.stream_id, fields, end_stream=True)

    prompt = wire.ModelInferRequest(model_name="m")
    prompt.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    prompt.raw_input_contents.append(b"\4\0\0\0once")
    message = framed(prompt.SerializeToString())
    with grpc_stand_ins(at_end(answer)) as (member,), routed(tmp_path, member) as router:
        raw = RawGrpc(router)
        for metadata, told in (({}, False), ({"endpoint_load_metrics_format": "bin"}, True)):
            stream = raw.begin(**metadata)
            raw.send(stream, message, end=True)
            assert raw.status(stream)[0] == 0
            assert (b"endpoint-load-metrics-bin" in raw.headers[stream]) is told
        assert [call.headers["endpoint-load-metrics-format"] for call in member.calls] == ["bin"] * 2
        assert raw.ask(REQUEST)[0] == 0
        assert "endpoint-load-metrics-format" not in member.calls[-1].headers, "tensors have no engine"
        raw.close()


def test_a_member_that_falls_silent(tmp_path: Path) -> None:
    def begin(call: StandInCall) -> None:
        if call.headers[":path"] == STREAM:
            call.begin()
            call.send(ANSWER)

    with grpc_stand_ins(at_end(begin)) as (member,), routed(tmp_path, member, idle_timeout='"300ms"') as router:
        raw = RawGrpc(router)
        silent = f"member '{member.address}' of pool 'main' has sent nothing for 0.3 s, the idle-timeout of the pool"
        assert raw.ask(REQUEST) == (4, silent)
        assert raw.ask(REQUEST, STREAM) == (4, silent)
        eventually(lambda: all(call.reset for call in member.calls))
        assert samples(router, "nerite_router_under_way") == {'nerite_router_under_way{pool="main"}': 0}
        raw.close()


def test_a_stream_on_which_nothing_is_asked_may_be_idle(tmp_path: Path) -> None:
    """Clients keep streams open for later requests."""

    def answer(call: StandInCall, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived) and event.data and call.headers[":path"] == STREAM:
            if len(call.body) == len(framed(REQUEST)):
                call.begin()
            call.send(ANSWER)

    with grpc_stand_ins(answer) as (member,), routed(tmp_path, member, idle_timeout='"200ms"') as router:
        raw, other = RawGrpc(router), RawGrpc(router)
        stream = raw.begin(STREAM)
        raw.send(stream, framed(REQUEST))
        while stream not in raw.headers:
            raw.hear()
        for _ in range(2):  # each takes the idle-timeout
            assert other.ask(REQUEST)[0] == 4
        assert stream not in raw.ended and not member.calls[0].reset
        raw.send(stream, framed(REQUEST))
        eventually(lambda: len(member.calls[0].body) == 2 * len(framed(REQUEST)))
        raw.close()
        other.close()
