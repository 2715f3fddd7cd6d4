"""CUDA shared memory of clients: NVIDIA's client module, a real server, and a stand-in for CUDA that counts copies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuda_counts import counts_of_each
from cuda_machine import CudaMachine, copies
from serving import HELD, Serving, eventually, python_model, serving

ON_HOST = """
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            where = np.full((len(given.as_numpy()), 1), given.is_cpu())
            outputs = [pb_utils.Tensor("OUTPUT0", given.as_numpy() * 2), pb_utils.Tensor("ON_HOST", where)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
ON_DEVICE = """
    def execute(self, requests):
        from device_arrays import DeviceArray, numpy_of
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            array = given.as_numpy() if given.is_cpu() else numpy_of(given)
            output = pb_utils.Tensor.from_dlpack("OUTPUT0", DeviceArray(array * 2))
            where = np.full((len(array), 1), given.is_cpu())
            responses.append(pb_utils.InferenceResponse([output, pb_utils.Tensor("ON_HOST", where)]))
        return responses
"""
CONFIG = """backend: "python" max_batch_size: 64
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "ON_HOST" data_type: TYPE_BOOL dims: [ 1 ] }
instance_group { kind: KIND_GPU gpus: 0 }
"""
TAKES_DEVICE = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'
STRINGS = """
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each)]) for each in inputs]
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> CudaMachine:
    return CudaMachine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module", params=[(), ("--front-processes=2",)], ids=["alone", "fronts"])
def server(
    request: pytest.FixtureRequest, machine: CudaMachine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    models = tmp_path_factory.mktemp("models")
    python_model(models, "on_host", ON_HOST, CONFIG)
    python_model(models, "on_device", ON_DEVICE, CONFIG + TAKES_DEVICE)
    python_model(models, "from_device", ON_DEVICE, CONFIG)
    text = 'backend: "python" input { name: "INPUT0" data_type: TYPE_STRING dims: [ -1 ] }'
    python_model(models, "held", HELD)
    python_model(models, "strings", STRINGS, text + ' output { name: "OUTPUT0" data_type: TYPE_STRING dims: [ -1 ] }')
    flags = ("--allow-client-shm=true", *request.param)
    with serving(models, models / "log", *flags, environment=machine.environment) as server:
        yield server


CLIENT = """
import importlib, sys
import numpy as np
import tritonclient.utils.cuda_shared_memory as shm

protocol, url, model = sys.argv[1:4]
triton = importlib.import_module(f"tritonclient.{protocol}")
client = triton.InferenceServerClient(url)


def region(name, size, device=0):
    handle = shm.create_shared_memory_region(name, size, device)
    client.register_cuda_shared_memory(name, shm.get_raw_handle(handle), device, size)
    return handle


def listed():
    status = client.get_cuda_shared_memory_status()
    if protocol == "http":
        return status
    regions = [status.regions[name] for name in sorted(status.regions)]
    return [{"name": each.name, "device_id": each.device_id, "byte_size": each.byte_size} for each in regions]


def sent(shape, name, size, offset=0, datatype="FP32"):
    tensor = triton.InferInput("INPUT0", shape, datatype)
    tensor.set_shared_memory(name, size, offset=offset)
    return tensor


def wanted(name, size, offset=0):
    output = triton.InferRequestedOutput("OUTPUT0")
    output.set_shared_memory(name, size, offset=offset)
    return output
"""
THERE_AND_BACK = f"""{CLIENT}
rounds = int(sys.argv[4])
put, got = region("put", 4096), region("got", 4096)
status = listed()
for each, name in zip(status, ("got", "put"), strict=True):
    assert each == {{"name": name, "device_id": 0, "byte_size": 4096}}, each
for turn in range(rounds):
    given = np.arange(8, dtype=np.float32).reshape(2, 4) + turn
    shm.set_shared_memory_region(put, [np.zeros(16, np.float32), given])
    outputs = [wanted("got", 32, offset=0), triton.InferRequestedOutput("ON_HOST")]
    answer = client.infer(model, [sent([2, 4], "put", 32, offset=64)], outputs=outputs)
    found = shm.get_contents_as_numpy(got, np.float32, [2, 4])
    assert (found == given * 2).all(), (turn, found)
print(answer.as_numpy("ON_HOST").tolist())
answer = client.infer(model, [sent([2, 4], "put", 32, offset=64)])
assert (answer.as_numpy("OUTPUT0") == given * 2).all()
client.unregister_cuda_shared_memory("put")
client.unregister_cuda_shared_memory()
assert not listed()
"""


@pytest.mark.parametrize("model", ["on_host", "on_device", "from_device"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_nvidias_client(server: Serving, machine: CudaMachine, protocol: str, model: str) -> None:
    url = server.http if protocol == "http" else server.grpc
    before = copies(server)
    told = machine.client(THERE_AND_BACK, protocol, url, model, "20")
    assert told.strip() == ("[[False], [False]]" if model == "on_device" else "[[True], [True]]")
    made = copies(server) - before
    if model == "on_host":  # the input comes to the host, and the output goes back
        assert (made["to_host"], made["to_device"], made["on_device"]) == (21, 20, 0)
    elif model == "from_device":
        assert made["to_host"] >= 22  # the last output goes to a client that wants it on the host
    fronts = {*server.fronts().values()}
    assert len(fronts) == server.metrics().get("nerite_front_processes", 0)
    calls = counts_of_each(machine.memory)
    assert server.process.pid in calls and fronts.isdisjoint(calls), "no front has called CUDA"


STREAM = f"""{CLIENT}
import queue
put, got = region("p_put", 64), region("p_got", 64)
answers = queue.Queue()
client.start_stream(lambda result, error: answers.put(error or result))
for turn in range(20):
    given = np.arange(4, dtype=np.float32) + turn
    shm.set_shared_memory_region(put, [given])
    client.async_stream_infer(model, [sent([1, 4], "p_put", 16)], outputs=[wanted("p_got", 16, offset=16)])
    answers.get(timeout=20)
    print((shm.get_contents_as_numpy(got, np.float32, [8])[4:] - given).tolist())
client.stop_stream()
client.unregister_cuda_shared_memory()
"""


@pytest.mark.parametrize("model", ["on_host", "on_device"])
def test_a_stream(server: Serving, machine: CudaMachine, model: str) -> None:
    said = machine.client(STREAM, "grpc", server.grpc, model).splitlines()
    assert said == [str([turn + 0.0, turn + 1.0, turn + 2.0, turn + 3.0]) for turn in range(20)]


IN_USE = f"""{CLIENT}
import os, pathlib, queue, time
log, go = map(pathlib.Path, sys.argv[4:])
put, got = region("u_put", 64), region("u_got", 64)
given = np.arange(-1, 3, dtype=np.float32)
shm.set_shared_memory_region(put, [given])
answers = queue.Queue()
inputs, outputs = [sent([1, 4], "u_put", 16)], [wanted("u_got", 16)]
client.async_infer(model, inputs, lambda result, error: answers.put(error), outputs=outputs)
while "executes -1" not in log.read_text():
    time.sleep(0.01)
client.unregister_cuda_shared_memory("u_put")
client.unregister_cuda_shared_memory()
print(f"-{{os.getpid()}}-")
print([each["name"] for each in listed()])
try:
    region("u_put", 64)
except Exception as error:
    print(error)
go.touch()
print(answers.get(timeout=20), shm.get_contents_as_numpy(got, np.float32, [4]).tolist(), listed())
"""


def test_a_region_that_is_unregistered_in_use_stays_until_the_answer(server: Serving, machine: CudaMachine) -> None:
    go = server.log.parent / "held" / "1" / "go"
    client, *said = machine.client(IN_USE, "grpc", server.grpc, "held", str(server.log), str(go)).splitlines()
    assert said[0] == "['u_got', 'u_put']"
    assert "shared memory region 'u_put' already in manager" in said[1]
    assert said[2:] == ["None [-1.0, 0.0, 1.0, 2.0] []"]
    eventually(lambda: not [name for name in machine.held(server.process.pid) if client in name])


KINDS = f"""{CLIENT}
import os, threading
import tritonclient.utils.shared_memory as system
kept, wrong, seen = [], [], set()
over = begun = 0
stopping = threading.Event()


def ask():
    own = triton.InferenceServerClient(url)
    while not stopping.is_set():
        before = over
        try:
            outputs = [triton.InferRequestedOutput("OUTPUT0")]
            answer = own.infer(model, [sent([1, 4], "k", 16)], outputs=outputs)
        except Exception as error:
            if "Unable to find shared memory region: 'k'" not in str(error):
                wrong.append(str(error))
            continue
        turn = int(answer.as_numpy("OUTPUT0")[0, 0]) // 2
        if not before < turn <= begun:
            wrong.append((before, turn, begun))
        seen.add(turn % 2)
    own.close()


def register(name, turn, on_gpu):
    of = shm if on_gpu else system
    if on_gpu:
        handle = shm.create_shared_memory_region(name, 16, 0)
    else:
        handle = system.create_shared_memory_region(name, f"/{{name}}_{{turn}}_{{os.getpid()}}", 16)
    kept.append((of, handle))
    of.set_shared_memory_region(handle, [np.full(4, turn, np.float32)])
    while True:
        try:
            if on_gpu:
                client.register_cuda_shared_memory(name, shm.get_raw_handle(handle), 0, 16)
            else:
                client.register_system_shared_memory(name, f"/{{name}}_{{turn}}_{{os.getpid()}}", 16)
        except Exception as error:
            assert f"shared memory region '{{name}}' already in manager" in str(error), error
        else:
            return of, handle


askers = [threading.Thread(target=ask) for _ in range(3)]
for asker in askers:
    asker.start()
for turn in range(1, 31):
    begun = turn
    register("k", turn, turn % 2 == 0)
    over = turn - 1
    of, out = register("k_out", 0, turn % 3 == 0)
    for _ in range(3):
        client.infer(model, [sent([1, 4], "k", 16)], outputs=[wanted("k_out", 16)])
        found = of.get_contents_as_numpy(out, np.float32, [4])
        assert (found == 2 * turn).all(), (turn, found)
        of.set_shared_memory_region(out, [np.zeros(4, np.float32)])
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
stopping.set()
for asker in askers:
    asker.join()
for of, handle in kept:
    of.destroy_shared_memory_region(handle)
print(wrong, seen)
"""


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_name_of_regions_of_both_kinds(server: Serving, machine: CudaMachine, protocol: str) -> None:
    """An answer is computed from a region that had the name while the request was under way."""
    url = server.http if protocol == "http" else server.grpc
    assert machine.client(KINDS, protocol, url, "on_host").strip() == "[] {0, 1}"


STRINGS_BOTH_WAYS = f"""{CLIENT}
from tritonclient.utils import serialize_byte_tensor
given = np.array([b"one", b"", b"three"], object)
packed = serialize_byte_tensor(given)
size = len(packed.item())
put, got = region("s_put", 256), region("s_got", 256)
shm.set_shared_memory_region(put, [packed])
client.infer(model, [sent([3], "s_put", size, datatype="BYTES")], outputs=[wanted("s_got", 256)])
assert shm.get_contents_as_numpy(got, np.object_, [3]).tolist() == given.tolist()
try:
    client.infer(model, [sent([4], "s_put", size, datatype="BYTES")], outputs=[wanted("s_got", 256)])
except Exception as error:
    print(error)
client.unregister_cuda_shared_memory()
"""


def test_strings(server: Serving, machine: CudaMachine) -> None:
    told = machine.client(STRINGS_BOTH_WAYS, "http", server.http, "strings")
    assert "expected 4 string elements for inference input 'INPUT0' for model 'strings', got 3" in told


MISTAKES = f"""{CLIENT}
import base64
put = region("m_put", 64)


def refused(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except Exception as error:
        print(error)
    else:
        print("accepted", arguments, named)


handle = shm.get_raw_handle(put)
register = client.register_cuda_shared_memory
refused(register, "m_put", handle, 0, 64)
refused(register, "size", handle, 0, 65)
refused(register, "none", handle, 0, 0)
refused(register, "device", handle, 7, 64)
refused(register, "short", base64.b64encode(bytes(63)), 0, 64)
refused(register, "wrong", base64.b64encode(bytes(64)), 0, 64)
refused(client.get_cuda_shared_memory_status, "nowhere")
refused(client.get_system_shared_memory_status, "m_put")
refused(client.infer, model, [sent([1, 4], "nowhere", 16)])
refused(client.infer, model, [sent([1, 4], "m_put", 16, offset=64)])
refused(client.infer, model, [sent([1, 4], "m_put", 16, offset=56)])
refused(client.infer, model, [sent([1, 4], "m_put", 32)])
refused(client.infer, model, [sent([1, 4], "m_put", 16)], outputs=[wanted("m_put", 8)])
client.unregister_system_shared_memory("m_put")
client.infer(model, [sent([1, 4], "m_put", 16)])
client.unregister_cuda_shared_memory("m_put")
refused(client.infer, model, [sent([1, 4], "m_put", 16)])
"""
REFUSALS = (
    "shared memory region 'm_put' already in manager",
    "The allocation has 64 bytes, but 65 bytes were requested.",
    "The allocation has 64 bytes, but 0 bytes were requested.",
    "failed to register shared memory region 'device': there is no GPU 7; this server has: 0, 1",
    "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t",
    "failed to register shared memory region 'wrong': CUDA error: invalid argument",
    "Unable to find cuda shared memory region: 'nowhere'",
    "The region named 'm_put' is registered as CUDA shared memory, not system shared memory",
    "Unable to find shared memory region: 'nowhere'",
    "Invalid offset for shared memory region: 'm_put'",
    "Invalid offset + byte size for shared memory region: 'm_put'",
    "input byte size mismatch for input 'INPUT0' for model '",
    "for output 'OUTPUT0' (8 bytes) should be at least 16 bytes to hold the results",
    "Unable to find shared memory region: 'm_put'",
)


@pytest.mark.parametrize("model", ["on_host", "on_device"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_mistakes(server: Serving, machine: CudaMachine, protocol: str, model: str) -> None:
    url = server.http if protocol == "http" else server.grpc
    said = machine.client(MISTAKES, protocol, url, model)
    assert "accepted" not in said
    lines = [line for line in said.splitlines() if not line.endswith("invalid args")]
    for expected, line in zip(REFUSALS, lines, strict=True):
        assert expected in line


OWNER_ENDS = f"""{CLIENT}
import os, time
put = region("left", 64)
shm.set_shared_memory_region(put, [np.ones(4, np.float32)])
print("registered", flush=True)
sys.stdin.read()
"""


def test_a_region_whose_client_is_gone(server: Serving, machine: CudaMachine) -> None:
    """What the server has opened stays, as with CUDA; nothing of it is left when the region is unregistered."""
    client = subprocess.Popen(
        [sys.executable, "-c", OWNER_ENDS, "http", server.http, "on_host"],
        env={**os.environ, **machine.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None and client.stdout.readline() == "registered\n"
    client.kill()
    client.wait()
    client.stdout.close()
    assert client.stdin is not None
    client.stdin.close()
    placed = {"shared_memory_region": "left", "shared_memory_byte_size": 16}
    request = {"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "parameters": placed}]}
    answer = server.json("POST", "/v2/models/on_host/infer", request)
    assert next(each["data"] for each in answer["outputs"] if each["name"] == "OUTPUT0") == [2.0] * 4
    assert machine.held(server.process.pid) and not machine.held(*server.fronts().values())
    assert server.ask("POST", "/v2/cudasharedmemory/region/left/unregister")[0] == 200
    eventually(lambda: not [name for name in machine.held(server.process.pid) if f"-{client.pid}-" in name])


def test_a_parameter_with_a_wrong_value(machine: CudaMachine, tmp_path: Path) -> None:
    python_model(tmp_path / "models", "m", ON_HOST, CONFIG + TAKES_DEVICE.replace('"no"', '"maybe"'))
    with serving(
        tmp_path / "models", tmp_path / "log", "--exit-on-error=false", environment=machine.environment
    ) as server:
        assert "Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: 'maybe'" in server.text
