"""The endpoint picker as a process, asked by a real Envoy and by a client of its own."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from envoy_proxy import envoy
from grpc_stand_in import StandInCall, at_end, grpc_stand_ins
from nerite.wire import ext_proc as wire
from nerite.wire import grpc_service
from nerite.wire.health import HealthCheckRequest, HealthCheckResponse
from routing import Received, StandInMember, events, response, stand_ins
from serving import NERITE, PATIENCE, Serving, eventually, program

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


@contextmanager
def picking(
    folder: Path,
    *members: StandInMember,
    rows: Sequence[str] = (),
    more: str = "",
    pool: str = "",
    flags: Sequence[str] = (),
) -> Iterator[Serving]:
    """Run a picker on free ports. ``pool``: further keys of the pool."""
    listed = ", ".join(rows or [f'"{each.address}"' for each in members])
    file = folder / "picker.toml"
    file.write_text(f'{more}\n[[pool]]\nname = "main"\nmembers = [{listed}]\nhealth-interval = "200ms"\n{pool}')
    command = [NERITE, "pick", file, "--port", "0", "--metrics-port", "0", *flags]
    with program(command, folder / "picker.log") as picker:
        yield picker


def address(picker: Serving) -> str:
    return f"127.0.0.1:{picker.ports['ExternalProcessor']}"


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    fields = {"Content-Type": "application/json", **{name.replace("_", "-"): each for name, each in headers.items()}}
    connection.request(method, path, body, fields)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def named(name: str):
    def answer(asked: Received, connection: object) -> bytes:
        return response(json.dumps({"by": name, "size": len(asked.body)}).encode())

    return answer


@contextmanager
def two(first: tuple[str, ...] = ("m",), second: tuple[str, ...] = ("m",)) -> Iterator[list[StandInMember]]:
    with stand_ins(1, named("one"), models=first) as one, stand_ins(1, named("two"), models=second) as other:
        yield [*one, *other]


def test_envoy_sends_requests_where_the_picker_says(tmp_path: Path) -> None:
    with (
        two(("m", "a"), ("m", "b")) as members,
        picking(tmp_path, *members) as picker,
        envoy(tmp_path, address(picker), [each.address for each in members]) as (port, _),
    ):
        for model, by in (("a", "one"), ("b", "two")) * 3:
            status, _, body = ask(port, "POST", "/v1/chat/completions", json.dumps(CHAT | {"model": model}).encode())
            assert (status, json.loads(body)["by"]) == (200, by)
            status, _, body = ask(port, "GET", f"/v2/models/{model}/stats")
            assert (status, json.loads(body)["by"]) == (200, by)
        seen = {json.loads(ask(port, "POST", "/v2/models/m/infer", b"{}")[2])["by"] for _ in range(10)}
        assert seen == {"one", "two"}
        eventually(lambda: sum(under_way(picker)) == 0)


def under_way(picker: Serving) -> list[float]:
    return [value for key, value in picker.metrics().items() if key.startswith("nerite_router_under_way")]


def test_large_bodies_and_streams_through_envoy(tmp_path: Path) -> None:
    def answer(asked: Received, connection: object) -> bytes:
        return events(*(json.dumps({"size": len(asked.body), "at": at}) for at in range(200)), "[DONE]")

    with (
        stand_ins(1, answer) as members,
        picking(tmp_path, *members) as picker,
        envoy(tmp_path, address(picker), [members[0].address]) as (port, _),
    ):
        asked = json.dumps(CHAT | {"stream": True, "pad": "x" * 400_000}).encode()
        status, headers, body = ask(port, "POST", "/v1/chat/completions", asked)
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        assert body.count(b"data: ") == 201 and f'"size": {len(asked)}'.encode() in body
        assert json.loads(members[0].requests[0].body) == json.loads(asked)


def test_envoy_answers_what_the_picker_refuses(tmp_path: Path) -> None:
    with (
        two() as members,
        picking(tmp_path, *members, more='[router]\nmax-body = 100000\ntimeout = "5s"\n') as picker,
        envoy(tmp_path, address(picker), [each.address for each in members]) as (port, _),
    ):
        status, _, body = ask(port, "POST", "/v1/chat/completions", json.dumps(CHAT | {"model": "x"}).encode())
        assert status == 404 and "'x'" in json.loads(body)["error"]
        assert ask(port, "POST", "/v1/chat/completions", b"no json")[0] == 400
        assert ask(port, "POST", "/v1/chat/completions", bytes(200_000))[0] == 413
        assert "router.timeout has no effect in nerite pick" in picker.text
        for member in members:
            member.ready = False
        eventually(lambda: ask(port, "POST", "/v2/models/m/infer", b"{}")[0] == 503)
        assert ask(port, "POST", "/v2/models/m/infer", b"{}")[1]["retry-after"]


def test_envoy_answers_429_when_all_endpoints_are_full(tmp_path: Path) -> None:
    goes_on = threading.Event()

    def answer(asked: Received, connection: object) -> bytes:
        assert goes_on.wait(PATIENCE)
        return response()

    with (
        stand_ins(1, answer) as members,
        picking(tmp_path, *members, pool="max-requests = 1\n") as picker,
        envoy(tmp_path, address(picker), [members[0].address]) as (port, _),
    ):
        first = threading.Thread(target=ask, args=(port, "POST", "/v2/models/m/infer", b"{}"))
        first.start()
        try:
            eventually(lambda: sum(under_way(picker)) == 1)
            status, headers, _ = ask(port, "POST", "/v2/models/m/infer", b"{}")
            assert (status, "retry-after" in headers) == (429, True)
        finally:
            goes_on.set()
            first.join(PATIENCE)
        assert ask(port, "POST", "/v2/models/m/infer", b"{}")[0] == 200


def test_only_endpoints_of_the_subset_are_used(tmp_path: Path) -> None:
    with (
        two() as members,
        picking(tmp_path, *members) as picker,
        envoy(tmp_path, address(picker), [each.address for each in members], subset=[members[1].address]) as (port, _),
    ):
        seen = {json.loads(ask(port, "POST", "/v2/models/m/infer", b"{}")[2])["by"] for _ in range(6)}
        assert seen == {"two"}


def test_an_empty_subset_is_refused(tmp_path: Path) -> None:
    with (
        two() as members,
        picking(tmp_path, *members) as picker,
        envoy(tmp_path, address(picker), [each.address for each in members], subset=[]) as (port, _),
    ):
        assert ask(port, "POST", "/v2/models/m/infer", b"{}")[0] == 503


def test_what_tests_of_conformance_ask(tmp_path: Path) -> None:
    with (
        two() as members,
        picking(tmp_path, *members, flags=["--conformance"]) as picker,
        envoy(tmp_path, address(picker), [each.address for each in members]) as (port, _),
    ):
        for first, second in ((0, 1), (1, 0)):
            wanted = f"{members[first].address},{members[second].address}"
            status, headers, _ = ask(port, "GET", "/v2/models/m", test_epp_endpoint_selection=wanted)
            assert (status, headers["x-conformance-test-served-endpoint"]) == (200, members[first].address)
        members[0].stop()
        wanted = f"{members[0].address},{members[1].address}"
        for _ in range(3):
            status, headers, _ = ask(port, "GET", "/v2/models/m", test_epp_endpoint_selection=wanted)
            assert (status, headers["x-conformance-test-served-endpoint"]) == (200, members[1].address)
        assert ask(port, "GET", "/v2/models/m", test_epp_endpoint_selection="10.9.9.9")[0] == 503


def test_conformance_with_several_ports_of_an_address(tmp_path: Path) -> None:
    """As with data parallel ranks: an address alone stands for all its ports, and those of other pools do not count."""
    body = json.dumps({"model": "conformance-fake-model", "prompt": "What is new?"}).encode()
    with stand_ins(3, host="127.0.0.2") as ranks, stand_ins(2, host="127.0.0.3") as others:
        every = [each.address for each in (*ranks, *others)]
        with (
            picking(tmp_path, *ranks, *others, flags=["--conformance"]) as picker,
            envoy(tmp_path, address(picker), every) as (port, _),
        ):

            def served(wanted: str) -> set[str]:
                found = set()
                for _ in range(12):
                    status, headers, _ = ask(port, "POST", "/any-path", body, test_epp_endpoint_selection=wanted)
                    assert status == 200
                    found.add(headers["x-conformance-test-served-endpoint"])
                return found

            assert served("127.0.0.2") == {each.address for each in ranks}
            assert served(f"{others[1].address},127.0.0.2") == {others[1].address}
            assert served(f"10.9.9.9,10.9.9.9:3000,{ranks[2].address}") == {ranks[2].address}


def test_envoy_goes_on_without_the_picker_if_told_to(tmp_path: Path) -> None:
    with (
        two() as members,
        picking(tmp_path, *members) as picker,
        envoy(tmp_path, address(picker), [each.address for each in members], mode="BUFFERED", fail_open=True) as ports,
    ):
        assert ask(ports[0], "POST", "/v2/models/m/infer", b"{}")[0] == 200
        picker.stop()
        seen = [ask(ports[0], "POST", "/v2/models/m/infer", b"{}") for _ in range(4)]
        assert {status for status, _, _ in seen} == {200}
        assert {json.loads(answer)["by"] for _, _, answer in seen} == {"one", "two"}


def test_envoy_turns_to_a_fallback(tmp_path: Path) -> None:
    with (
        two() as members,
        picking(tmp_path, *members) as picker,
        envoy(tmp_path, address(picker), [each.address for each in members]) as (port, _),
    ):
        assert ask(port, "POST", "/v2/models/m/infer", b"{}")[0] == 200
        members[0].stop()
        for _ in range(4):
            status, _, body = ask(port, "POST", "/v2/models/m/infer", b"{}")
            assert (status, json.loads(body)["by"]) == (200, "two")


@pytest.mark.parametrize("mode", ["BUFFERED", "STREAMED", "NONE"])
def test_other_ways_to_send_bodies(tmp_path: Path, mode: str) -> None:
    with (
        two(("a",), ("b",)) as members,
        picking(tmp_path, *members) as picker,
        envoy(tmp_path, address(picker), [each.address for each in members], mode=mode) as (port, _),
    ):
        for _ in range(3):
            status, _, body = ask(port, "POST", "/v2/models/b/infer", b"{}" * 1000)
            assert (status, json.loads(body)) == (200, {"by": "two", "size": 2000})
        asked = json.dumps(CHAT | {"model": "b"}).encode()
        if mode == "BUFFERED":
            assert json.loads(ask(port, "POST", "/v1/chat/completions", asked)[2])["by"] == "two"


def test_grpc_through_envoy(tmp_path: Path) -> None:
    response = grpc_service.ModelInferResponse(model_name="m", model_version="1")
    response.outputs.add(name="OUTPUT0", datatype="FP32", shape=[1])
    response.raw_output_contents.append(np.float32(7).tobytes())

    def answer(call: StandInCall) -> None:
        call.answer(response.SerializeToString())

    with grpc_stand_ins(at_end(answer)) as (member,):
        grpc_address = f"127.0.0.1:{member.grpc_port}"
        row = f'{{ http = "{member.address}", grpc = "{grpc_address}" }}'
        with (
            picking(tmp_path, rows=[row]) as picker,
            envoy(tmp_path, address(picker), [member.address], [grpc_address]) as (_, port),
            grpcclient.InferenceServerClient(f"127.0.0.1:{port}") as client,
        ):
            made = grpcclient.InferInput("INPUT0", [1], "FP32")
            made.set_data_from_numpy(np.zeros(1, np.float32))
            for _ in range(3):
                assert client.infer("m", [made]).as_numpy("OUTPUT0")[0] == 7.0


def test_health(tmp_path: Path) -> None:
    with two() as members, picking(tmp_path, *members) as picker, grpc.insecure_channel(address(picker)) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            assert check(HealthCheckRequest(service=service)).status == 1
        with pytest.raises(grpc.RpcError) as unknown:
            check(HealthCheckRequest(service="other"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        for member in members:
            member.ready = False
        eventually(lambda: check(HealthCheckRequest(service="readiness")).status == 2)
        assert check(HealthCheckRequest(service="liveness")).status == 1


def test_messages_that_are_none_end_the_call(tmp_path: Path) -> None:
    with two() as members, picking(tmp_path, *members) as picker, grpc.insecure_channel(address(picker)) as channel:
        raw = channel.stream_stream(PROCESS)
        with pytest.raises(grpc.RpcError) as broken:
            list(raw(iter([b"\xff\xff"])))
        assert broken.value.code() is grpc.StatusCode.INTERNAL
        typed = channel.stream_stream(
            PROCESS,
            request_serializer=wire.ProcessingRequest.SerializeToString,
            response_deserializer=wire.ProcessingResponse.FromString,
        )
        path = wire.HeaderValue(key=":path", raw_value=b"/v2/models/m/infer")
        headers = wire.HttpHeaders(headers=wire.HeaderMap(headers=[path]), end_of_stream=True)
        (picked,) = typed(iter([wire.ProcessingRequest(request_headers=headers)]))
        assert picked.WhichOneof("response") == "request_headers"
        eventually(lambda: sum(under_way(picker)) == 0)
        with pytest.raises(grpc.RpcError) as other:
            list(channel.stream_stream("/some.Service/Method")(iter([])))
        assert other.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_bodies_that_do_not_end_take_no_more_memory_than_is_allowed(tmp_path: Path) -> None:
    limit = "[router]\nmax-bytes-in-flight = 1_000_000\n"
    with (
        two() as members,
        picking(tmp_path, *members, more=limit) as picker,
        grpc.insecure_channel(address(picker)) as channel,
    ):
        typed = channel.stream_stream(
            PROCESS,
            request_serializer=wire.ProcessingRequest.SerializeToString,
            response_deserializer=wire.ProcessingResponse.FromString,
        )
        goes_on = threading.Event()

        def begun(last: bytes, size: int) -> Iterator[wire.ProcessingRequest]:
            path = wire.HeaderValue(key=":path", raw_value=b"/v1/completions")
            modes = wire.ProtocolConfiguration(request_body_mode=4, response_body_mode=4)
            headers = wire.HttpHeaders(headers=wire.HeaderMap(headers=[path]))
            yield wire.ProcessingRequest(request_headers=headers, protocol_config=modes)
            yield wire.ProcessingRequest(request_body=wire.HttpBody(body=b" " * size))
            assert not last or goes_on.wait(PATIENCE)
            yield wire.ProcessingRequest(request_body=wire.HttpBody(body=last, end_of_stream=True))

        first = typed(begun(whole := b'{"model": "m", "prompt": "a"}', 700_000))

        def refused() -> bool:
            (answer,) = typed(begun(b"", 400_000))
            return answer.immediate_response.status.code == 429

        def refused_beside_the_first() -> bool:
            nonlocal first
            if refused():
                return True
            first.cancel()  # the other came before it, so that it may have been refused itself
            first = typed(begun(whole, 700_000))
            return False

        try:
            eventually(refused_beside_the_first)
        finally:
            goes_on.set()
        assert next(first).WhichOneof("response") == "request_headers"
        first.cancel()
        eventually(lambda: not refused())
