"""The stand-in for CUDA keeps to what CUDA's documentation says, and its names to those of the package."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_counts import ALLOCATION, EVENT, MAPPING, counts, counts_of_each, live
from serving import eventually

STAND_INS = Path(__file__).resolve().parents[1] / "stand_ins"
MIB = 1 << 20
OK = 0
INVALID, NO_MEMORY, FORKED, NO_DEVICE, WRONG_DEVICE, NO_CONTEXT, UNMAPPABLE = 1, 2, 3, 100, 101, 201, 205
BAD_HANDLE, NOT_READY, NOT_SUPPORTED, CAPTURING = 400, 600, 801, 900


class Cuda:
    """The stand-in in this process, with the results of functions and without their errors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = importlib.import_module("cuda.bindings.runtime")
        self.inside = importlib.import_module("cuda.stand_in.process")
        self.kinds = self.runtime.cudaMemcpyKind
        self.default = self.kinds.cudaMemcpyDefault

    @cached_property
    def driver(self) -> Any:
        return importlib.import_module("cuda.bindings.driver")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            error, *results = getattr(self.runtime, f"cuda{name}")(*arguments)
            assert error == OK, error.name
            return results[0] if len(results) == 1 else results

        return call

    def failing(self, name: str, *arguments: Any) -> int:
        error, *results = getattr(self.runtime, f"cuda{name}")(*arguments)
        assert error != OK and not any(results)
        return int(error)

    def handle(self, raw: bytes) -> Any:
        made = self.runtime.cudaIpcMemHandle_t()
        ctypes.memmove(made.getPtr(), raw, 64)
        return made

    def raw(self, handle: Any) -> bytes:
        return ctypes.string_at(handle.getPtr(), 64)

    @contextmanager
    def held_up(self, stream: Any) -> Iterator[None]:
        """Let a stream do nothing until the block ends."""
        go = threading.Event()
        self.inside.process().stream(stream).submit(go.wait)
        try:
            yield
        finally:
            go.set()


class Peer:
    """Another process with the stand-in, that does what it is told."""

    PROGRAM = """
import ctypes, sys
from cuda.bindings import driver, runtime
names = globals()
def handle(raw, of=runtime.cudaIpcMemHandle_t):
    made = of()
    ctypes.memmove(made.getPtr(), raw, 64)
    return made
def raw(handle):
    return ctypes.string_at(handle.getPtr(), 64)
for line in sys.stdin:
    try:
        print(repr(eval(line, names)))
    except SyntaxError:
        exec(line, names)
        print(None)
    sys.stdout.flush()
"""

    def __init__(self) -> None:
        path = os.pathsep.join([str(STAND_INS / "cuda"), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        assert self.process.stdout is not None
        return eval(self.process.stdout.readline())

    def __call__(self, line: str) -> Any:
        """Execute a statement, or evaluate an expression."""
        self.begin(line)
        return self.end()

    def succeeds(self, call: str) -> Any:
        error, *results = self(f"[int(each) if each is not None else None for each in runtime.cuda{call}]")
        assert error == OK
        return results[0] if results else None

    def fails(self, call: str) -> int:
        return int(self(f"int(runtime.cuda{call}[0])"))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cuda]]:
    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("cuda", "device_arrays", "pynvml")]:
            del sys.modules[name]

    def started(*, shared: bool = True, **settings: object) -> Cuda:
        for name, value in settings.items():
            monkeypatch.setenv(f"STAND_IN_CUDA_{name}", str(value))
        if shared:
            monkeypatch.setenv("STAND_IN_CUDA", str(tmp_path / "cuda"))
        return Cuda(tmp_path / "cuda")

    for library in ("cuda", "nvml"):
        monkeypatch.syspath_prepend(str(STAND_INS / library))
    forget()
    yield started
    forget()


@pytest.fixture
def cuda(start: Callable[..., Cuda]) -> Cuda:
    return start()


@pytest.fixture
def peer(cuda: Cuda) -> Iterator[Peer]:
    other = Peer()
    with other.process:
        yield other
        other.process.kill()


# The package.

DESCRIBE = """
import inspect, json, re, sys
from cuda.bindings import driver, runtime
told = {}
for module in runtime, driver:
    for name, value in vars(module).items():
        if not name.lower().startswith("cu") or name not in (sys.argv[1:] or vars(module)):
            continue
        if not isinstance(value, type) and callable(value):
            said = (value.__doc__ or "").partition("Returns\\n")[2].partition("See Also")[0]
            told[name] = {"parameters": list(inspect.signature(value).parameters)}
            if said:
                told[name]["results"] = len(re.findall(r"^ *\\w+ : ", said, re.MULTILINE))
        elif isinstance(value, type) and issubclass(value, int):
            told[name] = {each.name: int(each) for each in value}
        elif isinstance(value, type):
            known = ("getPtr", "type", "device", "devicePointer", "hostPointer")
            told[name] = {each: True for each in known if hasattr(value(), each)}
        elif isinstance(value, int):
            told[name] = value
for error in [*runtime.cudaError_t, 12345]:
    called, said = (f(error)[1].decode() for f in (runtime.cudaGetErrorName, runtime.cudaGetErrorString))
    told[f"error {int(error)}"] = {called: said}
print(json.dumps(told))
"""


@pytest.mark.skipif(not importlib.metadata.packages_distributions().get("cuda"), reason="needs cuda-bindings")
def test_the_package_has_what_the_stand_in_has(start: Callable[..., Cuda]) -> None:
    def told(path: str, *names: str) -> dict[str, Any]:
        command = [sys.executable, "-c", DESCRIBE, *names]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    ours = told(str(STAND_INS / "cuda"))
    theirs = told("", *ours)
    cuda = start(shared=False)
    functions = [name for name in cuda.inside.FUNCTIONS if hasattr(cuda.runtime, name)]
    cuda = start(shared=False, FAIL=",".join(f"{name}:1" for name in functions))
    for name in functions:
        error, *results = getattr(cuda.runtime, name)(*ours[name]["parameters"])
        assert error.name == "cudaErrorUnknown"
        ours[name]["results"] = len(results)
    assert len(functions) > 40
    for name, our in ours.items():
        their = theirs[name]
        if isinstance(our, dict):
            their = {each: value for each, value in their.items() if each in our}
        assert (name, our) == (name, their)


# Memory.


def test_memory_of_gpus_is_the_hosts(cuda: Cuda) -> None:
    address = cuda.Malloc(4096)
    assert ctypes.string_at(address, 4096) == b"\xa5" * 4096
    cuda.Memcpy(address, b"given", 5, cuda.default)
    got = bytearray(4)
    cuda.Memcpy(got, address + 1, 4, cuda.kinds.cudaMemcpyDeviceToHost)
    assert got == b"iven"
    cuda.MemsetAsync(address, 0x101, 3, None)
    assert ctypes.string_at(address, 6) == b"\x01\x01\x01en\xa5"
    cuda.Free(address)
    assert (cuda.Malloc(0), cuda.Free(0), live(cuda.folder)) == (0, [], [])


def test_buffers_of_the_host(cuda: Cuda) -> None:
    address = cuda.Malloc(16)
    array = np.arange(4, dtype=np.int32)
    given = array.tobytes()
    for source in (given, bytearray(given), memoryview(given), array, array.ctypes.data, (ctypes.c_int * 4)(*range(4))):
        cuda.Memcpy(address, bytes(16), 16, cuda.default)
        cuda.Memcpy(cuda.driver.CUdeviceptr(address), source, 16, cuda.default)
        assert ctypes.string_at(address, 16) == given
    for wrong in ("text", 1.5j):
        with pytest.raises(TypeError, match="expected Type None, int or object with Buffer Protocol"):
            cuda.Memcpy(address, wrong, 1, cuda.default)
    with pytest.raises(OverflowError):
        cuda.Malloc(-1)


def test_copies_have_to_be_inside(cuda: Cuda) -> None:
    address, other, host = cuda.Malloc(100), cuda.Malloc(100), bytearray(200)
    to_device, to_host = cuda.kinds.cudaMemcpyHostToDevice, cuda.kinds.cudaMemcpyDeviceToHost
    assert cuda.failing("Memcpy", address, host, 101, to_device) == INVALID
    assert cuda.failing("Memcpy", host, address + 1, 100, cuda.default) == INVALID
    assert cuda.failing("MemsetAsync", address, 0, 101, 0) == INVALID
    assert cuda.failing("Memcpy", address, other, 100, to_device) == INVALID
    assert cuda.failing("Memcpy", host, address, 100, to_device) == INVALID
    cuda.Free(other)
    assert cuda.failing("Memcpy", host, other, 100, cuda.default) == INVALID
    assert cuda.failing("Free", other) == cuda.failing("Free", address + 1) == cuda.failing("Free", 64) == INVALID
    assert cuda.Memcpy(host, address + 99, 1, to_host) == []


def test_gpus(start: Callable[..., Cuda]) -> None:
    cuda = start(DEVICES=3, MEMORY=10 * MIB)
    assert (cuda.GetDeviceCount(), cuda.GetDevice()) == (3, 0)
    assert cuda.failing("SetDevice", 3) == cuda.failing("SetDevice", -1) == WRONG_DEVICE
    cuda.SetDevice(2)
    address = cuda.Malloc(6 * MIB)
    assert cuda.MemGetInfo() == [4 * MIB, 10 * MIB]
    assert cuda.failing("Malloc", 5 * MIB) == NO_MEMORY
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.extend([cuda.GetDevice(), cuda.MemGetInfo()]))
    thread.start()
    thread.join()
    assert elsewhere == [0, [10 * MIB, 10 * MIB]]
    cuda.Free(address)
    assert cuda.MemGetInfo() == [10 * MIB, 10 * MIB]
    assert cuda.DeviceGetAttribute(cuda.runtime.cudaDeviceAttr.cudaDevAttrUnifiedAddressing, 1) == 1


def test_no_gpus(start: Callable[..., Cuda]) -> None:
    cuda = start(DEVICES=0)
    assert cuda.failing("GetDeviceCount") == cuda.failing("SetDevice", 0) == cuda.failing("Malloc", 1) == NO_DEVICE


def test_memory_that_is_not_shared(start: Callable[..., Cuda], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAND_IN_CUDA", raising=False)
    cuda = start(shared=False, MEMORY=MIB)
    address = cuda.Malloc(MIB)
    assert ctypes.string_at(address, 2) == b"\xa5\xa5"
    assert cuda.failing("Malloc", 1) == NO_MEMORY
    assert cuda.failing("IpcGetMemHandle", address) == NOT_SUPPORTED
    cuda.Free(address)
    cuda.Free(cuda.Malloc(MIB))


def test_what_pointers_are(cuda: Cuda) -> None:
    cuda.SetDevice(1)
    address, pinned, array = cuda.Malloc(64), cuda.HostAlloc(64, 0), np.zeros(64, np.uint8)
    host = array.ctypes.data

    def told(pointer: int) -> tuple[str, int, int, int]:
        said = cuda.PointerGetAttributes(pointer)
        return said.type.name.removeprefix("cudaMemoryType"), said.device, said.devicePointer, said.hostPointer

    assert told(address + 5) == ("Device", 1, address + 5, 0)
    assert told(pinned) == ("Host", 1, pinned, pinned)
    assert told(host) == ("Unregistered", -2, 0, host)
    cuda.HostRegister(array, 64, 0)
    assert told(host + 63) == ("Host", 1, host + 63, host + 63)
    assert cuda.failing("HostRegister", host + 32, 64, 0) == 712
    assert cuda.failing("FreeHost", host) == INVALID
    cuda.HostUnregister(array)
    assert cuda.failing("HostUnregister", host) == 713
    cuda.FreeHost(pinned)
    assert cuda.failing("FreeHost", pinned) == INVALID
    driver = cuda.driver
    error, base, size = driver.cuMemGetAddressRange(address + 5)
    assert (error, int(base), size) == (OK, address, 64)
    assert driver.cuMemGetAddressRange(host)[0] == driver.CUresult.CUDA_ERROR_NOT_FOUND
    assert driver.cuGetErrorString(driver.CUresult.CUDA_ERROR_NOT_FOUND) == (OK, b"named symbol not found")


def test_the_driver_has_to_be_initialized(cuda: Cuda) -> None:
    driver = cuda.driver
    assert driver.cuDeviceGet(0) == (driver.CUresult.CUDA_ERROR_NOT_INITIALIZED, None)
    assert driver.cuInit(0) == (OK,)
    assert driver.cuDeviceGet(2) == (driver.CUresult.CUDA_ERROR_INVALID_DEVICE, None)
    device = driver.cuDeviceGet(1)[1]
    assert driver.cuDevicePrimaryCtxGetState(device) == (OK, 0, 0)
    cuda.SetDevice(1)
    assert driver.cuDevicePrimaryCtxGetState(device) == (OK, 0, 1)


# Handles.


def test_a_handle_opens_the_same_memory(cuda: Cuda, peer: Peer) -> None:
    cuda.SetDevice(1)
    address = cuda.Malloc(MIB)
    cuda.Memcpy(address, b"ours", 4, cuda.default)
    exported = cuda.IpcGetMemHandle(address + 5)
    raw = cuda.raw(exported)
    there = peer.succeeds(f"IpcOpenMemHandle(handle({raw}), 1)")
    assert peer(f"ctypes.string_at({there}, 4)") == b"ours"
    assert peer(f"driver.cuMemGetAddressRange({there})[2]") == MIB
    assert peer.succeeds(f"Memcpy({there + MIB - 6}, b'theirs', 6, 4)") is None
    assert ctypes.string_at(address + MIB - 6, 6) == b"theirs"
    held = live(cuda.folder)
    pid = peer.process.pid
    assert [(each.kind, each.pid, each.device, each.size) for each in held] == [
        (ALLOCATION, os.getpid(), 1, MIB),
        (MAPPING, pid, 1, MIB),
    ]
    # The same address each time, and it is closed as often as it was opened.
    assert peer.succeeds(f"IpcOpenMemHandle(handle({raw}), 1)") == there
    assert peer.succeeds(f"IpcCloseMemHandle({there})") is None
    # Memory that its owner frees is there for those who opened it.
    cuda.Free(address)
    assert peer(f"ctypes.string_at({there}, 4)") == b"ours"
    assert [each.kind for each in live(cuda.folder)] == [MAPPING]
    assert peer.succeeds(f"IpcCloseMemHandle({there})") is None
    assert live(cuda.folder) == []
    assert peer.fails(f"IpcCloseMemHandle({there})") == INVALID
    assert peer.fails(f"IpcOpenMemHandle(handle({raw}), 1)") == BAD_HANDLE


def test_handles_that_open_nothing(cuda: Cuda, peer: Peer) -> None:
    address = cuda.Malloc(64)
    exported = cuda.IpcGetMemHandle(address)
    assert cuda.failing("IpcOpenMemHandle", exported, 1) == NO_CONTEXT
    assert cuda.failing("IpcGetMemHandle", bytearray(64)) == INVALID
    raw = cuda.raw(exported)
    assert peer.fails(f"IpcOpenMemHandle(handle({raw}), 0)") == INVALID
    there = peer.succeeds(f"IpcOpenMemHandle(handle({raw}), 1)")
    assert peer.fails(f"Free({there})") == peer.fails(f"IpcGetMemHandle({there})") == INVALID
    assert cuda.failing("IpcCloseMemHandle", address) == INVALID
    for place in (0, 8, 12, 30, 63):
        wrong = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
        assert peer.fails(f"IpcOpenMemHandle(handle({wrong}), 1)") == INVALID
    assert peer.fails(f"IpcOpenMemHandle(handle({bytes(64)}), 1)") == INVALID
    theirs = cuda.handle(peer("raw(runtime.cudaIpcGetMemHandle(runtime.cudaMalloc(64)[1])[1])"))
    (cuda.folder / f"0-{peer.process.pid}-1").write_bytes(b"short")
    assert cuda.failing("IpcOpenMemHandle", theirs, 1) == UNMAPPABLE
    with pytest.raises(TypeError, match=r"expected cuda\.bindings\.runtime\.cudaIpcMemHandle_t, got bytes"):
        cuda.IpcOpenMemHandle(bytes(64), 1)


def test_memory_of_a_process_that_was_killed(start: Callable[..., Cuda], peer: Peer) -> None:
    cuda = start(MEMORY=10 * MIB)
    raw = peer(f"raw(runtime.cudaIpcGetMemHandle(runtime.cudaMalloc({8 * MIB})[1])[1])")
    there = cuda.IpcOpenMemHandle(cuda.handle(raw), 1)
    assert cuda.failing("Malloc", 4 * MIB) == NO_MEMORY
    peer.process.kill()
    eventually(lambda: Path("/proc", str(peer.process.pid), "stat").read_text().split()[2] == "Z")
    # It was not waited for, and has nothing any more nevertheless.
    assert live(cuda.folder, ALLOCATION) == []
    assert ctypes.string_at(there, 1) == b"\xa5"
    cuda.Malloc(10 * MIB)
    cuda.IpcCloseMemHandle(there)
    assert cuda.failing("IpcOpenMemHandle", cuda.handle(raw), 1) == BAD_HANDLE


def test_a_process_that_ends_leaves_nothing_but_its_counts(cuda: Cuda, peer: Peer) -> None:
    raw = cuda.raw(cuda.IpcGetMemHandle(cuda.Malloc(8)))
    assert peer.succeeds(f"IpcOpenMemHandle(handle({raw}), 1)")
    assert peer.succeeds("Malloc(8)") and peer.succeeds("EventCreateWithFlags(6)")
    assert peer.process.stdin is not None
    peer.process.stdin.close()
    assert peer.process.wait() == 0
    assert [file.name for file in cuda.folder.iterdir() if str(peer.process.pid) in file.name] == [
        f"counts-{peer.process.pid}"
    ]


# Streams and events.


def test_pinned_memory_is_copied_later(cuda: Cuda) -> None:
    stream, address, pinned = cuda.StreamCreateWithFlags(1), cuda.Malloc(8), cuda.HostAlloc(8, 0)
    ctypes.memmove(pinned, b"before", 6)
    cuda.StreamSynchronize(stream)
    with cuda.held_up(stream):
        cuda.MemcpyAsync(address, pinned, 6, cuda.default, stream)
        assert cuda.failing("StreamQuery", stream) == NOT_READY
        assert ctypes.string_at(address, 6) == b"\xa5" * 6
        ctypes.memmove(pinned, b"after!", 6)
    cuda.StreamSynchronize(stream)
    assert cuda.StreamQuery(stream) == []
    assert ctypes.string_at(address, 6) == b"after!"
    with cuda.held_up(stream):
        cuda.MemcpyAsync(pinned + 1, address, 6, cuda.default, stream)
        assert ctypes.string_at(pinned, 6) == b"after!"
    cuda.DeviceSynchronize()
    assert ctypes.string_at(pinned, 6) == b"aafter"


def test_other_memory_of_the_host_is_read_at_once_and_written_on_return(cuda: Cuda) -> None:
    stream, address, given, got = cuda.StreamCreate(), cuda.Malloc(8), bytearray(b"before"), bytearray(6)
    with cuda.held_up(stream):
        cuda.MemcpyAsync(address, given, 6, cuda.default, stream)
        given[:] = b"after!"
        assert ctypes.string_at(address, 6) == b"\xa5" * 6
        copy = threading.Thread(target=cuda.MemcpyAsync, args=(got, address, 6, cuda.default, stream))
        copy.start()
        copy.join(0.05)
        assert copy.is_alive() and got == bytes(6)
    copy.join()
    assert got == b"before"
    pinned = cuda.HostAlloc(6, 0)
    cuda.MemcpyAsync(pinned, given, 6, cuda.kinds.cudaMemcpyHostToHost, stream)
    assert ctypes.string_at(pinned, 6) == b"after!"


def test_operations_take_time(start: Callable[..., Cuda]) -> None:
    cuda = start(DELAY_MS=20)
    stream, address = cuda.StreamCreate(), cuda.Malloc(8)
    began = time.monotonic()
    for _ in range(3):
        cuda.MemsetAsync(address, 1, 8, stream)
    cuda.StreamSynchronize(stream)
    cuda.Memcpy(bytearray(8), address, 8, cuda.default)
    assert time.monotonic() - began >= 0.08


def test_the_default_stream_waits_for_blocking_ones(cuda: Cuda) -> None:
    blocking, other, address = cuda.StreamCreate(), cuda.StreamCreateWithFlags(1), cuda.Malloc(2)
    with cuda.held_up(other):
        cuda.MemsetAsync(address, 1, 1, blocking)
        cuda.MemsetAsync(address + 1, 1, 1, other)
        got = bytearray(2)
        cuda.Memcpy(got, address, 2, cuda.default)
        assert got == b"\x01\xa5"


def test_freeing_waits(cuda: Cuda) -> None:
    stream, address, pinned = cuda.StreamCreateWithFlags(1), cuda.Malloc(8), cuda.HostAlloc(8, 0)
    with cuda.held_up(stream):
        cuda.MemcpyAsync(pinned, address, 8, cuda.default, stream)
        freeing = threading.Thread(target=cuda.Free, args=(address,))
        freeing.start()
        freeing.join(0.05)
        assert freeing.is_alive()
    freeing.join()
    assert ctypes.string_at(pinned, 8) == b"\xa5" * 8
    assert live(cuda.folder) == []


def test_streams_that_are_destroyed(cuda: Cuda) -> None:
    stream, address, pinned = cuda.StreamCreateWithPriority(1, -9), cuda.Malloc(8), cuda.HostAlloc(8, 0)
    assert cuda.inside.process().stream(stream).priority == -5
    with cuda.held_up(stream):
        cuda.MemcpyAsync(pinned, address, 8, cuda.default, stream)
        cuda.StreamDestroy(stream)
    eventually(lambda: ctypes.string_at(pinned, 8) == b"\xa5" * 8)
    for function in ("StreamSynchronize", "StreamDestroy", "StreamQuery"):
        assert cuda.failing(function, stream) == BAD_HANDLE


def test_an_operation_that_fails(cuda: Cuda, capsys: pytest.CaptureFixture[str]) -> None:
    stream = cuda.StreamCreate()
    cuda.inside.process().stream(stream).submit(lambda: 1 // 0)
    assert cuda.failing("StreamSynchronize", stream) == 719
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_events_across_streams(cuda: Cuda) -> None:
    one, two, address, event = cuda.StreamCreate(), cuda.StreamCreate(), cuda.Malloc(1), cuda.EventCreate()
    assert cuda.EventQuery(event) == cuda.EventSynchronize(event) == []
    with cuda.held_up(one):
        cuda.MemsetAsync(address, 1, 1, one)
        cuda.EventRecord(event, one)
        cuda.StreamWaitEvent(two, event, 0)
        cuda.MemsetAsync(address, 2, 1, two)
        assert cuda.failing("EventQuery", event) == cuda.failing("StreamQuery", two) == NOT_READY
    cuda.EventSynchronize(event)
    cuda.StreamSynchronize(two)
    assert ctypes.string_at(address, 1) == b"\x02"
    cuda.SetDevice(1)
    assert cuda.failing("EventRecord", event, cuda.StreamCreate()) == BAD_HANDLE
    cuda.EventDestroy(event)
    assert cuda.failing("EventDestroy", event) == BAD_HANDLE


def test_events_across_processes(cuda: Cuda, peer: Peer) -> None:
    event, stream, address = cuda.EventCreateWithFlags(6), cuda.StreamCreate(), cuda.Malloc(1)
    raw = cuda.raw(cuda.IpcGetEventHandle(event))
    memory = cuda.raw(cuda.IpcGetMemHandle(address))
    peer(f"event = runtime.cudaIpcOpenEventHandle(handle({raw}, runtime.cudaIpcEventHandle_t))[1]")
    peer("stream = runtime.cudaStreamCreate()[1]")
    there = peer.succeeds(f"IpcOpenMemHandle(handle({memory}), 1)")
    assert peer.succeeds("EventSynchronize(event)") is None
    with cuda.held_up(stream):
        cuda.MemsetAsync(address, 1, 1, stream)
        cuda.EventRecord(event, stream)
        assert peer.succeeds("StreamWaitEvent(stream, event, 0)") is None
        assert peer.succeeds(f"MemsetAsync({there}, 2, 1, stream)") is None
        assert peer.fails("EventQuery(event)") == NOT_READY
        peer.begin("int(runtime.cudaStreamSynchronize(stream)[0])")
    assert peer.end() == OK
    assert ctypes.string_at(address, 1) == b"\x02"
    # And what the other process records.
    assert peer.succeeds("EventRecord(event, stream)") is None
    cuda.EventSynchronize(event)
    assert [each.pid for each in live(cuda.folder, EVENT)] == [os.getpid()]
    cuda.EventDestroy(event)
    assert live(cuda.folder, EVENT) == []
    again = f"IpcOpenEventHandle(handle({raw}, runtime.cudaIpcEventHandle_t))"
    assert peer.fails(again) == UNMAPPABLE
    assert cuda.failing("EventCreateWithFlags", 4) == INVALID
    assert cuda.failing("IpcGetEventHandle", cuda.EventCreate()) == BAD_HANDLE


def test_graphs(cuda: Cuda) -> None:
    stream, address, pinned = cuda.StreamCreate(), cuda.Malloc(4), cuda.HostAlloc(4, 0)
    cuda.StreamBeginCapture(stream, cuda.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
    cuda.MemcpyAsync(address, pinned, 4, cuda.default, stream)
    assert cuda.failing("MemcpyAsync", bytearray(4), address, 4, cuda.default, stream) == CAPTURING
    assert cuda.failing("StreamSynchronize", stream) == CAPTURING
    graph = cuda.StreamEndCapture(stream)
    assert cuda.failing("StreamEndCapture", stream) == INVALID
    executable = cuda.GraphInstantiate(graph, 0)
    cuda.GraphDestroy(graph)
    assert ctypes.string_at(address, 4) == b"\xa5" * 4
    for value in (b"once", b"more"):
        ctypes.memmove(pinned, value, 4)
        cuda.GraphLaunch(executable, stream)
        cuda.StreamSynchronize(stream)
        assert ctypes.string_at(address, 4) == value
    cuda.GraphExecDestroy(executable)
    assert cuda.failing("GraphLaunch", executable, stream) == INVALID
    assert len(cuda.inside.process().launches) == 2


# Counts, faults and processes.


def test_counts(cuda: Cuda, peer: Peer) -> None:
    address, other = cuda.Malloc(100), cuda.Malloc(60)
    cuda.SetDevice(1)
    far, stream = cuda.Malloc(50), cuda.StreamCreate()
    cuda.Memcpy(address, bytes(10), 10, cuda.default)
    cuda.Memcpy(bytearray(5), address, 5, cuda.default)
    cuda.MemcpyAsync(other, address, 7, cuda.default, stream)
    cuda.MemcpyPeerAsync(far, 1, address, 0, 3, stream)
    assert cuda.failing("MemcpyPeerAsync", far, 0, address, 0, 3, stream) == INVALID
    cuda.Memcpy(bytearray(5), bytes(5), 5, cuda.kinds.cudaMemcpyHostToHost)
    cuda.Free(other)
    cuda.FreeHost(cuda.HostAlloc(9, 0))
    cuda.EventDestroy(cuda.EventCreate())
    raw = cuda.raw(cuda.IpcGetMemHandle(address))
    there = peer.succeeds(f"IpcOpenMemHandle(handle({raw}), 1)")
    peer.succeeds(f"Memcpy({there}, b'12', 2, 4)")
    peer.succeeds(f"IpcCloseMemHandle({there})")
    cuda.StreamDestroy(stream)
    copies = {"to_device": 10, "to_host": 5, "on_device": 7, "peer": 3}
    ours = {f"bytes_{direction}": size for direction, size in copies.items()}
    ours |= dict.fromkeys([f"copies_{direction}" for direction in copies], 1)
    ours |= {"allocations": 3, "frees": 1, "live_bytes": 150}
    ours |= dict.fromkeys(["pinned_allocations", "pinned_frees", "streams_created", "streams_destroyed"], 1)
    ours |= dict.fromkeys(["events_created", "events_destroyed"], 1)
    theirs = {"copies_to_device": 1, "bytes_to_device": 2, "handles_opened": 1, "handles_closed": 1}
    each = counts_of_each(cuda.folder)
    assert {name: value for name, value in each[os.getpid()].items() if value} == ours
    assert {name: value for name, value in each[peer.process.pid].items() if value} == theirs
    assert counts(cuda.folder)["bytes_to_device"] == 12


def test_faults(start: Callable[..., Cuda]) -> None:
    cuda = start(FAIL="cudaMalloc:2:cudaErrorMemoryAllocation,cudaMalloc:3,cudaStreamCreate:1,cuInit:1")
    assert cuda.Malloc(1)
    assert cuda.failing("Malloc", 1) == NO_MEMORY
    assert cuda.failing("Malloc", 1) == 999
    assert cuda.Malloc(1)
    assert cuda.failing("StreamCreate") == 999
    assert cuda.driver.cuInit(0) == (cuda.driver.CUresult.CUDA_ERROR_UNKNOWN,)


@pytest.mark.parametrize("wrong", ["cudaMaloc:1", "cudaMalloc", "cudaMalloc:x", "cudaMalloc:1:cudaErrorNone"])
def test_faults_that_are_none(start: Callable[..., Cuda], wrong: str) -> None:
    with pytest.raises(ValueError, match=f"STAND_IN_CUDA_FAIL={wrong}: '{wrong}' is not function:nth"):
        start(FAIL=wrong).Malloc(1)


FORKS = """
import os, sys
from cuda.bindings import runtime
if sys.argv[1] == "used":
    runtime.cudaFree(runtime.cudaMalloc(8)[1])
child = os.fork()
error, address = runtime.cudaMalloc(8)
if not child:
    os._exit(int(error))
assert error == 0 and runtime.cudaFree(address)[0] == 0
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("before", "error"), [("used", FORKED), ("not", OK)])
def test_processes_that_are_forked(cuda: Cuda, before: str, error: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(STAND_INS / "cuda")}
    command = [sys.executable, "-c", FORKS, before]
    assert int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout) == error
    assert sorted(each["allocations"] for each in counts_of_each(cuda.folder).values()) == ([2] if error else [1, 1])
    assert live(cuda.folder) == []


def test_what_nvml_says(cuda: Cuda, peer: Peer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = {"memory": [100 * MIB, 10], "tells processes": True}
    (tmp_path / "gpus.json").write_text(json.dumps([gpu, gpu]))
    monkeypatch.setenv("STAND_IN_GPUS", str(tmp_path / "gpus.json"))
    pynvml = importlib.import_module("pynvml")
    cuda.Malloc(30)
    cuda.Malloc(4)
    peer.succeeds("Malloc(5)")
    assert pynvml.nvmlDeviceGetMemoryInfo(0).used == 10 + 39
    assert pynvml.nvmlDeviceGetMemoryInfo(1).used == 10
    said = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(0)}
    assert said == {os.getpid(): 34, peer.process.pid: 5}


# What exchanges memory with it.


def test_tritons_own_client(cuda: Cuda, peer: Peer) -> None:
    peer("import numpy as np, tritonclient.utils.cuda_shared_memory as shm, tritonclient.utils as utils, base64")
    peer("region = shm.create_shared_memory_region('r', 64, 1)")
    peer("shm.set_shared_memory_region(region, [np.arange(4, dtype=np.float32), np.arange(4, dtype=np.int32)])")
    there = cuda.IpcOpenMemHandle(cuda.handle(peer("base64.b64decode(shm.get_raw_handle(region))")), 1)
    assert cuda.PointerGetAttributes(there).device == 1
    assert np.frombuffer(ctypes.string_at(there, 16), np.float32).tolist() == [0, 1, 2, 3]
    assert np.frombuffer(ctypes.string_at(there + 16, 16), np.int32).tolist() == [0, 1, 2, 3]
    cuda.Memcpy(there, np.array([[7, 8], [9, 10]], np.float32), 16, cuda.default)
    assert peer("shm.get_contents_as_numpy(region, np.float32, [2, 2]).tolist()") == [[7, 8], [9, 10]]
    peer("texts = utils.serialize_byte_tensor(np.array([b'one', b'three'], dtype=np.object_))")
    peer("shm.set_shared_memory_region(region, [texts])")
    assert peer("shm.get_contents_as_numpy(region, np.object_, [2]).tolist()") == [b"one", b"three"]
    peer("import device_arrays")
    peer("shm.set_shared_memory_region_from_dlpack(region, [device_arrays.DeviceArray(np.arange(8))])")
    assert ctypes.string_at(there, 64) == np.arange(8).tobytes()
    peer("view = shm.as_shared_memory_tensor(region, 'INT64', [2, 4])")
    assert peer("device_arrays.numpy_of(view).tolist()") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    peer("del view, texts")
    peer("shm.destroy_shared_memory_region(region)")
    peer("del region")
    assert [each.kind for each in live(cuda.folder)] == [MAPPING]
    cuda.IpcCloseMemHandle(there)


@pytest.mark.parametrize("dtype", ["?", "u1", "i8", "f2", "f4", "c16"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)])
def test_arrays_on_gpus(cuda: Cuda, dtype: str, shape: tuple[int, ...]) -> None:
    device_arrays = importlib.import_module("device_arrays")
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    made = device_arrays.DeviceArray(array, device=1)
    assert made.__dlpack_device__() == (2, 1)
    assert cuda.GetDevice() == 0
    got = device_arrays.numpy_of(made)
    assert (got.dtype, got.shape, got.tolist()) == (array.dtype, array.shape, array.tolist())
    capsule = made.__dlpack__(stream=1, max_version=(1, 0))
    del made
    assert device_arrays.numpy_of(capsule).tolist() == array.tolist()
    assert "used_dltensor" in repr(capsule)
    assert (device_arrays.lent(), live(cuda.folder)) == (0, [])


def test_memory_stays_until_a_capsule_is_destroyed(cuda: Cuda) -> None:
    device_arrays = importlib.import_module("device_arrays")
    capsule = device_arrays.DeviceArray(np.zeros(4)).__dlpack__()
    assert (device_arrays.lent(), len(live(cuda.folder))) == (1, 1)
    del capsule
    assert (device_arrays.lent(), live(cuda.folder)) == (0, [])
    with pytest.raises(ValueError, match="device 1 of DLPack, not on 2"):
        device_arrays.numpy_of(np.zeros(4))
    with pytest.raises(TypeError, match="DLPack has no type for numpy's <U1"):
        device_arrays.DeviceArray(np.array(["a"]))
