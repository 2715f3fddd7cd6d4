"""A front process that ends or stands still takes its connections along, and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme
from front_load import LARGE, SMALL, Asking, HttpClient, Load, peers

from faults import Bystanders, descriptors, family, resident, tensor_memory
from process_family import lives
from serving import IDENTITY, PATIENCE, Serving, binary_request, eventually, pbtxt, python_model, serving

KILLS = int(os.environ.get("NERITE_TEST_FRONT_KILLS", "5"))
MB = 2**20
WORK = """
def execute(self, requests):
    time.sleep(0.002)
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""
SEVERAL = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for _ in range(5):
            time.sleep(0.001)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SUMS = """
def initialize(self, args):
    self.sums = {}

def execute(self, requests):
    responses = []
    for request in requests:
        of = request.correlation_id()
        value = float(request.inputs()[0].as_numpy()[0, 0])
        begins = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        self.sums[of] = value + (0 if begins else self.sums[of])
        answer = np.array([[self.sums[of]]], np.float32)
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", answer)]))
    return responses
"""
PATIENT = """
def execute(self, requests):
    print("executes", flush=True)
    while not requests[0].is_cancelled():
        time.sleep(0.001)
    print("cancelled", flush=True)
    return [pb_utils.InferenceResponse([]) for _ in requests]
"""
MODELS = ("work", "several", "sums", "patient", "other")
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 30000000 oldest { max_candidate_sequences: 256 } }"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    python_model(folder, "work", WORK, pbtxt().replace("KIND_CPU", "KIND_CPU count: 2"))
    python_model(folder, "several", SEVERAL, pbtxt(batch=1, more="model_transaction_policy { decoupled: true }"))
    python_model(folder, "sums", SUMS, pbtxt(more=SEQUENCES))
    python_model(folder, "patient", PATIENT, pbtxt(batch=1, more=""))
    python_model(folder, "other", IDENTITY)
    return folder


@pytest.fixture
def server(models: Path, tmp_path: Path) -> Iterator[Serving]:
    flags = ("--front-processes=2", "--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true")
    with serving(models, tmp_path / "log", *flags) as running:
        yield running


def template_of(server: Serving) -> int:
    pid = server.workers()["other_0_0"]
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def restarts(server: Serving) -> int:
    return int(server.metrics()["nerite_front_restarts_total"])


def back(server: Serving, count: int) -> bool:
    """Say whether both fronts serve, and fronts were started again ``count`` times."""
    samples = server.metrics()
    return samples["nerite_front_restarts_total"] == count and samples["nerite_front_processes"] == 2


def nothing_pending(server: Serving) -> bool:
    pending = {name: count for name, count in server.metrics().items() if name.startswith("nv_inference_pending")}
    return bool(pending) and not any(pending.values())


def kill(pid: int) -> set[int]:
    """Kill a front; return the ports of its clients."""
    os.kill(pid, signal.SIGSTOP)
    mine = peers(pid)
    os.kill(pid, signal.SIGKILL)
    return mine


@pytest.mark.timeout(120 + 6 * KILLS)
def test_fronts_that_are_killed_under_load(server: Serving) -> None:
    lost: set[int] = set()
    open_files, memory = [], []
    with Load(server) as load:
        load.progress()
        for number in range(1, KILLS + 1):
            began = time.monotonic()
            front = server.fronts()[f"front_{number % 2}"]
            mine = kill(front)
            lost |= mine
            eventually(lambda number=number: back(server, number))  # type: ignore[misc]  # bound now
            load.progress()
            assert set(load.lost) <= lost, "connections of the other front"
            open_files.append(len(descriptors(server)))
            memory.append(resident(server))
            time.sleep(max(0.0, began + 1.5 - time.monotonic()))  # no front has had a short life
        lost_at_all = set(load.lost)
    assert lost_at_all <= lost
    assert lost_at_all, "no request was under way"
    eventually(lambda: nothing_pending(server))
    assert len(set(open_files)) == 1, "as many processes as before"
    assert memory[-1] < memory[1] + 48 * MB
    eventually(lambda: tensor_memory(server) < 16 * MB, what="tensors are left in shared memory")
    assert server.infer("work", [1.0]) == [1.0]
    assert all(map(server.ready, MODELS))
    errors = {name: count for name, count in server.metrics().items() if name.startswith("nerite_internal_errors")}
    assert set(errors.values()) == {0}
    assert len(re.findall(r"front process 'front_\d' is gone.*SIGKILL", server.text)) == KILLS


def test_descriptors_after_kills(server: Serving) -> None:
    """Memory that a front had written and read is closed on all sides."""
    counts = []
    for number in range(1, 5):
        with Load(server, 1) as load:
            load.progress()
            kill(server.fronts()["front_0"])
            kill(server.fronts()["front_1"])
            eventually(lambda number=number: back(server, 2 * number))  # type: ignore[misc]  # bound now
            load.progress()
        eventually(lambda: nothing_pending(server))
        counts.append(descriptors(server))
    eventually(lambda: sum(descriptors(server).values()) <= sum(counts[0].values()) + 4)
    assert len(descriptors(server)) == len(counts[0])


def test_what_a_killed_front_had_is_cancelled(server: Serving) -> None:
    given_up = 'nerite_requests_given_up_total{model="patient",reason="disconnected",version="1"}'
    body = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[1]}]}'
    head = b"POST /v2/models/patient/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", server.ports["HTTPService"]), timeout=PATIENCE) as client:
        client.sendall(head + body)
        eventually(lambda: "executes" in server.text)
        port = client.getsockname()[1]
        (front,) = [pid for pid in server.fronts().values() if port in peers(pid)]
        os.kill(front, signal.SIGKILL)
        with pytest.raises(ConnectionError):
            raise ConnectionError if not client.recv(1) else AssertionError("an answer")
    eventually(lambda: "cancelled" in server.text)
    assert server.metrics()[given_up] == 1
    eventually(lambda: nothing_pending(server))


def over_the_other(load: Load, stopped: int) -> list[Asking]:
    theirs = peers(stopped)
    return [client for client in load.clients if client.port not in theirs]


def test_a_front_that_stands_still(server: Serving) -> None:
    """It goes on with all that it had when it is continued soon."""
    with Load(server, 2) as load:
        load.progress()
        front = server.fronts()["front_0"]
        os.kill(front, signal.SIGSTOP)
        load.progress(over_the_other(load, front))
        for step in ("unload", "load"):
            began = time.monotonic()
            status = asked(server, front, f"/v2/repository/models/other/{step}")
            assert status == 200
            assert time.monotonic() - began < 6
        os.kill(front, signal.SIGCONT)
        load.progress()
        assert load.lost == []
        assert restarts(server) == 0


def asked(server: Serving, avoided: int, path: str) -> int:
    """Ask over a connection that is not one of the front ``avoided``."""
    host, port = server.http.split(":")
    while True:
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as client:
            if handed_over(server, avoided, client.getsockname()[1]):
                client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
                return int(client.recv(1000).split()[1])


def handed_over(server: Serving, avoided: int, port: int) -> bool:
    """Say whether another front than ``avoided`` has a connection."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        if any(port in peers(pid) for pid in server.fronts().values() if pid != avoided):
            return True
        time.sleep(0.01)
    return False


def test_a_front_that_does_not_go_on(server: Serving) -> None:
    """It is killed and replaced, and others are served meanwhile: those that come later, too."""
    with Load(server, 2) as load:
        load.progress()
        front = server.fronts()["front_1"]
        theirs = peers(front)
        os.kill(front, signal.SIGSTOP)
        time.sleep(3.5)  # until it is known that it does not answer
        with Bystanders(server):
            began = time.monotonic()
            assert server.ask("POST", "/v2/repository/models/sums/unload")[0] == 200
            assert server.ask("POST", "/v2/repository/models/sums/load")[0] == 200
            assert time.monotonic() - began < 6
            load.go_on()
            eventually(lambda: back(server, 1))
        load.progress()
        assert set(load.lost) <= theirs
    assert "has not answered for" in server.text
    assert not lives(front)


def test_more_connections_than_fronts_have_descriptors(models: Path, tmp_path: Path) -> None:
    """Further ones wait; those that are there are answered, and models load."""
    flags = ("--front-processes=2", "--max-connections=0", "--model-control-mode=explicit", "--load-model=other")
    within = ("sh", "-c", 'ulimit -n 150 && exec "$0" "$@"')
    with serving(models, tmp_path / "log", *flags, within=within) as server, contextlib.ExitStack() as idle:
        client = HttpClient(server)
        idle.callback(client.close)
        for number in range(400):
            port = server.ports[("HTTPService", "GRPCInferenceService")[number % 2]]
            idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
        for tensor in (SMALL, LARGE):
            assert client.ask("other", *binary_request(tensor)).endswith(tensor.tobytes())
        with ThreadPoolExecutor(1) as callers:
            waiting = callers.submit(server.infer, "other", [1.0])
            assert client.ask("other", *binary_request(SMALL)).endswith(SMALL.tobytes())
            assert not waiting.done()
            idle.close()
            assert waiting.result(PATIENCE) == [1.0]
        assert server.ask("POST", "/v2/repository/models/work/load")[0] == 200
        assert server.infer("work", [1.0]) == [1.0]
        assert restarts(server) == 0


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n"])
def test_handshakes_that_fail(models: Path, tmp_path: Path, hello: bytes) -> None:
    """Their connections count no longer."""
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "pem"))
    flags = [
        f"--{port}-{flag}" for port in ("http", "grpc") for flag in ("use-ssl=1", f"server-cert={tmp_path / 'pem'}")
    ]
    flags += [f"--{port}-server-key={tmp_path / 'pem'}" for port in ("http", "grpc")]
    with serving(models, tmp_path / "log", "--front-processes=2", *flags) as server:
        for number in range(20):
            port = server.ports[("HTTPService", "GRPCInferenceService")[number % 2]]
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
                client.sendall(hello)
        for name in ("http", "grpc"):
            eventually(lambda name=name: server.metrics()[f'nerite_connections{{port="{name}"}}'] == 0)


def test_a_region_whose_file_is_gone(server: Serving) -> None:
    """A front that is started later serves all but that."""
    key = Path("/dev/shm") / f"nerite_test_{os.getpid()}"
    key.write_bytes(bytes(64))
    region = {"key": f"/{key.name}", "offset": 0, "byte_size": 64}
    assert server.ask("POST", "/v2/systemsharedmemory/region/here/register", region)[0] == 200
    key.unlink()
    for number, front in enumerate(server.fronts().values(), 1):
        os.kill(front, signal.SIGKILL)
        eventually(lambda number=number: back(server, number))  # type: ignore[misc]  # bound now
    assert server.infer("other", [1.0]) == [1.0]
    place = {"shared_memory_region": "here", "shared_memory_byte_size": 4}
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "parameters": place}
    status, _, error = server.ask("POST", "/v2/models/other/infer", {"inputs": [tensor]})
    assert status == 404
    assert b"Unable to find shared memory region: 'here'" in error
    assert server.ask("POST", "/v2/systemsharedmemory/region/here/unregister")[0] == 200


def fails(server: Serving) -> list[str]:
    return re.findall(r"the front process 'front_\d' is gone", server.text)


def infer_again(server: Serving) -> list[float]:
    """Ask until the front that has the connection lives long enough."""
    while True:
        with contextlib.suppress(ConnectionError):
            return server.infer("other", [1.0])


def test_fronts_that_cannot_start(server: Serving, tmp_path: Path) -> None:
    """Both end before they serve, again and again: they are started less and less often, and connections wait."""
    stopped = False

    def kill_all() -> bool:
        for pid in server.fronts().values():
            with contextlib.suppress(ProcessLookupError):  # it has ended since they were listed
                os.kill(pid, signal.SIGKILL)
        return stopped

    with ThreadPoolExecutor(2) as callers:
        killing = callers.submit(lambda: [time.sleep(0.002) for _ in iter(kill_all, True)])
        time.sleep(6)
        died = len(fails(server))
        asking = callers.submit(infer_again, server)
        time.sleep(0.5)
        stopped = True
        killing.result(PATIENCE)
        assert asking.result(PATIENCE) == [1.0]
    assert 6 <= died <= 24
    assert restarts(server) >= died


def test_the_template_is_killed_under_load(server: Serving) -> None:
    with Load(server, 1) as load:
        load.progress()
        for number in range(1, 4):
            fronts = server.fronts()
            os.kill(template_of(server), signal.SIGKILL)
            eventually(lambda number=number: back(server, 2 * number))  # type: ignore[misc]  # bound now
            eventually(lambda: all(map(server.ready, MODELS)))
            load.go_on()
            assert not set(server.fronts().values()) & set(fronts.values())
            load.progress()
    assert server.infer("other", [1.0]) == [1.0]
    eventually(lambda: nothing_pending(server))


def stop_then(server: Serving, meanwhile: Callable[[], None]) -> list[int]:
    """Stop a server; return those of its processes that are left."""
    everyone = family(server)
    server.process.send_signal(signal.SIGTERM)
    meanwhile()
    assert server.process.wait(PATIENCE) == 0
    return [pid for pid in everyone if lives(pid)]


@pytest.mark.parametrize("disturbance", ["nothing", "kill", "stop"])
def test_the_end_of_the_server(server: Serving, disturbance: str) -> None:
    """Also with a front that is killed, or stands still, meanwhile."""
    slow = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[1]}]}'
    python_model(Path(server.log).parent / "models", "slow", WORK.replace("0.002", "1"), pbtxt(batch=1, more=""))
    assert server.ask("POST", "/v2/repository/models/slow/load")[0] == 200
    with ThreadPoolExecutor(8) as callers:
        asking = [callers.submit(server.ask, "POST", "/v2/models/slow/infer", slow) for _ in range(3)]
        pending = 'nv_inference_pending_request_count{model="slow",version="1"}'
        eventually(lambda: server.metrics()[pending] == 2)

        def disturb() -> None:
            pid = server.fronts()["front_0"]
            if disturbance != "nothing":
                os.kill(pid, signal.SIGKILL if disturbance == "kill" else signal.SIGSTOP)

        assert stop_then(server, disturb) == []
        answered = []
        for each in asking:
            try:
                answered.append(each.result(PATIENCE)[0])
            except (ConnectionError, OSError):
                assert disturbance != "nothing"
    assert set(answered) == {200}
