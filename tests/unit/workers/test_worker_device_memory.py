"""The server's pools on GPUs between it and its workers: both sides, with their messages, in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuda_process import with_devices
from nerite.core.errors import Internal
from nerite.core.tensor import DeviceBuffer
from nerite.devices import cuda, exchange
from nerite.devices.devices import Devices
from nerite.workers.child import device_memory as child
from nerite.workers.child.device_memory import WorkerDevices
from nerite.workers.host.device_memory import WorkerDeviceMemory
from nerite.workers.ipc import messages

pytestmark = pytest.mark.usefixtures("cuda_process")
KB = 1024
POOL = 64 * KB


class Pair:
    """Both ends. What the server sends arrives at once; what the worker sends, when it is told to."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.asked: list[dict[str, Any]] = []
        self.copies: list[dict[str, Any]] = []
        self.host = WorkerDeviceMemory(devices, self._to_worker)
        self.worker = WorkerDevices(self._to_server)

    def _to_worker(self, frame: bytes) -> None:
        kind, content = read(frame)
        if kind == messages.DEVICE_POOL:
            self.worker.opened(**content)
        else:
            assert kind == messages.DEVICE_GRANT
            self.worker.granted(**content)

    def _to_server(self, frame: bytes) -> None:
        kind, content = read(frame)
        (self.asked if kind == messages.DEVICE_WANTED else self.copies).append(content)

    async def grant(self) -> None:
        """Let the server answer what it was asked for."""
        asked, self.asked = self.asked, []
        for each in asked:
            self.host.wanted(**each)
        await self.devices.thread(0).call(lambda _: None)


def read(frame: bytes) -> tuple[int, dict[str, Any]]:
    _, kind, _ = messages.FRAME.unpack_from(frame)
    return kind, messages.read_json(memoryview(frame)[messages.FRAME.size :])


def with_pair(test: Callable[[Pair], Any], pool: int = POOL) -> None:
    async def run(devices: Devices) -> None:
        await test(Pair(devices))

    with_devices(run, pool_bytes={0: pool, 1: 0})


def tensor(size: int, value: int = 7) -> DeviceBuffer:
    data = np.full(size, value, np.uint8)
    with exchange.stream_on(0) as stream:
        buffer = DeviceBuffer(0, cuda.allocate(size), size, None)
        stream.to_device(buffer.address, data.ctypes.data, size)
        stream.wait()
    return buffer


def test_a_worker_has_room_from_when_it_was_granted() -> None:
    async def test(pair: Pair) -> None:
        assert pair.worker.place(tensor(KB)) is None  # this one goes over the host
        assert pair.asked == [{"device": 0, "size": KB}]
        await pair.grant()
        placed = pair.worker.place(tensor(KB, 9))
        assert placed is not None and not pair.asked
        offset, copy = placed
        base, grant = pair.host.base(0, offset, KB)
        seen = DeviceBuffer(0, base + offset, KB, grant)
        assert bytes(exchange.to_host(seen)) == bytes([9]) * KB
        # The server can hand it to a worker: it is in the pool.
        assert pair.host.place(seen) == (offset, seen)
        assert pair.worker.base(0, offset, KB)[0] + offset == copy.address

    with_pair(test)


def test_room_is_used_again_when_the_tensors_are_gone() -> None:
    async def test(pair: Pair) -> None:
        pair.worker.place(tensor(KB))
        await pair.grant()
        kept = []
        while (placed := pair.worker.place(tensor(KB))) is not None:
            kept.append(placed)
        assert len(kept) == POOL // 8 // KB and len({offset for offset, _ in kept}) == len(kept)
        kept.pop(3)
        gc.collect()
        assert pair.worker.place(tensor(KB)) is not None

    with_pair(test)


def test_a_worker_asks_again_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(pair: Pair) -> None:
        now = [100.0]
        monkeypatch.setattr(child.time, "monotonic", lambda: now[0])
        big = tensor(2 * POOL)
        for _ in range(3):
            assert pair.worker.place(big) is None
        assert len(pair.asked) == 1
        await pair.grant()  # there is no room for it
        assert pair.worker.place(big) is None and not pair.asked
        now[0] += child.PATIENCE
        assert pair.worker.place(big) is None and len(pair.asked) == 1

    with_pair(test)


def test_what_a_dead_worker_had_comes_back_when_its_readers_are_done() -> None:
    async def test(pair: Pair) -> None:
        pair.worker.place(tensor(KB))
        await pair.grant()
        placed = pair.worker.place(tensor(KB, 5))
        pool = pair.devices.pool(0)
        assert placed is not None and pool is not None and pool.used == POOL // 8
        base, grant = pair.host.base(0, placed[0], KB)
        reader = DeviceBuffer(0, base + placed[0], KB, grant)
        pair.host.close()
        del grant
        gc.collect()
        assert pool.used == POOL // 8 and exchange.to_host(reader)[0] == 5
        del reader
        gc.collect()
        assert pool.used == 0
        pair.host.wanted(0, KB)  # what it had asked for
        assert pool.used == 0

    with_pair(test)


def test_a_small_tensor_finds_room_in_a_pool_that_is_nearly_full() -> None:
    async def test(pair: Pair) -> None:
        pair.worker.place(tensor(KB))
        await pair.grant()
        pool = pair.devices.pool(0)
        assert pool is not None
        others = [pool.allocate(size) for size in (POOL // 2, POOL // 4, 7 * KB)]
        kept = [pair.worker.place(tensor(KB)) for _ in range(POOL // 8 // KB)]
        assert all(others) and all(kept)
        assert pair.worker.place(tensor(KB // 2)) is None
        others.pop()
        gc.collect()
        others.append(pool.allocate(4 * KB))  # no eighth of the pool is free, but as much as the tensor needs
        await pair.grant()
        assert pair.worker.place(tensor(KB // 2)) is not None

    with_pair(test)


@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 1), (POOL // 8, 1), (POOL, 1), (1 << 40, 1), (0, POOL // 8 + 1), (POOL // 8 - 1, 2)]
)
def test_a_place_that_a_worker_was_not_granted_is_refused(offset: int, size: int) -> None:
    async def test(pair: Pair) -> None:
        pair.worker.place(tensor(KB))
        await pair.grant()
        assert pair.host.base(0, 0, POOL // 8)[0]
        with pytest.raises(Internal, match="the worker has no part of the pool on GPU 0"):
            pair.host.base(0, offset, size)

    with_pair(test)


def test_memory_outside_the_pool_cannot_be_sent_to_a_worker() -> None:
    async def test(pair: Pair) -> None:
        with pytest.raises(Internal, match="not in the server's pool there"):
            pair.host.place(tensor(KB))

    with_pair(test)


def test_copies_of_a_worker_are_counted_once() -> None:
    async def test(pair: Pair) -> None:
        pair.worker.report_copies()
        pair.copies.clear()
        tensor(KB)
        pair.worker.report_copies()
        pair.worker.report_copies()
        (since,) = pair.copies
        assert since["to_device"] == [1, KB]
        before = cuda.COPIES.totals()["to_device"]
        pair.host.copied(since)
        assert cuda.COPIES.totals()["to_device"] == (before[0] + 1, before[1] + KB)

    with_pair(test)
