"""gRPC through the router, with Triton's client, to real servers."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from grpc_streams import Stream
from routing import routing, samples
from serving import HELD, IDENTITY, PATIENCE, Serving, adds, eventually, let_go, pbtxt, python_model, serving

COUNTS = """
def initialize(self, args):
    self.sums = {}

def execute(self, requests):
    answers = []
    for request in requests:
        name = request.correlation_id()
        value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        self.sums[name] = self.sums.get(name, 0) + value
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", self.sums[name])]))
    return answers
"""
REPEATS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        for place in range(int(value.flat[0])):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value * 0 + place)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


class Cluster(NamedTuple):
    """A router, and its members."""

    router: Serving
    members: list[Serving]
    folder: Path


def repository(folder: Path, place: int) -> Path:
    models = folder / f"models{place}"
    python_model(models, "who", adds(place))
    python_model(models, "same", IDENTITY)
    python_model(models, "held", HELD, pbtxt(more=""))
    python_model(models, "counts", COUNTS, pbtxt(more="sequence_batching {}"))
    python_model(models, "repeats", REPEATS, pbtxt(more="model_transaction_policy { decoupled: true }"))
    if place:
        python_model(models, f"only{place}", adds(place))
    return models


def table(*members: Serving, **keys: str) -> str:
    """Return the table of a pool whose members have both ports."""
    rows = ", ".join(f'{{ http = "{each.http}", grpc = "{each.grpc}" }}' for each in members)
    more = "".join(f"{key} = {value}\n" for key, value in keys.items())
    return f'[[pool]]\nname = "main"\nmembers = [{rows}]\nhealth-interval = "200ms"\n{more}'


def start(stack: ExitStack, folder: Path, count: int, *, clean: bool = True) -> Cluster:
    members = [
        stack.enter_context(serving(repository(folder, place), folder / f"member{place}.log", clean=clean))
        for place in range(count)
    ]
    return Cluster(stack.enter_context(routing(folder, table(*members))), members, folder)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield start(stack, tmp_path_factory.mktemp("cluster"), 2)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(cluster.router.grpc) as made:
        yield made


def tensor(*values: float) -> list[grpcclient.InferInput]:
    made = grpcclient.InferInput("INPUT0", [1, len(values)], "FP32")
    made.set_data_from_numpy(np.array([values], np.float32))
    return [made]


def value(result: grpcclient.InferResult) -> float:
    return float(result.as_numpy("OUTPUT0").flat[0])


def test_calls_reach_all_members(client: grpcclient.InferenceServerClient) -> None:
    assert {value(client.infer("who", tensor(10.0))) for _ in range(20)} == {10.0, 11.0}


def test_a_model_of_one_member_is_found_there(client: grpcclient.InferenceServerClient) -> None:
    assert [value(client.infer("only1", tensor(0.0))) for _ in range(5)] == [1.0] * 5


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_large_tensors_and_compression(client: grpcclient.InferenceServerClient, compression: str | None) -> None:
    array = np.arange(2_000_000, dtype=np.float32).reshape(1, -1) % 1000
    made = grpcclient.InferInput("INPUT0", list(array.shape), "FP32")
    made.set_data_from_numpy(array)
    result = client.infer("same", [made], compression_algorithm=compression, request_id="large")
    assert np.array_equal(result.as_numpy("OUTPUT0"), array)
    assert result.get_response().id == "large"


def test_the_members_errors_pass(client: grpcclient.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="INPUT9") as wrong:
        client.infer(
            "same", [grpcclient.InferInput("INPUT9", [1, 1], "FP32").set_data_from_numpy(np.zeros((1, 1), np.float32))]
        )
    assert wrong.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="nobody") as unknown:
        client.infer("nobody", tensor(1.0))
    assert unknown.value.status() == "StatusCode.NOT_FOUND"


def test_a_stream(cluster: Cluster) -> None:
    stream = Stream(cluster.router)
    stream.ask("repeats", 3.0, "three", enable_empty_final_response=True)
    came = [stream.next() for _ in range(4)]
    assert [each[1] for each in came] == [0.0, 1.0, 2.0, None] and came[-1][2]
    stream.ask("same", 7.0, "other model, same stream")
    assert stream.next()[1] == 7.0
    stream.close()


def test_many_streams_and_calls_together(cluster: Cluster) -> None:
    streams = [Stream(cluster.router) for _ in range(8)]
    for place, stream in enumerate(streams):
        for _ in range(10):
            stream.ask("same", float(place))
    for place, stream in enumerate(streams):
        assert [stream.next()[1] for _ in range(10)] == [float(place)] * 10
        stream.close()
    came: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(cluster.router.grpc) as client:
        for number in range(300):
            client.async_infer("same", tensor(float(number)), lambda result, error: came.put(error or value(result)))
        assert sorted(came.get(timeout=PATIENCE) for _ in range(300)) == [float(number) for number in range(300)]


def held_calls(member: Serving) -> int:
    return member.text.count("executes")


def test_a_deadline_holds_at_the_router(cluster: Cluster, client: grpcclient.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match=r"Deadline|timeout") as late:
        client.infer("held", tensor(-1.0), client_timeout=0.5)
    assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    for place in range(2):
        let_go(cluster.folder / f"models{place}" / "held")
    eventually(lambda: sum(samples(cluster.router, "nerite_router_under_way").values()) == 0)


def test_what_the_router_answers(cluster: Cluster, client: grpcclient.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.get_server_metadata().name
    assert client.is_model_ready("who") and not client.is_model_ready("nobody")
    assert client.get_model_metadata("who").inputs[0].name == "INPUT0"
    assert client.get_model_config("who").config.name == "who"
    names = [model.name for model in client.get_model_repository_index().models]
    assert names == ["counts", "held", "only1", "repeats", "same", "who"]
    with pytest.raises(InferenceServerException, match="member") as refused:
        client.get_system_shared_memory_status()
    assert refused.value.status() == "StatusCode.UNIMPLEMENTED"
    with pytest.raises(InferenceServerException, match="member"):
        client.load_model("who")


def test_a_sequence_stays_where_it_began(cluster: Cluster) -> None:
    with grpcclient.InferenceServerClient(cluster.router.grpc) as client:
        for sequence in (7, "eight", 9, 10):
            sums = [
                value(
                    client.infer(
                        "counts", tensor(1.0), sequence_id=sequence, sequence_start=at == 0, sequence_end=at == 4
                    )
                )
                for at in range(5)
            ]
            assert sums == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_message_that_is_none(cluster: Cluster) -> None:
    from raw_grpc import RawGrpc

    raw = RawGrpc(cluster.router)
    status, text = raw.ask(b"\xff\xff\xff")
    assert status in (3, 13), text
    status, text = raw.ask(b"", "/inference.GRPCInferenceService/Unheard")
    assert status == 12
    raw.close()


def test_a_killed_member_costs_no_call(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = start(stack, tmp_path, 2, clean=False)
        answers: list[float] = []
        failures: list[str] = []
        stop = threading.Event()

        def load() -> None:
            with grpcclient.InferenceServerClient(cluster.router.grpc) as client:
                while not stop.is_set():
                    try:
                        answers.append(value(client.infer("who", tensor(0.0))))
                    except InferenceServerException as error:
                        failures.append(str(error))

        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        eventually(lambda: {0.0, 1.0} <= set(answers))
        os.kill(cluster.members[1].process.pid, signal.SIGKILL)
        before = len(answers)
        eventually(lambda: len(answers) > before + 300)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert failures == []
        assert set(answers[-100:]) == {0.0}
        retried = samples(cluster.router, "nerite_router_retries_total")
        assert sum(retried.values()) >= 1, retried


def test_a_stream_whose_member_dies_is_told(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = start(stack, tmp_path, 1, clean=False)
        stream = Stream(cluster.router)
        stream.ask("same", 1.0)
        assert stream.next()[1] == 1.0
        os.kill(cluster.members[0].process.pid, signal.SIGKILL)
        told = stream.next()
        assert "UNAVAILABLE" in told and cluster.members[0].http in told and "main" in told
        stream.close()


def test_a_stopping_router_finishes_its_calls(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = start(stack, tmp_path, 1)
        client = stack.enter_context(grpcclient.InferenceServerClient(cluster.router.grpc))
        came: queue.Queue[Any] = queue.Queue()
        client.async_infer("held", tensor(-1.0), lambda result, error: came.put(error or value(result)))
        eventually(lambda: held_calls(cluster.members[0]) == 1)
        cluster.router.process.send_signal(signal.SIGTERM)
        eventually(lambda: "Waiting for requests in progress" in cluster.router.text)
        let_go(tmp_path / "models0" / "held")
        assert came.get(timeout=PATIENCE) == -1.0
        assert cluster.router.process.wait(PATIENCE) == 0
