"""System shared memory: what is registered, what is said of it, and tensors that lie in it; CUDA's is refused."""

import atexit
import struct
from pathlib import Path

from conformance.exchange import (
    Change,
    Eventually,
    Grpc,
    get,
    grpc_infer,
    grpc_tensor,
    grpc_wanted,
    infer,
    post,
    tensor,
    wanted,
)
from conformance.exchanges.scenes import SHARED
from nerite.wire import grpc_service as pb

SCENE = SHARED
MEMORY = Path("/dev/shm")
SYSTEM = "/v2/systemsharedmemory"
CUDA = "/v2/cudasharedmemory"
ONES = struct.pack("<8i", *range(1, 9))


def file(name, data=bytes(64)):
    """A file of shared memory, made anew."""

    def make(models):
        # The other server's turn may be now: the file is there as a whole at any time.
        made = MEMORY / f"{name}_{models.parent.name}"
        made.write_bytes(data)
        made.rename(MEMORY / name)
        atexit.register((MEMORY / name).unlink, missing_ok=True)

    return Change(make)


def register(region, key="exam_shm", byte_size=32, **more):
    return post(f"{SYSTEM}/region/{region}/register", {"key": key, "byte_size": byte_size, **more})


def raw_register(region, body):
    return post(f"{SYSTEM}/region/{region}/register", body)


def unregister(region=""):
    return post(f"{SYSTEM}/region/{region}/unregister" if region else f"{SYSTEM}/unregister")


def status(region=""):
    return get(f"{SYSTEM}/region/{region}/status" if region else f"{SYSTEM}/status")


def shared(region, byte_size, offset=None, name="IN", shape=(8,)):
    where = {"shared_memory_region": region, "shared_memory_byte_size": byte_size}
    if offset is not None:
        where["shared_memory_offset"] = offset
    return tensor(name, "INT32", shape, **where)


def out(region, byte_size, offset=None, **more):
    where = {"shared_memory_region": region, "shared_memory_byte_size": byte_size, **more}
    if offset is not None:
        where["shared_memory_offset"] = offset
    return wanted("OUT", **where)


def grpc_register(name, key="exam_shm", byte_size=32, offset=0):
    request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=byte_size, offset=offset)
    return Grpc("SystemSharedMemoryRegister", request)


def grpc_status(name=""):
    return Grpc("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=name))


def grpc_unregister(name=""):
    return Grpc("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=name))


def grpc_shared(region, byte_size, **more):
    return grpc_tensor("IN", "INT32", [8], shared_memory_region=region, shared_memory_byte_size=byte_size, **more)


# Triton may still hold the regions of a request that it has answered.
CLEAN = Eventually(unregister(), lambda answer: answer["status"] == 200)
FILE = file("exam_shm", ONES + bytes(64))
OTHER = file("exam_other")
READY = [FILE, CLEAN, register("r", byte_size=96)]
INPUT = tensor("IN", "INT32", [8], list(range(8)))

EXCHANGES = {
    "nothing registered": [CLEAN, status(), status("r"), unregister("r")],
    "a region": [FILE, CLEAN, register("r"), status(), status("r"), unregister("r"), status()],
    "a region with an offset": [FILE, CLEAN, register("r", offset=32), status("r")],
    "a slash before the key": [FILE, CLEAN, register("r", key="/exam_shm"), status("r")],
    "several slashes before the key": [FILE, CLEAN, register("r", key="//exam_shm"), status("r")],
    "nothing but slashes": [CLEAN, register("r", key="//")],
    "two regions": [FILE, OTHER, CLEAN, register("r"), register("q", key="exam_other"), status(), CLEAN, status()],
    "one region twice": [FILE, CLEAN, register("r"), register("r"), register("r", offset=32)],
    "a key that there is not": [CLEAN, register("r", key="exam_none"), status()],
    "an empty key": [CLEAN, register("r", key="")],
    "no key": [CLEAN, raw_register("r", {"byte_size": 32})],
    "no size": [CLEAN, raw_register("r", {"key": "exam_shm"})],
    "no body": [CLEAN, raw_register("r", b"")],
    "a size that is a text": [CLEAN, raw_register("r", {"key": "exam_shm", "byte_size": "a"})],
    "a size below zero": [FILE, CLEAN, register("r", byte_size=-1)],
    "no bytes": [FILE, CLEAN, register("r", byte_size=0), status()],
    "more than there is": [FILE, CLEAN, register("r", byte_size=1_000_000), status()],
    "an offset beyond the end": [FILE, CLEAN, register("r", offset=1_000_000), status()],
    "a reserved key": [CLEAN, register("r", key="triton_python_backend_shm_region_1")],
    "the other method": [get(f"{SYSTEM}/unregister"), post(f"{SYSTEM}/status")],
    "gRPC: several slashes before the key": [FILE, CLEAN, grpc_register("r", key="///exam_shm"), grpc_status("r")],
    "gRPC: a region": [FILE, CLEAN, grpc_register("r"), grpc_status(), grpc_status("r"), grpc_unregister("r")],
    "gRPC: unknown": [CLEAN, grpc_status("r"), grpc_unregister("r"), grpc_unregister()],
    "gRPC: no name": [FILE, CLEAN, grpc_register("")],
    "gRPC: a key that there is not": [CLEAN, grpc_register("r", key="exam_none")],
    "gRPC: twice": [FILE, CLEAN, grpc_register("r"), grpc_register("r")],
    "an input": [*READY, infer("copy", shared("r", 32))],
    "an input with an offset": [*READY, infer("copy", shared("r", 32, 8))],
    "an input of another size": [*READY, infer("copy", shared("r", 16))],
    "an input beyond the end": [*READY, infer("copy", shared("r", 32, 80))],
    "an offset of an input beyond the end": [*READY, infer("copy", shared("r", 32, 200))],
    "an input of no region": [CLEAN, infer("copy", shared("r", 32))],
    "an input with data too": [*READY, infer("copy", {**shared("r", 32), "data": list(range(8))})],
    "an input without a size": [*READY, infer("copy", tensor("IN", "INT32", [8], shared_memory_region="r"))],
    "an output": [*READY, infer("copy", INPUT, outputs=[out("r", 32, 32)])],
    "an output with room to spare": [*READY, infer("copy", INPUT, outputs=[out("r", 64, 32)])],
    "an output without room": [*READY, infer("copy", INPUT, outputs=[out("r", 16, 32)])],
    "an output beyond the end": [*READY, infer("copy", INPUT, outputs=[out("r", 32, 80)])],
    "an output of no region": [CLEAN, infer("copy", INPUT, outputs=[out("r", 32)])],
    "an output as bytes too": [*READY, infer("copy", INPUT, outputs=[out("r", 32, 32, binary_data=True)])],
    "an output of classes": [*READY, infer("copy", INPUT, outputs=[out("r", 32, 32, classification=1)])],
    "input and output": [*READY, infer("copy", shared("r", 32), outputs=[out("r", 32, 32)])],
    "gRPC: an input": [*READY, grpc_infer("copy", grpc_shared("r", 32))],
    "gRPC: an input with an offset": [*READY, grpc_infer("copy", grpc_shared("r", 32, shared_memory_offset=8))],
    "gRPC: an input of no region": [CLEAN, grpc_infer("copy", grpc_shared("r", 32))],
    "gRPC: an input of another size": [*READY, grpc_infer("copy", grpc_shared("r", 16))],
    "gRPC: an input and raw contents": [*READY, grpc_infer("copy", grpc_shared("r", 32), raw=[ONES])],
    "gRPC: an output": [
        *READY,
        grpc_infer(
            "copy",
            grpc_shared("r", 32),
            outputs=[grpc_wanted("OUT", shared_memory_region="r", shared_memory_byte_size=32, shared_memory_offset=32)],
        ),
    ],
    "gRPC: an output without room": [
        *READY,
        grpc_infer(
            "copy",
            grpc_shared("r", 32),
            outputs=[grpc_wanted("OUT", shared_memory_region="r", shared_memory_byte_size=16)],
        ),
    ],
    "CUDA": [
        get(f"{CUDA}/status"),
        get(f"{CUDA}/region/r/status"),
        post(f"{CUDA}/region/r/register", {"raw_handle": {"b64": "aGFuZGxl"}, "device_id": 0, "byte_size": 32}),
        post(f"{CUDA}/region/r/unregister"),
        post(f"{CUDA}/unregister"),
    ],
    "CUDA: mistakes": [
        post(f"{CUDA}/region/r/register", {"device_id": 0, "byte_size": 32}),
        post(f"{CUDA}/region/r/register", {"raw_handle": {}, "device_id": 0, "byte_size": 32}),
        post(f"{CUDA}/region/r/register", b""),
    ],
    "gRPC: CUDA": [
        Grpc("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
        Grpc(
            "CudaSharedMemoryRegister",
            pb.CudaSharedMemoryRegisterRequest(name="r", raw_handle=b"handle", device_id=0, byte_size=32),
        ),
        Grpc("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name="r")),
    ],
}
