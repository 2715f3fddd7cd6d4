"""10,000 requests with CUDA shared memory, while clients make mistakes and are killed, and workers are killed.

Each gets exactly one answer, which is right or says what is wrong; afterwards nothing is left of them on the GPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuda_machine import CudaMachine
from serving import HELD, Serving, eventually, let_go, pbtxt, python_model, serving

REQUESTS = 10_000
CLIENTS = 8
MODELS = ("on_host", "on_device", "through_both")
FRONTS = ("--front-processes=2",)

ON_HOST = """
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each * 2)]) for each in inputs]
"""
ON_DEVICE = """
    def execute(self, requests):
        from device_arrays import DeviceArray, numpy_of
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "x")
            array = given.as_numpy() if given.is_cpu() else numpy_of(given)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", DeviceArray(array * 2))]))
        return responses
"""
CONFIG = """backend: "python" max_batch_size: 16
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_GPU gpus: 0 }
dynamic_batching {}
"""
TAKES_DEVICE = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'
ENSEMBLE = """platform: "ensemble" max_batch_size: 16
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step { STEP_1 input_map { key: "x" value: "x" } output_map { key: "y" value: "t" } }
  step { STEP_2 input_map { key: "x" value: "t" } output_map { key: "y" value: "y" } }
}
"""
ENSEMBLE = ENSEMBLE.replace("STEP_1", 'model_name: "on_device" model_version: -1')
ENSEMBLE = ENSEMBLE.replace("STEP_2", 'model_name: "on_host" model_version: -1')

CLIENT = """
import random, sys
import numpy as np
import tritonclient.utils.cuda_shared_memory as shm

protocol, url, name, count, models = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5].split(",")
triton = __import__(f"tritonclient.{protocol}", fromlist=["x"])
client = triton.InferenceServerClient(url)
chance = random.Random(name)
regions = {}


def register(kind):
    region = regions[kind] = shm.create_shared_memory_region(f"{name}-{kind}", 1 << 16, 0)
    client.register_cuda_shared_memory(f"{name}-{kind}", shm.get_raw_handle(region), 0, 1 << 16)


def answered(turn):
    # Each request differs in content, size and place.
    rows, columns = chance.randrange(1, 5), chance.randrange(1, 600)
    given = np.full((rows, columns), chance.random(), np.float32)
    at, model = 64 * chance.randrange(64), chance.choice(models)
    shm.set_shared_memory_region(regions["in"], [np.zeros(at, np.uint8), given])
    tensor = triton.InferInput("x", [rows, columns], "FP32")
    tensor.set_shared_memory(f"{name}-in", given.nbytes, offset=at)
    output = triton.InferRequestedOutput("y")
    output.set_shared_memory(f"{name}-out", given.nbytes, offset=128)
    client.infer(model, [tensor], outputs=[output])
    found = shm.get_contents_as_numpy(regions["out"], np.uint8, [128 + given.nbytes])[128:].view(np.float32)
    factor = 4 if model == "through_both" else 2
    return (found == given.ravel() * np.float32(factor)).all()


def mistaken(turn):
    tensor = triton.InferInput("x", [1, 4], "FP32")
    what = chance.choice(["name", "offset", "size", "twice", "handle", "output"])
    region = f"{name}-in"
    if what == "twice":
        client.register_cuda_shared_memory(region, shm.get_raw_handle(regions["in"]), 0, 64)
    elif what == "handle":
        client.register_cuda_shared_memory(f"{name}-wrong", b"AAAA", 0, 64)
    elif what == "output":
        tensor.set_shared_memory(region, 16)
        output = triton.InferRequestedOutput("y")
        output.set_shared_memory(f"{name}-out", 8)
        client.infer(chance.choice(models), [tensor], outputs=[output])
    else:
        places = {"name": ("nowhere", 16, 0), "offset": (region, 16, 1 << 20), "size": (region, 1 << 17, 0)}
        region, size, offset = places[what]
        tensor.set_shared_memory(region, size, offset=offset)
        client.infer(chance.choice(models), [tensor])


register("in"), register("out")
print("begun", flush=True)
good = wrong = refused = failed = 0
for turn in range(count):
    if turn % 10 == 9:
        try:
            mistaken(turn)
        except Exception:
            refused += 1
        continue
    try:
        good, wrong = (good + 1, wrong) if answered(turn) else (good, wrong + 1)
    except Exception as error:
        assert "is not healthy" in str(error), error
        failed += 1
    if turn % 100 == 50:
        client.unregister_cuda_shared_memory(f"{name}-in")
        shm.destroy_shared_memory_region(regions.pop("in"))
        register("in")
client.unregister_cuda_shared_memory(f"{name}-in"), client.unregister_cuda_shared_memory(f"{name}-out")
print(good, wrong, refused, failed)
"""


@pytest.fixture
def machine(tmp_path: Path) -> CudaMachine:
    return CudaMachine(tmp_path)


@pytest.fixture
def server(machine: CudaMachine, tmp_path: Path) -> Iterator[Serving]:
    models = tmp_path / "models"
    python_model(models, "on_host", ON_HOST, CONFIG)
    python_model(models, "on_device", ON_DEVICE, CONFIG + TAKES_DEVICE)
    (models / "through_both" / "1").mkdir(parents=True)
    (models / "through_both" / "config.pbtxt").write_text(ENSEMBLE)
    with serving(models, tmp_path / "log", "--allow-client-shm=true", environment=machine.environment) as server:
        yield server


def start(machine: CudaMachine, server: Serving, name: str, count: int) -> subprocess.Popen[str]:
    protocol = "http" if name[-1] in "02468" else "grpc"
    url = server.http if protocol == "http" else server.grpc
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, protocol, url, name, str(count), ",".join(MODELS)],
        env={**os.environ, **machine.environment},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(300)
def test_nothing_is_wrong_or_left(machine: CudaMachine, server: Serving) -> None:
    clients = [start(machine, server, f"client{number}", REQUESTS // CLIENTS) for number in range(CLIENTS)]
    doomed = [start(machine, server, f"doomed{number}", REQUESTS) for number in range(2)]
    for each in (*clients, *doomed):
        assert each.stdout is not None and each.stdout.readline() == "begun\n"
    before = server.metrics()['nv_inference_request_success{model="on_device",version="1"}']
    eventually(lambda: server.metrics()['nv_inference_request_success{model="on_device",version="1"}'] > before + 100)
    for each in doomed:
        each.kill()
    os.kill(server.workers()["on_device_0_0"], signal.SIGKILL)
    told: Counter[str] = Counter()
    for each in (*clients, *doomed):
        words = each.communicate()[0].split()
        if each in clients:
            assert each.returncode == 0
            told.update(dict(zip(("good", "wrong", "refused", "failed"), map(int, words), strict=True)))
    assert told["wrong"] == 0
    assert told.total() == REQUESTS // CLIENTS * CLIENTS
    assert told["refused"] == REQUESTS // 10
    assert told["failed"] <= CLIENTS  # each had one request with the worker that was killed

    # What clients that were killed had registered is unregistered by whoever cleans up behind them.
    for region in server.json("GET", "/v2/cudasharedmemory/status"):
        assert region["name"].startswith("doomed")
    assert server.ask("POST", "/v2/cudasharedmemory/unregister")[0] == 200
    pids = (server.process.pid, *server.workers().values())
    eventually(lambda: not [name for name in machine.held(*pids) if "mapping" in name and not _of_pool(name, server)])
    # The pool is all that the server itself has; a worker has been granted an eighth of it.
    assert [name for name in machine.held(server.process.pid) if "mapping" not in name] == [f"0-{server.process.pid}-1"]
    used = 'nerite_cuda_memory_pool_used_bytes{gpu="0"}'
    eventually(lambda: server.metrics()[used] == (64 << 20) // 8, 5, str(server.metrics()[used]))


WAITING = """
import sys
import numpy as np
import tritonclient.grpc as triton
import tritonclient.utils.cuda_shared_memory as shm

client = triton.InferenceServerClient(sys.argv[1])
for name in ("in", "out"):
    region = shm.create_shared_memory_region(name, 64, 0)
    shm.set_shared_memory_region(region, [np.full(16, -1, np.float32)])
    client.register_cuda_shared_memory(name, shm.get_raw_handle(region), 0, 64)
tensor, output = triton.InferInput("INPUT0", [1, 4], "FP32"), triton.InferRequestedOutput("OUTPUT0")
tensor.set_shared_memory("in", 16)
output.set_shared_memory("out", 16)
for _ in range(3):
    client.async_infer("held", [tensor], lambda result, error: None, outputs=[output])
print("sent", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("killed", "flags"), [("client", ()), ("client", FRONTS), ("fronts", FRONTS)])
def test_nothing_is_left_of_requests_that_waited(
    killed: str, flags: tuple[str, ...], machine: CudaMachine, tmp_path: Path
) -> None:
    """No further request comes to the model, which would move its queue on."""
    models = tmp_path / "models"
    python_model(models, "held", HELD, pbtxt(more=""))  # each request is executed alone
    flags = ("--allow-client-shm=true", *flags)
    with serving(models, tmp_path / "log", *flags, environment=machine.environment) as server:
        with subprocess.Popen(
            [sys.executable, "-c", WAITING, server.grpc],
            env={**os.environ, **machine.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client:
            assert client.stdout is not None and client.stdout.readline() == "sent\n"
            waiting = 'nv_inference_pending_request_count{model="held",version="1"}'
            eventually(lambda: "executes -1" in server.text and server.metrics()[waiting] == 2)
            for pid in [client.pid] if killed == "client" else server.fronts().values():
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: server.metrics()[waiting] == 0)
            let_go(models / "held")
            assert len(machine.held(server.process.pid)) == 2
            client.kill()

        def unregistered() -> bool:
            """Unregister the regions; return whether they are closed, as once the last request is answered."""
            assert server.ask("POST", "/v2/cudasharedmemory/unregister")[0] == 200
            return not machine.held(server.process.pid, *server.fronts().values())

        eventually(unregistered)


def _of_pool(name: str, server: Serving) -> bool:
    """Return whether a mapping is of the server's pool, which its workers have opened."""
    return name.endswith(f"-0-{server.process.pid}-1")
