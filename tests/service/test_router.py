"""A router in front of members of which the test says what they answer: what passes, what is retried, what is told."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nerite import __version__
from nerite.repository.version_state import ON_DEMAND
from routing import (
    ROUTER,
    Received,
    StandInMember,
    chunk,
    events,
    pool,
    reset,
    response,
    routing,
    samples,
    stand_ins,
)
from serving import PATIENCE, Serving, accepts, eventually

INFER = "/v2/models/m/infer"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 8}


@contextmanager
def routed(folder: Path, *members: StandInMember, router: str = ROUTER, **keys: object) -> Iterator[Serving]:
    """Run a router in front of one pool of members."""
    with routing(folder, pool(*(each.address for each in members), **keys), router=router) as running:
        yield running


def raw(router: Serving, request: bytes) -> bytes:
    """Send bytes; return all that comes until the connection ends."""
    with socket.create_connection(("127.0.0.1", router.ports["HTTPService"]), PATIENCE) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_what_passes_and_what_does_not(tmp_path: Path) -> None:
    load = (
        "endpoint-load-metrics: TEXT named_metrics.kv_cache_utilization=0.5\r\nConnection: keep-alive\r\nX-Own: 1\r\n"
    )

    def answer(asked: Received, connection: socket.socket) -> bytes:
        return response(b'{"done":true}', more=load)

    with stand_ins(1, answer) as (member,), routed(tmp_path, member) as router:
        status, headers, body = router.ask(
            "POST",
            "/v1/chat/completions?a=b",
            CHAT,
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            authorization="Bearer key",
            x_nerite_class="batch",
            connection="x-private",
            x_private="secret",
            host=router.http,
            origin=f"http://{router.http}",
            sec_fetch_site="same-origin",
        )
        assert (status, body) == (200, b'{"done":true}')
        assert "endpoint-load-metrics" not in headers
        assert headers["X-Own"] == "1"
        (asked,) = member.requests
        assert (asked.method, asked.path) == ("POST", "/v1/chat/completions?a=b")
        assert json.loads(asked.body) == CHAT
        assert asked.headers["traceparent"] == "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        assert asked.headers["authorization"] == "Bearer key"
        assert asked.headers["x-nerite-class"] == "batch"
        assert asked.headers["endpoint-load-metrics-format"] == "text"
        assert asked.headers["host"] == member.address
        assert {"x-private", "connection", "origin", "sec-fetch-site"} & set(asked.headers) == set()
        _, headers, _ = router.ask("POST", "/v1/chat/completions", CHAT, endpoint_load_metrics_format="text")
        assert headers["endpoint-load-metrics"] == "TEXT named_metrics.kv_cache_utilization=0.5"
        assert router.ask("POST", "/v1/chat/completions", CHAT, origin="http://elsewhere.example")[0] == 403


def test_bodies_pass_unchanged(tmp_path: Path) -> None:
    large = bytes(range(256)) * 40_000

    def answer(asked: Received, connection: socket.socket) -> bytes | None:
        if asked.path.endswith("chunked/infer"):
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            pieces = [asked.body[at : at + 70_000] for at in range(0, len(asked.body), 70_000)]
            return head + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
        if asked.path.endswith("until-the-end/infer"):
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + asked.body)
            return None
        return response(asked.body)

    models = ("m", "chunked", "until-the-end")
    with stand_ins(1, answer, models=models) as (member,), routed(tmp_path, member) as router:
        for model in models:
            for body in (b"", b"{}", large):
                status, _, got = router.ask("POST", f"/v2/models/{model}/infer", body)
                assert (status, got == body) == (200, True), (model, len(body))
        head = b"POST /v2/models/%b/infer HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello"
        for model in models:
            got_head, _, got = raw(router, head % model.encode()).partition(b"\r\n\r\n")
            assert got == b"hello"
            assert b"chunked" not in got_head.lower().replace(b"/chunked/", b"")
        parts = b"POST /v2/models/m/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        assert raw(router, parts + chunk(b"hel") + chunk(b"lo") + b"0\r\n\r\n").endswith(b"\r\n\r\nhello")
        assert raw(router, b"HEAD /v2/models/m HTTP/1.1\r\nConnection: close\r\n\r\n").endswith(b"\r\n\r\n")


def test_a_refusal_or_a_loss_goes_to_another_member(tmp_path: Path) -> None:
    def overloaded(asked: Received, connection: socket.socket) -> bytes:
        return response(b'{"error":"full"}', 503)

    def gone(asked: Received, connection: socket.socket) -> None:
        reset(connection)

    with stand_ins(3) as (bad, worse, good), routed(tmp_path, bad, worse, good, policy="round-robin") as router:
        bad.answer, worse.answer = overloaded, gone
        for _ in range(9):
            assert router.ask("POST", INFER, b"{}")[0] == 200
        assert len(bad.requests) + len(worse.requests) > 0
        assert len(good.requests) == 9
        retries = samples(router, "nerite_router_retries_total")
        assert retries['nerite_router_retries_total{pool="main",reason="refused"}'] == len(bad.requests)
        assert retries['nerite_router_retries_total{pool="main",reason="lost"}'] > 0
        good.answer = overloaded
        status, _, body = router.ask("POST", INFER, b"{}")
        assert (status, body) in [(503, b'{"error":"full"}'), (502, body)]


@pytest.mark.parametrize(
    "body",
    [
        {"parameters": {"sequence_id": 7, "sequence_start": True}, "inputs": []},
        '{"parameters":{"sequence\\u005fid":"a"},"inputs":[]}',
    ],
)
def test_a_sequence_is_sent_once(tmp_path: Path, body: dict[str, object] | str) -> None:
    def gone(asked: Received, connection: socket.socket) -> None:
        reset(connection)

    with stand_ins(2, gone) as (first, second), routed(tmp_path, first, second) as router:
        status, _, told = router.ask("POST", INFER, body.encode() if isinstance(body, str) else body)
        assert status == 502
        assert "closed the connection without an answer" in json.loads(told)["error"]
        assert "of pool 'main'" in json.loads(told)["error"]
        assert len(first.requests) + len(second.requests) == 1


def test_what_concerns_one_server_is_refused(tmp_path: Path) -> None:
    with stand_ins(1) as (member,), routed(tmp_path, member) as router:
        status, _, body = router.ask("POST", "/v2/repository/models/m/load")
        assert status == 501
        assert "send it to the server itself" in json.loads(body)["error"]
        assert router.ask("GET", "/nothing")[0] == 404
        assert router.ask("GET", INFER)[0] == 405
        assert member.requests == []


def test_models_that_are_not_served(tmp_path: Path) -> None:
    with stand_ins(1) as (member,), routed(tmp_path, member) as router:
        status, _, body = router.ask("POST", "/v2/models/other/infer", b"{}")
        assert status == 404
        assert "Request for unknown model: 'other'" in json.loads(body)["error"]
        status, _, body = router.ask("POST", "/v1/chat/completions", {**CHAT, "model": "other"})
        assert status == 404
        assert "'other'" in json.loads(body)["error"]["message"]
        for wrong in (b"{", b"[]", b'{"messages":[]}', b'{"model":7}'):
            status, _, body = router.ask("POST", "/v1/chat/completions", wrong)
            assert status == 400
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
        member.ready = False
        eventually(lambda: router.ask("GET", "/v2/health/ready")[0] == 400)
        status, headers, body = router.ask("POST", INFER, b"{}")
        assert status == 503
        assert headers["Retry-After"] == "1"
        assert "pool 'main'" in json.loads(body)["error"]
        assert router.ask("GET", "/v2/health/live")[0] == 200
        assert [router.ask(*asked)[0] for asked in (("GET", "/health"), ("POST", "/ping"))] == [503, 503]


def test_what_servers_of_vllm_answer_and_where_the_rest_is(tmp_path: Path) -> None:
    with stand_ins(1) as (member,), routed(tmp_path, member) as router:
        assert [router.ask(*asked)[0] for asked in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"))] == [
            200
        ] * 3
        assert router.json("GET", "/version") == {"version": __version__}
        assert router.json("GET", "/")["health"] == "/v2/health/ready"
        status, _, body = router.ask("GET", "/metrics")
        assert (status, b"metrics-port" in body) == (404, True)
        assert member.requests == []


def test_names_that_members_do_not_list(tmp_path: Path) -> None:
    with stand_ins(1) as (member,), routed(tmp_path, member, serves=["scorer"]) as router:
        assert router.ask("POST", "/v2/models/scorer/infer", b"{}")[0] == 200
        assert router.ask("GET", "/v2")[0] == 200
        assert [each.path for each in member.requests] == ["/v2/models/scorer/infer", "/v2"]


def test_lists_are_merged(tmp_path: Path) -> None:
    with stand_ins(1, models=("a", "b")) as (one,), stand_ins(1, models=("b", "c")) as (two,):
        pools = pool(one.address), pool(two.address, name="second", kind="vllm")
        with routing(tmp_path, *pools) as router:
            assert [each["name"] for each in router.json("POST", "/v2/repository/index")] == ["a", "b"]
            assert [each["id"] for each in router.json("GET", "/v1/models")["data"]] == ["a", "b", "c"]
            assert router.ask("POST", "/v1/completions", {"model": "c", "prompt": "x"})[0] == 200
            assert len(two.requests) == 1


def test_lists_of_members_that_make_no_sense(tmp_path: Path) -> None:
    """Such as an entry without a name. The rest of the list counts."""

    class Odd(StandInMember):
        def __init__(self) -> None:
            self.index: Any = [{"reason": ON_DEMAND}, {"name": 7}, "x", {"name": ["m"], "state": []}, {"state": None}]
            super().__init__()

        def listed(self) -> list[Any]:
            return [*super().listed(), *self.index]

    member = Odd()
    with routed(tmp_path, member) as router:
        assert router.ask("POST", "/v2/models/m/infer", b"{}")[0] == 200
        assert router.ask("POST", "/v2/repository/index", b"{}")[0] == 200
    member.stop()


def test_classes_lead_to_pools(tmp_path: Path) -> None:
    with stand_ins(2) as (day, night):
        pools = pool(day.address), pool(night.address, name="batch", classes=["batch"])
        with routing(tmp_path, *pools) as router:
            assert router.ask("POST", INFER, b"{}", x_nerite_class="batch")[0] == 200
            assert router.ask("POST", INFER, b"{}")[0] == 200
            assert (len(day.requests), len(night.requests)) == (1, 1)


def test_a_stream_that_breaks_is_told(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> None:
        connection.sendall(events('{"text":"one"}', end=False))
        go.wait(PATIENCE)
        reset(connection)

    go = threading.Event()
    with stand_ins(2, answer) as (first, second), routed(tmp_path, first, second) as router:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v2/models/m/generate_stream", {"text_input": "hi"}),
        ):
            connection = http.client.HTTPConnection(router.http, timeout=PATIENCE)
            connection.request("POST", path, json.dumps(body))
            got = connection.getresponse()
            assert got.readline() == b'data: {"text":"one"}\n'
            go.set()
            rest = got.read().decode()
            assert "closed the connection before the end of its answer" in rest
            assert rest.strip().startswith('data: {"error":')
            connection.close()
            go.clear()
        assert len(first.requests) + len(second.requests) == 2


def test_an_answer_that_breaks_is_told(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
        reset(connection)

    broken = pytest.raises((http.client.IncompleteRead, ConnectionError))
    with stand_ins(1, answer) as (member,), routed(tmp_path, member) as router, broken:
        router.ask("POST", INFER, b"{}")


def test_a_client_that_goes_cancels_at_the_member(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> None:
        connection.sendall(events("one", end=False))
        while connection.recv(100):
            pass

    with stand_ins(1, answer) as (member,), routed(tmp_path, member) as router:
        connection = http.client.HTTPConnection(router.http, timeout=PATIENCE)
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT))
        assert connection.getresponse().readline() == b"data: one\n"
        connection.sock.close()
        connection.close()
        assert member.closed.acquire(timeout=PATIENCE)
        eventually(lambda: samples(router, "nerite_router_under_way")['nerite_router_under_way{pool="main"}'] == 0)
        assert any('code="cancelled"' in key for key in samples(router, "nerite_router_requests"))


def test_deadlines_hold(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> None:
        if asked.path == "/v1/chat/completions":
            connection.sendall(events("one", end=False))
        while connection.recv(100):
            pass

    with stand_ins(1, answer) as (member,), routed(tmp_path, member) as router:
        status, _, body = router.ask("POST", INFER, b"{}", x_nerite_timeout_ms="100")
        assert status == 504
        assert "0.1 s, has passed at member" in json.loads(body)["error"]
        assert member.closed.acquire(timeout=PATIENCE)
        _, _, body = router.ask("POST", "/v1/chat/completions", CHAT, x_nerite_timeout_ms="100")
        assert b"data: one" in body
        assert b'data: {"error"' in body
        assert router.ask("POST", INFER, b"{}", x_nerite_timeout_ms="soon")[0] == 400


def test_a_slow_client_slows_the_member(tmp_path: Path) -> None:
    size = 1 << 20
    sent: list[int] = []

    def answer(asked: Received, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 * size))
        for number in range(64):
            connection.sendall(bytes([number]) * size)
            sent.append(number)

    with stand_ins(1, answer) as (member,), routed(tmp_path, member) as router:
        before = resident(router)
        connection = http.client.HTTPConnection(router.http, timeout=PATIENCE)
        connection.request("POST", INFER, b"{}")
        got = connection.getresponse()
        assert got.read(1) == b"\0"
        settled = -1
        while len(sent) != settled:
            settled = len(sent)
            time.sleep(0.2)
        assert settled < 40
        assert resident(router) - before < 16 * size
        whole = b"\0" + got.read()
        connection.close()
        assert whole == b"".join(bytes([number]) * size for number in range(64))


def resident(router: Serving) -> int:
    """Return the memory of a process in bytes."""
    return int(Path(f"/proc/{router.process.pid}/statm").read_text().split()[1]) * 4096


def test_a_body_over_the_limit_is_refused(tmp_path: Path) -> None:
    with stand_ins(1) as (member,), routed(tmp_path, member, router=f"{ROUTER}max-body = 1024\n") as router:
        status, _, body = router.ask("POST", INFER, b"x" * 1025)
        assert status == 413
        assert "max-body" in json.loads(body)["error"]
        assert member.requests == []


def test_a_kept_connection_that_the_member_closes_is_replaced(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> bytes | None:
        if len(member.requests) % 2 == 0:
            return response()
        reset(connection)
        return None

    with stand_ins(1) as (member,), routed(tmp_path, member) as router:
        assert router.ask("POST", INFER, b"{}")[0] == 200
        member.answer = answer
        for _ in range(4):
            assert router.ask("POST", INFER, b"{}")[0] == 200


def test_members_in_a_file_are_followed(tmp_path: Path) -> None:
    file = tmp_path / "members.txt"
    with stand_ins(2) as (first, second):
        file.write_text(f"{first.address} # the first\n")
        with routing(tmp_path, pool(members_file="members.txt")) as router:
            assert router.ask("POST", INFER, b"{}")[0] == 200
            router.follow(file, "nothing\n")
            assert "members.txt:1: the line must be HOST:PORT" in router.text
            assert router.ask("POST", INFER, b"{}")[0] == 200
            router.follow(file, f"{second.address} capacity=2\n")
            eventually(lambda: router.ask("POST", INFER, b"{}")[0] == 200 and bool(second.requests))
            assert len(first.requests) >= 2


def test_names_are_resolved(tmp_path: Path) -> None:
    with stand_ins(1) as (member,):
        port = member.address.rpartition(":")[2]
        with routing(tmp_path, pool(dns=f"localhost:{port}")) as router:
            eventually(lambda: router.ask("POST", INFER, b"{}")[0] == 200)


def test_it_ends_when_streams_have_ended(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> bytes | None:
        connection.sendall(events("one", end=False))
        go.wait(PATIENCE)
        connection.sendall(chunk(b"data: two\n\n") + b"0\r\n\r\n")
        return None

    go = threading.Event()
    with stand_ins(1, answer) as (member,), routed(tmp_path, member) as router:
        connection = http.client.HTTPConnection(router.http, timeout=PATIENCE)
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT))
        got = connection.getresponse()
        assert got.readline() == b"data: one\n"
        router.process.send_signal(signal.SIGTERM)
        eventually(lambda: "Waiting for requests" in router.text)
        eventually(lambda: not accepts(router.http))
        go.set()
        assert b"data: two" in got.read()
        connection.close()
        assert router.process.wait(PATIENCE) == 0


def test_an_idle_connection_may_send_a_last_request(tmp_path: Path) -> None:
    kept = ROUTER.replace("20s", f"{10 * PATIENCE:.0f}s") + f'exit-keepalive = "{5 * PATIENCE:.0f}s"\n'
    with (
        stand_ins(1, lambda asked, connection: response()) as (member,),
        routed(tmp_path, member, router=kept) as router,
        closing(http.client.HTTPConnection(router.http, timeout=PATIENCE)) as connection,
    ):
        connection.request("POST", "/v2/models/m/infer", b"{}")
        assert connection.getresponse().read() == b"{}"
        router.process.send_signal(signal.SIGTERM)
        eventually(lambda: not accepts(router.http))
        connection.request("POST", "/v2/models/m/infer", b"{}")
        last = connection.getresponse()
        assert (last.status, last.getheader("Connection"), last.read()) == (200, "close", b"{}")
        assert router.process.wait(PATIENCE) == 0


def test_a_late_tensor_request_is_sent_to_a_second_member(tmp_path: Path) -> None:
    def late(asked: Received, connection: socket.socket) -> None:
        while connection.recv(100):
            pass

    keys = {"hedge_quantile": 0.9, "retry_share": 1.0, "retry_floor": 1000}
    with stand_ins(2) as (first, second), routed(tmp_path, first, second, **keys) as router:
        for _ in range(300):
            assert router.ask("POST", INFER, b"{}")[0] == 200
        first.answer = late
        before = len(second.requests)
        for _ in range(10):
            assert router.ask("POST", INFER, b"{}")[0] == 200
        assert len(second.requests) >= before + 10
        assert first.closed.acquire(timeout=PATIENCE)
        found = samples(router, "nerite_router_retries_total")
        assert found['nerite_router_retries_total{pool="main",reason="hedged"}'] > 0
        eventually(lambda: samples(router, "nerite_router_under_way")['nerite_router_under_way{pool="main"}'] == 0)


def test_metrics_count_what_was_sent(tmp_path: Path) -> None:
    with stand_ins(1) as (member,), routed(tmp_path, member) as router:
        for _ in range(3):
            router.ask("POST", INFER, b"{}")
        router.ask("POST", "/v2/models/other/infer", b"{}")
        found = router.metrics()
        assert found[f'nerite_router_requests{{code="200",member="{member.address}",pool="main"}}'] == 3
        assert found['nerite_router_refused_total{code="404"}'] == 1
        assert found['nerite_router_seconds_count{pool="main"}'] == 3
        assert found["nerite_router_decision_seconds_count"] == 4
        assert found['nerite_router_members_ready{pool="main"}'] == 1
        assert found["nerite_route_cpu_seconds_total"] > 0


def test_a_member_that_falls_silent(tmp_path: Path) -> None:
    """It has accepted the request: the client is told after the idle-timeout, and nothing is left of the request."""

    def answer(asked: Received, connection: socket.socket) -> None:
        if asked.path != INFER:
            connection.sendall(events("one", end=False))
        connection.recv(1)

    with stand_ins(1, answer) as (member,), routed(tmp_path, member, idle_timeout="300ms") as router:
        status, _, body = router.ask("POST", INFER, b"{}")
        place = f"member '{member.address}' of pool 'main' has sent nothing for 0.3 s, the idle-timeout of the pool"
        assert status == 504 and json.loads(body) == {"error": place}
        _, _, body = router.ask("POST", "/v1/chat/completions", CHAT)
        first, last = body.decode().removesuffix("\n\n").split("\n\n")
        assert first == "data: one" and place in last
        for _ in range(2):
            assert member.closed.acquire(timeout=PATIENCE)
        assert samples(router, "nerite_router_under_way") == {'nerite_router_under_way{pool="main"}': 0}
        assert router.ready()
