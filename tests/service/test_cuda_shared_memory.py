"""CUDA shared memory of clients: NVIDIA's client module, a real server, and a stand-in for CUDA that counts copies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuda_machine import CudaMachine, copies
from serving import Serving, eventually, python_model, serving

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
    assert machine.held(server.process.pid)
    assert server.ask("POST", "/v2/cudasharedmemory/region/left/unregister")[0] == 200
    eventually(lambda: not [name for name in machine.held(server.process.pid) if f"-{client.pid}-" in name])


def test_a_parameter_with_a_wrong_value(machine: CudaMachine, tmp_path: Path) -> None:
    python_model(tmp_path / "models", "m", ON_HOST, CONFIG + TAKES_DEVICE.replace('"no"', '"maybe"'))
    with serving(
        tmp_path / "models", tmp_path / "log", "--exit-on-error=false", environment=machine.environment
    ) as server:
        assert "Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: 'maybe'" in server.text
