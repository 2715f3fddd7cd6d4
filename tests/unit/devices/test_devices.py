"""The threads that make a server's calls to GPUs, its pools there, and the memory of clients."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from subprocess import PIPE
from typing import Any

import pytest

import cuda_counts
from cuda_process import STAND_IN, with_devices
from doubles import samples
from nerite.core.errors import Internal, InvalidArgument
from nerite.devices.devices import Devices
from nerite.devices.metrics import write_device_metrics
from nerite.devices.pools import DevicePool

KB = 1024
CLIENT = """
import sys
from nerite.devices import cuda
cuda.use(0)
print(cuda.export_handle(cuda.allocate(4096)).hex(), flush=True)
sys.stdin.read()
"""


async def opened(devices: Devices, device: int) -> DevicePool | None:
    found: asyncio.Future[DevicePool | None] = asyncio.get_running_loop().create_future()
    devices.with_pool(device, found.set_result)
    return await found


def test_calls_are_made_in_order_and_a_failure_ends_only_itself(cuda_process: Any) -> None:
    async def test(devices: Devices) -> None:
        thread = devices.thread(1)
        made: list[int] = []
        first = asyncio.create_task(thread.call(lambda _: made.append(1)))
        second = asyncio.create_task(thread.call(lambda _: 1 // 0))
        third = asyncio.create_task(thread.call(lambda _: made.append(cuda_process.current)))
        await asyncio.wait([first, second, third])
        assert made == [1, 1]  # the third sees GPU 1 as the current one
        assert isinstance(second.exception(), Internal)

    with_devices(test)


def test_a_gpu_that_is_not_there(cuda_process: Any) -> None:
    async def test(devices: Devices) -> None:
        with pytest.raises(InvalidArgument, match=r"there is no GPU 7; this server has: 0, 1"):
            devices.thread(7)
        assert await opened(devices, 7) is None

    with_devices(test)


def test_a_cancelled_wait_leaves_the_thread_working(cuda_process: Any) -> None:
    async def test(devices: Devices) -> None:
        go = threading.Event()
        waiting = asyncio.create_task(devices.thread(0).call(lambda _: go.wait(10)))
        await asyncio.sleep(0)
        waiting.cancel()
        go.set()
        assert await devices.thread(0).call(lambda _: 5) == 5

    with_devices(test)


def test_a_pool_is_opened_once_for_all_that_wait(cuda_process: Any) -> None:
    async def test(devices: Devices) -> None:
        assert devices.pool(0) is None
        pools = await asyncio.gather(*(opened(devices, 0) for _ in range(5)))
        assert len({id(pool) for pool in pools}) == 1 and pools[0] is devices.pool(0) is not None
        assert pools[0].size == 64 * KB
        assert await opened(devices, 1) is None  # its size is 0

    with_devices(test, pool_bytes={0: 64 * KB, 1: 0})


def test_a_pool_for_which_there_is_no_memory_is_tried_again(
    cuda_process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(devices: Devices) -> None:
        assert await opened(devices, 0) is None
        assert "no pool of" in caplog.text and "GPU 0" in caplog.text
        assert await opened(devices, 0) is None

    with_devices(test, pool_bytes={0: 1 << 50})


def test_a_clients_memory_is_opened_once_and_closed_with_its_last_user(cuda_process: Any) -> None:
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=PIPE, stdout=PIPE, text=True, env=environment())
    assert client.stdout is not None
    handle = bytes.fromhex(client.stdout.readline())

    async def test(devices: Devices) -> None:
        first, second = await asyncio.gather(*(devices.open_client_memory(0, handle) for _ in range(2)))
        assert first is second and first.size == 4 * KB
        assert await devices.open_client_memory(0, handle) is first
        assert len(opened_here(cuda_process)) == 1
        del first, second
        gc.collect()
        await until(lambda: not opened_here(cuda_process))

    with client:
        with_devices(test)
        client.communicate("")


def test_a_call_that_hangs_is_shown_and_logged_once(cuda_process: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    went_on = threading.Event()
    messages: list[str] = []

    async def test(devices: Devices) -> None:
        watch = asyncio.create_task(devices.watch(0.01).run())
        hung = asyncio.create_task(devices.thread(1).call(lambda _: went_on.wait(30)))
        assert await devices.thread(0).call(lambda _: "fine") == "fine"  # the other GPU works
        await until(lambda: "GPU 1 has not completed a call" in caplog.text)
        page = samples(lambda page: write_device_metrics(page, devices))["nerite_device_call_seconds"]
        assert page['gpu="0"'] == 0 and page['gpu="1"'] >= 0.1
        went_on.set()
        await hung
        await until(lambda: "GPU 1 completes calls again" in caplog.text)
        messages.extend(record.message for record in caplog.records)
        watch.cancel()

    with_devices(test)
    assert len(messages) == 2


def opened_here(process: Any) -> list[object]:
    """Return what this process has opened of others."""
    return [each for each in cuda_counts.live(process.folder) if each.pid == os.getpid()]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(STAND_IN), *sys.path])}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
