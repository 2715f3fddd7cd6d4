"""Shared memory: the system's, and a GPU's on a server that has none."""

import base64
import mmap
import os
from typing import Any

import numpy as np
import tritonclient.utils.shared_memory as shm

from conformance.stock import GRPC, StockClient, exercise
from regions import region


def regions(client: StockClient, which: str = "system", name: str = "") -> dict[str, dict[str, Any]]:
    """Return the registered regions by name, the same from both protocols."""
    told = client.told(f"get_{which}_shared_memory_status", name)
    return told.get("regions", {}) if client.is_grpc else {entry["name"]: entry for entry in told}


@exercise("register_system_shared_memory")
@exercise("get_system_shared_memory_status")
@exercise("unregister_system_shared_memory")
def system_regions(client: StockClient) -> None:
    with region(client, "one"), region(client, "two", 128):
        assert set(regions(client)) == {"one", "two"}
        ((name, told),) = regions(client, name="two").items()
        assert (name, int(told["byte_size"]), int(told.get("offset", 0))) == ("two", 128, 0)
        client.unregister_system_shared_memory("one")
        assert set(regions(client)) == {"two"}
        client.unregister_system_shared_memory()
        assert regions(client) == {}


@exercise("register_system_shared_memory")
def part_of_a_region(client: StockClient) -> None:
    page, key = mmap.PAGESIZE, f"/nerite_{os.getpid()}_whole"
    handle = shm.create_shared_memory_region("whole", key, 2 * page)
    client.register_system_shared_memory("part", key, 16, offset=page)
    told = regions(client)["part"]
    assert (told["key"], int(told["byte_size"]), int(told["offset"])) == (key, 16, page)
    client.unregister_system_shared_memory("part")
    shm.destroy_shared_memory_region(handle)


@exercise("register_system_shared_memory")
def region_twice(client: StockClient) -> None:
    with region(client, "taken"):
        status, text = client.refused("register_system_shared_memory", "taken", "/other", 64)
        assert status == ("ALREADY_EXISTS" if client.is_grpc else "400")
        assert "shared memory region 'taken' already in manager" in text


@exercise("register_system_shared_memory")
def region_that_does_not_exist(client: StockClient) -> None:
    status, text = client.refused("register_system_shared_memory", "none", "/nerite_nobody_made_this", 64)
    assert status == ("INTERNAL" if client.is_grpc else "500")
    assert "Unable to open shared memory region: '/nerite_nobody_made_this'" in text


@exercise("get_system_shared_memory_status")
def status_of_an_unknown_region(client: StockClient) -> None:
    status, text = client.refused("get_system_shared_memory_status", "nobody")
    assert status == ("NOT_FOUND" if client.is_grpc else "404")
    assert "Unable to find system shared memory region: 'nobody'" in text


@exercise("get_system_shared_memory_status", *GRPC)
def status_as_a_message(client: StockClient) -> None:
    with region(client, "one"):
        assert client.get_system_shared_memory_status().regions["one"].byte_size == 64


@exercise("infer")
def tensors_in_system_memory(client: StockClient) -> None:
    with region(client, "in") as there, region(client, "out") as back:
        shm.set_shared_memory_region(there, [np.array([0, 0, 7, 8], np.int32)])
        sent = client.tensors.InferInput("IN", [1, 2], "INT32").set_shared_memory("in", 8, offset=8)
        wanted = client.tensors.InferRequestedOutput("OUT")
        wanted.set_shared_memory("out", 8, offset=16)
        result = client.infer("echo", [sent], outputs=[wanted])
        assert result.get_output("OUT") is not None
        assert shm.get_contents_as_numpy(back, np.int32, [1, 2], offset=16).tolist() == [[7, 8]]
        wanted.unset_shared_memory()
        assert client.infer("echo", [sent], outputs=[wanted]).as_numpy("OUT").tolist() == [[7, 8]]


@exercise("infer")
def more_than_the_region_holds(client: StockClient) -> None:
    with region(client, "small", 8):
        sent = client.tensors.InferInput("IN", [1, 2], "INT32").set_shared_memory("small", 8, offset=4)
        status, text = client.refused("infer", "echo", [sent])
        assert status == ("INVALID_ARGUMENT" if client.is_grpc else "400")
        assert "Invalid offset + byte size for shared memory region: 'small'" in text


@exercise("register_cuda_shared_memory")
def cuda_region(client: StockClient) -> None:
    status, text = client.refused("register_cuda_shared_memory", "gpu", base64.b64encode(bytes(64)), 0, 64)
    assert status == ("UNIMPLEMENTED" if client.is_grpc else "501")
    assert text == "failed to register CUDA shared memory region: 'gpu', GPUs not supported"


@exercise("get_cuda_shared_memory_status")
@exercise("unregister_cuda_shared_memory")
def no_cuda_regions(client: StockClient) -> None:
    assert regions(client, "cuda") == {}
    client.unregister_cuda_shared_memory("gpu")
    client.unregister_cuda_shared_memory()
    status, text = client.refused("get_cuda_shared_memory_status", "gpu")
    assert status == ("NOT_FOUND" if client.is_grpc else "404")
    assert "Unable to find cuda shared memory region: 'gpu'" in text


@exercise("get_cuda_shared_memory_status", *GRPC)
def no_cuda_regions_as_a_message(client: StockClient) -> None:
    assert not client.get_cuda_shared_memory_status().regions
